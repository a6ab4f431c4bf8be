"""Tests of assert_same_gradients with Megatron-LM's real schedules over Gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from schedir.testing import assert_same_gradients
from schedir.testing.gradient_comparison import WrongGradients
from tests.cpu.megatron_on_cpu import (
    WIDTH,
    import_megatron,
    initialize_megatron,
    make_chunks,
    skip_without_megatron,
)

skip_without_megatron()


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    import_megatron()


LENGTH, MICROBATCHES = 3, 4


def run_megatron_step(rank: int, ranks: int, model: Any, batch: Any, **settings: Any) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward(batches: Any, chunk: Any) -> Any:
        x, y = next(batches)
        return chunk(x), lambda output: (mse_loss(output, y), {})

    with initialize_megatron(ranks):
        chunks = make_chunks(ranks, [model[s] for s in range(rank, len(model), ranks)], **settings)
        num_chunks = len(chunks) if len(chunks) > 1 else None
        get_forward_backward_func(ranks, num_chunks)(
            forward_step_func=forward, data_iterator=[iter(batch) for _ in chunks], model=chunks,
            num_microbatches=len(batch), seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip


torch.manual_seed(0)
MODEL: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
X, Y = torch.randn(2, MICROBATCHES, LENGTH, 1, WIDTH)
BATCH = [*zip(X, Y, strict=True)]
OVERLAP_SETTINGS: dict[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
assert_same = partial(assert_same_gradients, batch=BATCH, ranks=2, loss_fn=mse_loss)


@pytest.mark.parametrize("stages", [2, 4])
def test_megatron_gradients_are_divided_by_microbatches(stages: int) -> None:
    """With a summed loss, all gradients of 1F1B and interleaved are 4 times too small.

    This is the fault of AReaL PR 1273.
    """
    step = partial(run_megatron_step, **OVERLAP_SETTINGS) if stages > 2 else run_megatron_step
    assert assert_same(step, MODEL[:stages]) < 1e-6
    with pytest.raises(WrongGradients) as caught:
        assert_same(step, MODEL[:stages], reduction="sum")
    (difference,) = caught.value.differences
    assert difference.stages == tuple(range(stages))
    assert difference.has_all_parameters and difference.error == pytest.approx(3 / 4)


def test_wrong_gradients_of_two_rank_interleaving_are_detected() -> None:
    """Messages between two ranks match only by position: NVIDIA/Megatron-LM#750 and #1450.

    Megatron's command line refuses this case, but megatron-core does not.
    """
    with pytest.raises(WrongGradients) as caught:
        assert_same(run_megatron_step, MODEL)
    stages = {stage for difference in caught.value.differences for stage in difference.stages}
    assert stages == {0, 1, 2, 3}
