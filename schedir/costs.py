"""Costs: how long each instruction takes, in any one unit of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError
from schedir.ops import Opcode

Cost = float | tuple[float, ...]

# Which field prices which instruction.  A receive ends with its send and costs nothing itself.
FIELD = {
    Opcode.Forward: "F",
    Opcode.Backward: "B",
    Opcode.BackwardInput: "I",
    Opcode.BackwardWeight: "W",
    Opcode.SendAct: "send",
    Opcode.SendGrad: "send",
    Opcode.Scatter: "scatter",
    Opcode.ScatterGrad: "scatter",
    Opcode.Gather: "gather",
    Opcode.GatherGrad: "gather",
    Opcode.ReduceGrads: "reduce_grads",
    Opcode.ReduceHolders: "reduce_holders",
    Opcode.ReduceTied: "reduce_tied",
    Opcode.ReduceNorm: "reduce_norm",
    Opcode.OptimizerStep: "step",
}


@dataclass(frozen=True)
class Costs:
    """Time of each instruction: a number, or one number per stage.

    `B` defaults to I + W, and `FB`, the time of a forward run together with a B or an I, to the
    sum of both.  `send` is the time from a transfer's start to its end; it occupies the queues of
    both ranks, never their compute.  All else is free unless told.  For instructions that are not
    of a stage (step, reduce_norm) the k-th number is rank k's.

    Raises CostsError for a cost that is negative or not finite.
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
            try:
                if isinstance(value, str | bytes):
                    raise TypeError
                cost = tuple(map(float, value)) if isinstance(value, Iterable) else float(value)
            except (TypeError, ValueError):
                raise CostsError(
                    f"cost {f.name} must be a number or one per stage, not {value!r:.60}"
                ) from None
            bad = [c for c in np.atleast_1d(cost) if not 0 <= c < np.inf]
            if bad or cost == ():
                raise CostsError(
                    f"cost {f.name} must be finite and not negative, not "
                    f"{bad[0] if bad else 'empty'}"
                )
            object.__setattr__(self, f.name, cost)

    def table(self, stages: int) -> NDArray[np.float64]:
        """Cost by (opcode, stage), shape (opcodes, stages)."""
        table = np.zeros((len(Opcode), stages))
        for op, name in FIELD.items():
            if getattr(self, name) is not None:
                table[op] = self._row(name, stages)
        if self.B is None:
            table[Opcode.Backward] = table[Opcode.BackwardInput] + table[Opcode.BackwardWeight]
        return table

    def together(self, stages: int) -> NDArray[np.float64] | None:
        """Cost of a forward run together with a backward, by the forward's stage, if given."""
        return None if self.FB is None else self._row("FB", stages)

    def _row(self, name: str, stages: int) -> NDArray[np.float64]:
        row = np.asarray(getattr(self, name), float)
        if row.ndim and len(row) != stages:
            raise CostsError(f"cost {name} has {len(row)} numbers for {stages} stages")
        return np.broadcast_to(row, (stages,))
