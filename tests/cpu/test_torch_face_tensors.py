"""Several tensors between stages, of mixed types, some without gradient, behind torch's face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.ir.plan import Plan
from schedir.testing.gradients import assert_same_gradients
from tests.cpu.faces import MB, made, run, step_of
from tests.cpu.torchs import WIDTH, Step, batch

Given = tuple[Tensor, ...]


class Block(nn.Module):
    """Takes hidden numbers, and with them a table, a mask and positions, and hands these on."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.last = first, last

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        if self.first:
            rows = torch.arange(len(x))
            more = (torch.cos(rows)[:, None].expand(-1, WIDTH), rows % 2 == 0, rows, x * 2)
        table, mask, rows, side = more
        hidden = torch.tanh(self.linear(x)) * table + (mask * (rows + 1))[:, None] * 0.1
        side = side + torch.tanh(self.side(hidden))
        if self.last:
            return hidden + side
        return hidden, table, mask, rows, side


def blocks(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return Whole(*(Block(s == 0, s == stages - 1) for s in range(stages)))


class Whole(nn.Sequential):
    def forward(self, *given: Any) -> Any:
        for part in self:
            given = part(*given) if isinstance(given, tuple) else part(given)
        return given


@pytest.mark.parametrize(
    ("name", "placement", "stages"),
    [("one_f_one_b", "loop", 2), ("interleaved", "loop", 4), ("zb_h1", "loop", 2)]
    + [("zb_v", "vee", 4), ("dualpipe_v", "vee", 4)],
)
def test_mixed_types(name: str, placement: str, stages: int) -> None:
    step = step_of(placement, schedule=name)
    assert_same_gradients(
        step, blocks(stages), batch(), ranks=2, microbatches=MB, loss_fn=mse_loss
    )
