"""Tests that the dropout of a GPT is equal in any pipeline and on tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import one_f_one_b
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import copy_gradients

CONFIG = gpt.GPTConfig(vocab=32, layers=2, hidden=16, heads=2, context=8, dropout=0.3, tied=False)


def _make_tokens(m: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randint(0, 32, (m, 2, 8), generator=numbers) for _ in range(2))
    return inputs, targets


class _DropoutRecorder:
    """Records the dropout masks, and the random states of attention, while it is active."""

    def __enter__(self) -> _DropoutRecorder:
        self.was, self.attention = F.dropout, F.scaled_dot_product_attention
        self.whole: list[Tensor] = []
        self.seeds: list[int] = []

        def dropout(x: Tensor, p: float) -> Tensor:
            mask = self.was(torch.ones_like(x), p)
            self.whole.append(mask)
            return x * mask

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            self.seeds.append(torch.default_generator.initial_seed())
            return self.attention(*args, **kwargs)

        F.dropout, F.scaled_dot_product_attention = dropout, attention  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        F.dropout, F.scaled_dot_product_attention = self.was, self.attention


def _record_tensor_parallel_step(rank: int) -> Any:
    program = compile(one_f_one_b, PipelineShape(1, 2), tp=2, progress_model="per_edge")
    transport = GlooTransport(program)
    tp = transport.tp_group
    stage = gpt.build_stage(CONFIG, 0, 1, tp=tp)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return gpt.loss(logits, targets, tp)

    shape = Boundary((2, 8, 16))
    executor = Executor(program, 0, {0: stage}, transport, loss=loss, boundary=shape)
    with _DropoutRecorder() as recorder:
        executor.step(*_make_tokens(2))
    return recorder.whole, recorder.seeds, copy_gradients([stage])[0]["norm.weight"]


def test_tensor_parallel_ranks_share_masks_outside_of_attention() -> None:
    with _DropoutRecorder() as recorder:
        run_sequential([gpt.build_stage(CONFIG, 0, 1)], *_make_tokens(2), loss=gpt.loss)
    (masks, seeds, norm), (other_masks, other_seeds, other_norm) = run(
        _record_tensor_parallel_step, 2
    )
    assert len(masks) == 2 * 5 and all(mask.min() == 0 for mask in masks)
    for rank_mask, other_mask, reference_mask in zip(
        masks, other_masks, recorder.whole, strict=True
    ):
        assert torch.equal(rank_mask, other_mask) and torch.equal(rank_mask, reference_mask)
    assert len({*seeds, *other_seeds}) == len(seeds) + len(other_seeds) == 8
    assert torch.equal(norm, other_norm)
