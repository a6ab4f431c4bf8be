"""Tests that dropout of the GPT is equal in any pipeline, and on tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import chimera, interleaved, one_f_one_b
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gradients

CONFIG = gpt.GPTConfig(vocab=32, layers=2, hidden=16, heads=2, context=8, dropout=0.3, tied=False)


def _tokens(m: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randint(0, 32, (m, 2, 8), generator=numbers) for _ in range(2))
    return inputs, targets


class _Noted:
    """Records the dropout masks, and the random states of attention, while it is active."""

    def __enter__(self) -> _Noted:
        self.was, self.attention = F.dropout, F.scaled_dot_product_attention
        self.whole: list[Tensor] = []
        self.seeds: list[int] = []

        def dropout(x: Tensor, p: float) -> Tensor:
            kept = self.was(torch.ones_like(x), p)
            self.whole.append(kept)
            return x * kept

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            self.seeds.append(torch.default_generator.initial_seed())
            return self.attention(*args, **kwargs)

        F.dropout, F.scaled_dot_product_attention = dropout, attention  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        F.dropout, F.scaled_dot_product_attention = self.was, self.attention


def _tensor_parallel(rank: int) -> Any:
    found = compile(one_f_one_b, PipelineShape(1, 2), tp=2, progress_model="per_edge")
    transport = GlooTransport(found)
    tp = transport.tp_group
    stage = gpt.build_stage(CONFIG, 0, 1, tp=tp)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return gpt.loss(logits, targets, tp)

    shape = Boundary((2, 8, 16))
    executor = Executor(found, 0, {0: stage}, transport, loss=loss, boundary=shape)
    with _Noted() as noted:
        executor.step(*_tokens(2))
    return noted.whole, noted.seeds, gradients([stage])[0]["norm.weight"]


def test_tensor_parallel_ranks_share_what_is_whole_and_have_their_own_of_heads() -> None:
    with _Noted() as noted:
        run_sequential([gpt.build_stage(CONFIG, 0, 1)], *_tokens(2), loss=gpt.loss)
    (whole, seeds, norm), (same, others, norm_too) = run(_tensor_parallel, 2)
    assert len(whole) == 2 * 5 and all(mask.min() == 0 for mask in whole)
    for one, other, alone in zip(whole, same, noted.whole, strict=True):
        assert torch.equal(one, other) and torch.equal(one, alone)
    assert len({*seeds, *others}) == len(seeds) + len(others) == 8
    assert torch.equal(norm, norm_too)


@pytest.mark.parametrize("schedule", [one_f_one_b, interleaved, chimera])
def test_the_gpt_drops_the_same_in_any_pipeline(schedule: Any) -> None:
    shape = {
        one_f_one_b: PipelineShape(4, 3),
        interleaved: PipelineShape(2, 3, 2),
        chimera: PipelineShape(4, 3, placement="mirror"),
    }[schedule]
    four = gpt.GPTConfig(**{**vars(CONFIG), "layers": 4})
    one = run_sequential([gpt.build_stage(four, 0, 1)], *_tokens(3), loss=gpt.loss, seed=2)
    stages = [gpt.build_stage(four, s, 4) for s in range(4)]
    ranks = InProcessExecutor(
        compile(schedule, shape), stages, loss=gpt.loss, boundary=Boundary((2, 8, 16)), seed=2
    )
    assert torch.equal(ranks.step(*_tokens(3), order_seed=5), one)
    quiet = run_sequential([s.eval() for s in stages], *_tokens(3), loss=gpt.loss)
    plain = gpt.GPTConfig(**{**vars(four), "dropout": 0.0})
    assert torch.equal(
        quiet, run_sequential([gpt.build_stage(plain, 0, 1)], *_tokens(3), loss=gpt.loss)
    )
