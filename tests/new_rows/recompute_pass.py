"""Recompute: keep of a forward its input only, and run it again just before the backward."""

from __future__ import annotations

import numpy as np

from schedir.ir.ops import BACKWARDS, FORWARDS, Opcode
from schedir.ir.program import ADDRESS, OP, Program
from schedir.passes.insert import before
from schedir.passes.record import Pass


def recompute(program: Program) -> Program:
    """R before each backward that does not follow its own forward at once."""
    op, address = program.op, program.words & ADDRESS
    at = np.flatnonzero(np.isin(op, BACKWARDS))
    own = np.isin(op[at - 1], FORWARDS) & (address[at - 1] == address[at])
    at = at[~own]
    return before(program, at, address[at] | int(Opcode.Recompute) << OP)


PASSES = (
    Pass(
        "recompute",
        "draft",
        lambda program, options: recompute(program),
        wanted=lambda program, options: bool(options.more.get("recompute")),
        options=("recompute",),
    ),
)
