"""Tests that weights drawn by slice are slices of one weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from schedir.models.gpt import GPTConfig, build_stage
from schedir.tensor_parallel import sliced_init
from schedir.tensor_parallel.sliced_init import SlicedInit
from tests.cpu.gloo_processes import run
from tests.cpu.largest_tensor import TensorSizeRecorder

torch.set_num_threads(1)

CONFIG = GPTConfig(vocab=53, layers=1, hidden=16, heads=4, context=8)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    dim=st.integers(0, 1),
    block=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 9), max_size=3),
)
def test_slices_equal_slices_of_full_weight(
    rows: int, columns: int, dim: int, block: int, cuts: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_init, "BLOCK_SIZE", block)
        weight = SlicedInit("0 name", torch.Size((rows, columns)), dim, std=0.5)
        size = weight.shape[dim]
        full = weight.narrow(dim, 0, size)
        ends = sorted(min(cut, size) for cut in cuts)
        for start, end in zip([0, *ends], [*ends, size], strict=True):
            with TensorSizeRecorder() as largest:
                part = weight.narrow(dim, start, end - start)
            assert torch.equal(part, full.narrow(dim, start, end - start))
            line = rows * columns // size
            assert largest.most <= max(part.numel(), block, line)


def test_initial_weights_are_stable_between_versions() -> None:
    stage = build_stage(replace(CONFIG, vocab=13), 0, 1)
    first = stage.get_parameter("embedding.weight")[0, :4]
    expected = [1.8749615178e-02, 9.8568508402e-03, 2.4350345135e-02, -4.0850838559e-05]
    torch.testing.assert_close(first, torch.tensor(expected))


def test_initial_weights_depend_on_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_init, "BLOCK_SIZE", 8)
    weight = SlicedInit("0 name", torch.Size((6, 4)))
    full = weight.narrow(0, 0, 6)
    assert torch.equal(full, weight.narrow(0, 0, 6))
    assert len(full.unique()) == 24  # no block repeats another
    assert not torch.isin(replace(weight, key="1 name").narrow(0, 0, 6), full).any()
    half = replace(weight, dtype=torch.bfloat16, std=0.5).narrow(0, 0, 6)
    assert torch.equal(half, (0.5 * full).bfloat16())


def test_build_stage_uses_device_and_dtype() -> None:
    stage = build_stage(CONFIG, 0, 1, device="meta", dtype=torch.bfloat16)
    tensors = [*stage.parameters(), *stage.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    rounded = build_stage(CONFIG, 0, 1).to(torch.bfloat16)
    low_precision = build_stage(CONFIG, 0, 1, dtype=torch.bfloat16)
    for p, q in zip(low_precision.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(p, q)


BLOCK = 160  # elements


def build_rank_stage(rank: int) -> tuple[dict[str, tuple[Tensor, int | None]], int]:
    """Return a rank's parameters with their shard dimensions, and its largest allocation."""
    with pytest.MonkeyPatch.context() as patch, TensorSizeRecorder() as largest:
        patch.setattr(sliced_init, "BLOCK_SIZE", BLOCK)
        stage = build_stage(CONFIG, 0, 1, tp=dist.group.WORLD)
    parameters = {
        n: (p.detach(), getattr(p, "shard_dim", None)) for n, p in stage.named_parameters()
    }
    return parameters, largest.most


def test_ranks_draw_only_slices_of_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sliced_init, "BLOCK_SIZE", BLOCK)
    full_model = dict(build_stage(CONFIG, 0, 1).named_parameters())
    for ranks in (2, 4):
        results = run(build_rank_stage, ranks)
        for name, full in full_model.items():
            slices, dims = zip(*(parameters[name] for parameters, _ in results), strict=True)
            joined = slices[0] if dims[0] is None else torch.cat(slices, dims[0])
            assert torch.equal(joined[: len(full)], full), name
            assert not joined[len(full) :].any()
        # the feed-forward weight is 16 x 64, and the padded embedding is 54 x 16
        assert {most for _, most in results} == {max(16 * 64, 54 * 16) // ranks}
