"""What must hold of a new row when it runs: the bits of the reference, in any legal order.

    python runs.py NAMES

In a copy that has the rows, all ranks in one process.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import schedir
from schedir import Plan, Program
from schedir.runtime import Boundary, InProcess, reference
from schedir.schedules import dualpipe_v, interleaved, one_f_one_b, zb_h1
from schedir.testing.tiny import WIDTH, batch, loss, tiny_stages


class Noisy(nn.Module):
    """A stage that draws numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), 0.25)


def run(program: Program) -> InProcess:
    """Two optimizer steps of a program, in orders that a seed picks, beside the reference."""
    stages = [Noisy(stage) for stage in tiny_stages(program.plan.stages)]
    plain = deepcopy(stages)
    step = torch.optim.SGD([p for stage in plain for p in stage.parameters()], lr=0.1)
    boundary = Boundary((2, WIDTH), torch.float64)
    ranks = InProcess(program, stages, loss=loss, boundary=boundary,
                      optimizer=lambda own: torch.optim.SGD(own, lr=0.1))  # fmt: skip
    for k in range(2):
        x, y = batch(program.plan.microbatches, k)
        total = ranks.step(x, y, seed=k)
        step.zero_grad()
        assert torch.equal(total, reference(plain, x, y, loss=loss, program=program, step=k))
        step.step()
        for one, other in zip(stages, plain, strict=True):
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                assert torch.equal(p.grad, q.grad) and torch.equal(p, q)
    return ranks


def main(names: str) -> None:
    rows = names.split(",")
    options: dict[str, Any] = {{"verdict": "judge"}.get(name, name): True for name in rows}
    options |= {"recompute": "all"} if "recompute" in rows else {}
    cases = [(one_f_one_b, Plan(3, 4)), (zb_h1, Plan(2, 4)), (interleaved, Plan(2, 4, 2)),
             (dualpipe_v, Plan(2, 4, 2, "vee"))]  # fmt: skip
    for schedule, plan in cases:
        for slots in (None, "fewest"):
            program = schedir.compile(schedule, plan, model="edge", slots=slots, **options)
            assert program.ops & {int(op) for op in schedir.Opcode if op >= schedir.Opcode["Stash"]}
            run(program)
    if "verdict" in rows:
        from schedir.runtime.verdict_handlers import VERDICTS

        assert [float(v) for v in VERDICTS] == [0.0] * 2 * (3 + 2 + 2 + 2)


if __name__ == "__main__":
    main(sys.argv[1])
