"""Chains of four small stages, and programs of all kinds that run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.isa.instructions import Instr
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from schedir.schedules.schedule_algebra import B, F, RankSchedule

WIDTH = 4
BOUNDARY = Boundary((3, WIDTH))
MICROBATCHES = 4


def make_chain_schedule(ranks: int, stages: int) -> Any:
    """Return a schedule that runs each stage on all microbatches, forward and then backward."""

    def words(r: int, P: int, m: int) -> RankSchedule:
        own = range(stages // ranks)
        down = sum((m * F[j] for j in own[1:]), m * F[0])
        return down + sum((m * B[j] for j in reversed(own[:-1])), m * B[own[-1]])

    return words


FOUR_RANKS = PipelineShape(4, MICROBATCHES)
ONE_RANK = PipelineShape(1, MICROBATCHES, placement=(0, 0, 0, 0))
TWO_RANKS = PipelineShape(2, MICROBATCHES, placement=(0, 0, 1, 1))
PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpipe": partial(compile, gpipe, FOUR_RANKS),
    "1f1b": partial(compile, one_f_one_b, FOUR_RANKS),
    "1f1b, fewest slots": partial(compile, one_f_one_b, FOUR_RANKS, buffer_sharing="minimal"),
    "zb_h1": partial(compile, zb_h1, FOUR_RANKS),
    "interleaved": partial(compile, interleaved, PipelineShape(2, MICROBATCHES, 2)),
    "one rank": partial(compile, make_chain_schedule(1, 4), ONE_RANK),
    "two stages per rank": partial(compile, make_chain_schedule(2, 4), TWO_RANKS),
    "recomputed": partial(compile, one_f_one_b, FOUR_RANKS, recompute="all"),
    "recomputed on one rank": partial(
        compile, make_chain_schedule(1, 4), ONE_RANK, recompute="all"
    ),
    "offloaded": partial(compile, one_f_one_b, FOUR_RANKS, offload="all"),
    "offloaded on one rank": partial(compile, make_chain_schedule(1, 4), ONE_RANK, offload="all"),
}
ON_ONE_RANK = [name for name in PROGRAMS if "one rank" in name]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def make_stages(
    first: Callable[[], nn.Module], *others: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Make four stages: the given ones, and a `Layer` for each that is missing."""
    torch.manual_seed(0)
    own = [first(), *(make() for make in others)]
    own += [Layer() for _ in range(4 - len(own))]
    for stage in own:
        make_backward_splittable(stage)
    return own


def make_batch(m: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, m, 3, WIDTH, generator=numbers)
    return x, target


def make_executor(program: Program, stages: list[nn.Module], **how: Any) -> InProcessExecutor:
    usual: dict[str, Any] = {"loss": squared_error, "boundary": BOUNDARY}
    return InProcessExecutor(program, stages, **usual | how)


def get_failed_instruction(error: ExecutionError) -> Instr:
    """Return the instruction that failed."""
    found = error.sites[0].instr
    assert isinstance(found, Instr)
    return found
