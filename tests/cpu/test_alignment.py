"""Tests that bits do not depend on addresses: inputs of a stage begin on a 64-byte line.

MKL chooses the order of a sum by the alignment of its operands (docs/explanation/same-bits.md), so
a value that the reference has at an aligned address must be aligned in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.ir.program import Program
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import interleaved, interleaved_zb
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cases import pairs
from tests.cpu.gloo_processes import run
from tests.cpu.stage_chains import squared_error as loss

ROWS, WIDTH, EXTRA = 3, 5, 7  # odd, so that a tensor packed after another one is not aligned
BOUNDARY = (Boundary((ROWS, WIDTH)), Boundary((EXTRA,)))
LINE = 64


class _Addresses(torch.autograd.Function):
    """The identity, which records the addresses of its gradient and of its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[int]) -> Tensor:
        ctx.log = log
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.log += [t.data_ptr() % LINE for t in (*grads, *ctx.saved_tensors)]
        return grads[0], None


class Stage(nn.Module):
    """Takes and returns two tensors of odd sizes, and records the addresses of its operands."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.first, self.last = stage == 0, stage == stages - 1
        self.shift = nn.Parameter(torch.randn(3))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(EXTRA, EXTRA)
        self.log: list[int] = []

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if y is None:
            y = x.new_ones(EXTRA) * self.shift.sum()
        operands = [*self.parameters()] + ([] if self.first else [x, y])
        self.log += [t.data_ptr() % LINE for t in operands]
        x, y = torch.tanh(self.linear(x)) + self.shift.sum(), torch.tanh(self.extra(y))
        x, y = (_Addresses.apply(t, self.log) for t in (x, y))  # type: ignore[no-untyped-call]
        return x * y.mean() if self.last else (x, y)


def find_unaligned_offsets(
    program: Program, transport: Any = None, seed: int | None = None
) -> list[int]:
    """Run two steps, and return the offsets in bytes of tensors that do not begin on a line."""
    count = program.shape.stages
    stages = {s: Stage(s, count) for s in range(count)}
    for stage in stages.values():
        make_backward_splittable(stage)
    options: dict[str, Any] = {"loss": loss, "boundary": BOUNDARY}
    x, y = torch.randn(2, 4, ROWS, WIDTH)
    step: Callable[..., object]
    if transport is None:
        step = partial(InProcessExecutor(program, stages, **options).step, order_seed=seed)
    else:
        stages = {s: stages[s] for s in program.shape.stages_on_rank[transport.rank]}
        step = Executor(program, transport.rank, stages, transport, **options).step
    for _ in range(2):
        step(x, y)
    log = [address for stage in stages.values() for address in stage.log]
    assert log
    return [address for address in log if address]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "recompute": {"recompute": "all"},
    "offload": {"offload": "all"},
}


@pytest.mark.parametrize(
    ("schedule", "option", "seed"), pairs([interleaved, interleaved_zb], [*OPTIONS], [None, 0])
)
def test_stage_inputs_are_aligned_in_one_process(
    schedule: Any, option: str, seed: int | None
) -> None:
    program = schedir.compile(schedule, PipelineShape(2, 4, 2), **OPTIONS[option])
    assert not find_unaligned_offsets(program, seed=seed)


def _find_unaligned_offsets_by_transport(rank: int) -> dict[str, list[int]]:
    offsets = {}
    for zero in range(4):
        program = schedir.compile(
            interleaved_zb, PipelineShape(2, 4, 2), dp=2, zero=zero, progress_model="per_edge"
        )
        offsets[f"Gloo, ZeRO {zero}"] = find_unaligned_offsets(program, GlooTransport(program))
    program = schedir.compile(interleaved_zb, PipelineShape(4, 4, 1), progress_model="per_edge")
    offsets["Shared"] = find_unaligned_offsets(program, SharedMemoryTransport(program))
    return offsets


def test_stage_inputs_are_aligned_between_processes() -> None:
    for offsets in run(_find_unaligned_offsets_by_transport, 4):
        assert not any(offsets.values()), offsets
