"""Tests of several tensors between stages under `schedir.torch_pipelining.Schedule`.

They have mixed dtypes, and some have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.stage import PipelineStage
from torch.nn.functional import mse_loss

from schedir.schedules.schedule_algebra import F, I, RankSchedule, W
from schedir.torch_pipelining import Schedule
from tests.cpu.drop_in_steps import N_MICROBATCHES, GradientCase, make_step, run_gradient_cases
from tests.cpu.gloo_processes import RankError, run
from tests.cpu.torch_pipelines import WIDTH, make_batch


class Block(nn.Module):
    """Takes hidden states, a table, a mask and positions, and passes the last three on."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.last = first, last

    def forward(self, x: Tensor, *boundary: Tensor) -> Any:
        if self.first:
            rows = torch.arange(len(x))
            boundary = (torch.cos(rows)[:, None].repeat(1, WIDTH), rows % 2 == 0, rows, x * 2)
        table, mask, rows, side = boundary
        hidden = torch.tanh(self.linear(x)) * table + (mask * (rows + 1))[:, None] * 0.1
        side = side + torch.tanh(self.side(1 * hidden))
        if self.last:
            return hidden + side
        return hidden, table, mask, rows, side


class TupleSequential(nn.Sequential):
    def forward(self, *values: Any) -> Any:
        for stage in self:
            values = stage(*values) if isinstance(values, tuple) else stage(values)
        return values


class TableStage(nn.Module):
    """Sends its own table, which does not depend on its inputs."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.first, self.last = first, last

    def forward(self, x: Tensor, *boundary: Tensor) -> Any:
        x = torch.tanh(self.linear(x)) * (1.0 if self.first else boundary[0])
        return x * self.table if self.last else (x, torch.exp(self.table) * 1)


def run_microbatches_in_turn(rank: int, ranks: int, m: int) -> RankSchedule:
    """Return forward and backward of one microbatch after the other, in descending order."""
    return sum((F.at(mb) + I.at(mb) + W.at(mb) for mb in range(m - 1, -1, -1)), 0 * F)


def make_stages(kind: Any, stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return TupleSequential(*(kind(s == 0, s == stages - 1) for s in range(stages)))


# torch's split backward silently leaves out weights that do not depend on the stage's input.
CASES: list[tuple[Any, Any, str, int]] = [
    (Block, "one_f_one_b", "loop", 2),
    (Block, "interleaved", "loop", 4),
    (Block, "zb_h1", "loop", 2),
    (Block, "zb_v", "vee", 4),
    (Block, "dualpipe_v", "vee", 4),
    (TableStage, "zb_h1", "loop", 2),
    (TableStage, "interleaved_zb", "loop", 4),
    (TableStage, run_microbatches_in_turn, "loop", 2),
]


@pytest.fixture(scope="module")
def check_same_gradients() -> Callable[[Any], None]:
    found: dict[Any, GradientCase] = {}
    for k, (kind, schedule, placement, count) in enumerate(CASES):
        stages = make_stages(kind, count)
        if kind is TableStage and count == 2:
            stages[0].requires_grad_(False)  # no input of the second stage needs a gradient
        found[k] = GradientCase(make_step(placement, schedule=schedule), stages, make_batch())
    return run_gradient_cases(found, ranks=2)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_gradients_equal_plain_loop(case: int, check_same_gradients: Any) -> None:
    check_same_gradients(case)


def run_with_wrong_gradient_declaration(rank: int) -> None:
    """Run a stage that wrongly declares that its second output needs no gradient."""
    module, without_gradient = TwoOutputs(rank == 1), torch.empty(2, WIDTH)
    with_gradient = torch.empty(2, WIDTH, requires_grad=True)
    boundary = (with_gradient, without_gradient)
    stage = PipelineStage(
        module, rank, 2, torch.device("cpu"),
        input_args=boundary if rank else without_gradient,
        output_args=with_gradient if rank else boundary,
    )  # fmt: skip
    schedule = Schedule([stage], N_MICROBATCHES, mse_loss, schedule="one_f_one_b")
    x, y = make_batch()
    schedule.step(*(() if rank else (x,)), target=y if rank else None)


class TwoOutputs(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(last)
        self.a, self.b, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: Tensor, *boundary: Tensor) -> Any:
        if self.last:
            return self.a(x) + self.b(boundary[0])
        return self.a(x), self.b(x)


def test_missing_gradient_declaration_is_refused() -> None:
    """torch would not send the gradient, and would not train `b` of the first stage."""
    with pytest.raises(RankError) as caught:
        run(run_with_wrong_gradient_declaration, 2, limit=20)
    assert "output 1 of stage 0 needs a gradient" in str(caught.value)
