"""Run new instructions: the bits must be those of the reference, in every legal order.

    python run_checks.py NAMES...

It runs in a copy of the tree that has the rows. Each of NAMES is a list that commas separate. All
ranks are in one process, except for `compress`.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape, Program
from schedir.runtime import (
    Boundary,
    Executor,
    GlooTransport,
    InProcessExecutor,
    SharedMemoryTransport,
    run_sequential,
)
from schedir.schedules import dualpipe_v, interleaved, one_f_one_b, zb_h1
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from schedir.transports.local_processes import run_processes
from tests.cpu.tiny_stages import have_same_bits
from tests.new_rows import NEW


class DropoutStage(nn.Module):
    """A stage with random numbers, whose float64 output float32 can represent."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.25).float().double()


def run(program: Program) -> InProcessExecutor:
    """Run two optimizer steps of a program in random legal orders, and compare the reference."""
    stages = [DropoutStage(stage) for stage in make_tiny_stages(program.shape.stages)]
    plain = deepcopy(stages)
    step = torch.optim.SGD([p for stage in plain for p in stage.parameters()], lr=0.1)
    boundary = Boundary((2, WIDTH), torch.float64)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=boundary,
                      optimizer=lambda own: torch.optim.SGD(own, lr=0.1))  # fmt: skip
    for k in range(2):
        x, y = make_batch(program.shape.microbatches, k)
        total = ranks.step(x, y, order_seed=k)
        step.zero_grad()
        assert torch.equal(
            total, run_sequential(plain, x, y, loss=squared_error, program=program, step=k)
        )
        step.step()
        states = [[(p, p.grad) for s in each for p in s.parameters()] for each in (stages, plain)]
        assert have_same_bits(*states)
    return ranks


def compile_for_processes(tp: int, options: dict[str, Any]) -> Program:
    shape = PipelineShape(2, 4)
    return schedir.compile(one_f_one_b, shape, tp=tp, progress_model="per_edge", **options)


def _on_rank(process: int, transport: type[GlooTransport], tp: int, options: dict[str, Any]) -> Any:
    """Return the number, the losses and the gradients of a rank after a step in this process."""
    torch.set_num_threads(1)
    program = compile_for_processes(tp, options)
    ends = transport(program)
    own = {s: DropoutStage(stage) for s, stage in enumerate(make_tiny_stages(2)) if s == ends.rank}
    executor = Executor(program, ends.rank, own, ends, loss=squared_error,
                        boundary=Boundary((2, WIDTH), torch.float64))  # fmt: skip
    total = executor.step(*make_batch(4, 0))
    grads = [p.grad for stage in own.values() for p in stage.parameters()]
    return ends.rank, total if ends.rank else None, grads


def run_in_processes(options: dict[str, Any]) -> None:
    """Compare a step in real processes with the reference, over Gloo and over shared memory."""
    for transport, tp in (GlooTransport, 2), (SharedMemoryTransport, 1):
        program = compile_for_processes(tp, options)
        plain = [DropoutStage(stage) for stage in make_tiny_stages(2)]
        wanted = run_sequential(plain, *make_batch(4, 0), loss=squared_error, program=program)
        for rank, total, grads in run_processes(
            _on_rank, 2 * tp, transport, tp, options, context=get_context("fork")
        ):
            assert total is None or torch.equal(total, wanted)
            assert have_same_bits(grads, [p.grad for p in plain[rank].parameters()])


def main(names: str) -> None:
    rows = names.split(",")
    options: dict[str, Any] = dict.fromkeys(rows, True)
    options |= {"recompute": "all"} if "recompute" in rows else {}
    cases = [(one_f_one_b, PipelineShape(3, 4)), (zb_h1, PipelineShape(2, 4)),
             (interleaved, PipelineShape(2, 4, 2)),
             (dualpipe_v, PipelineShape(2, 4, 2, "vee"))]  # fmt: skip
    slots = "minimal" if len(rows) > 1 else None
    for schedule, shape in cases:
        program = schedir.compile(
            schedule, shape, progress_model="per_edge", buffer_sharing=slots, **options
        )
        assert program.used_opcodes & NEW
        run(program)
        slots = None if slots else "minimal"
    if rows == ["compress"]:
        run_in_processes(options)
    if "judge" in rows:
        from schedir.runtime.handlers.judge_handlers import VERDICTS

        assert [float(v) for v in VERDICTS] == [0.0] * (3 + 2 + 2 + 2)
        VERDICTS.clear()


if __name__ == "__main__":
    for names in sys.argv[1:]:
        main(names)
