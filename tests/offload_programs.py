"""Programs with activation offload whose moves are placed by hand."""

from __future__ import annotations

import numpy as np

from schedir import Opcode, Program
from schedir.ir.isa.instructions import FORWARD_OPS, INSTRUCTIONS, Lane, Value
from schedir.ir.program import ADDRESS_MASK, OP_SHIFT
from schedir.passes.insertion import insert_after, insert_before

_USES = tuple(
    row.op for row in INSTRUCTIONS if Value.SAVED in row.needs and row.lane is Lane.COMPUTE
)


def offload_everything(program: Program, *, spilled: bool = False) -> Program:
    """Offload all saved activations right after their forward, and reload them before their use."""
    out = [Opcode.Offload, Opcode.OffloadToDisk][: 1 + spilled]
    back = [Opcode.ReloadFromDisk, Opcode.Reload][1 - spilled :]
    for op in reversed(out):
        at = np.flatnonzero(np.isin(program.op, FORWARD_OPS))
        program = insert_after(
            program, at, (program.words & ADDRESS_MASK)[at] | int(op) << OP_SHIFT
        )
    for op in back:
        at = np.flatnonzero(np.isin(program.op, _USES))
        _, first = np.unique((program.words & ADDRESS_MASK)[at], return_index=True)
        at = np.sort(at[first])
        program = insert_before(
            program, at, (program.words & ADDRESS_MASK)[at] | int(op) << OP_SHIFT
        )
    return program
