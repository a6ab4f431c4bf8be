"""Offloaded: programs whose saved values go to the host, or to its disk, by rows placed by hand."""

from __future__ import annotations

import numpy as np

from schedir import Opcode, Program
from schedir.ir.isa.instructions import FORWARDS, ROWS, Lane, Value
from schedir.ir.program import ADDRESS, OP
from schedir.passes.insertion import before, behind

_USES = tuple(row.op for row in ROWS if Value.SAVED in row.needs and row.lane is Lane.COMPUTE)


def offloaded(program: Program, *, spilled: bool = False) -> Program:
    """All that forwards save goes behind them, and comes back right before it is used."""
    out = [Opcode.Offload, Opcode.OffloadToDisk][: 1 + spilled]
    back = [Opcode.ReloadFromDisk, Opcode.Reload][1 - spilled :]
    for op in reversed(out):
        at = np.flatnonzero(np.isin(program.op, FORWARDS))
        program = behind(program, at, (program.words & ADDRESS)[at] | int(op) << OP)
    for op in back:
        at = np.flatnonzero(np.isin(program.op, _USES))
        _, first = np.unique((program.words & ADDRESS)[at], return_index=True)
        at = np.sort(at[first])
        program = before(program, at, (program.words & ADDRESS)[at] | int(op) << OP)
    return program
