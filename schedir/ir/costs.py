"""Costs: how long each instruction takes, in any one unit of time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError
from schedir.ir.ops import LATE, ROWS, SPLITS, WHOLES, Opcode
from schedir.ir.per_stage import PerStage, by_stage, per_stage, with_fields

Cost = PerStage

# Which field prices which instruction.  A receive ends with its send and costs nothing itself.
FIELD: Final = {row.op: row.cost for row in ROWS if row.cost}


@dataclass(frozen=True)
@with_fields(FIELD.values())
class Costs:
    """Time of each instruction: a number, or one number per stage.

    `B` defaults to I + W, and `FB`, the time of a forward run together with a B or an I, to the
    sum of both.  `send` is the time from a transfer's start to its end; it occupies the queues of
    both ranks, never their compute.  `reduce_grads` is what is left of it at its turn: executors
    begin it under the last backward, and with the time of a whole one a prediction is too long by
    what that hides.  All else is free unless told.  For instructions that are not of a stage (step,
    reduce_norm) the k-th number is rank k's.

    Raises CostsError for a cost that is negative or not finite.

    >>> from schedir import Costs, Plan, compile, schedules, simulate
    >>> program = compile(schedules.gpipe, Plan(ranks=2, microbatches=4))
    >>> simulate(program, Costs(F=1, B=2)).span
    15.0
    >>> simulate(program, Costs(F=1, B=2, send=0.5)).span
    16.0
    >>> simulate(program, Costs(F=(1, 1.5), B=(2, 3))).span  # one for each stage
    21.0
    """

    F: Cost = 1.0
    I: Cost = 1.0
    W: Cost = 1.0
    B: Cost | None = None
    FB: Cost | None = None
    send: Cost = 0.0
    step: Cost = 0.0
    reduce_grads: Cost = 0.0
    reduce_holders: Cost = 0.0
    reduce_tied: Cost = 0.0
    reduce_norm: Cost = 0.0
    scatter: Cost = 0.0
    gather: Cost = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            object.__setattr__(self, f.name, per_stage(f"cost {f.name}", value, CostsError))

    def table(self, stages: int) -> NDArray[np.float64]:
        """Cost by (opcode, stage), shape (opcodes, stages)."""
        table = np.zeros((len(Opcode), stages))
        for op, name in FIELD.items():
            if getattr(self, name):  # all else is free
                table[op] = self._row(name, stages)
        if self.B is None:
            table[[*WHOLES]] = table[[*SPLITS]] + table[[*LATE]]
        return table

    def together(self, stages: int) -> NDArray[np.float64] | None:
        """Cost of a forward run together with a backward, by the forward's stage, if given."""
        return None if self.FB is None else self._row("FB", stages)

    def _row(self, name: str, stages: int) -> NDArray[np.float64]:
        return by_stage(f"cost {name}", getattr(self, name), stages, CostsError)
