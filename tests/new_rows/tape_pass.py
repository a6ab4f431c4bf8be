"""Tape: what each I leaves goes to the host, and comes back before its W."""

from __future__ import annotations

import numpy as np

from schedir.ir.isa.instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, Opcode
from schedir.ir.program import ADDRESS, OP, Program
from schedir.passes.insertion import before, behind
from schedir.passes.pass_types import Pass


def move(program: Program) -> Program:
    """OffloadTape behind each I, and ReloadTape before each W."""
    for new, beside, put in (
        (Opcode.OffloadTape, BACKWARD_INPUT, behind),
        (Opcode.ReloadTape, BACKWARD_WEIGHT, before),
    ):
        at = np.flatnonzero(program.op == beside)
        program = put(program, at, (program.words & ADDRESS)[at] | int(new) << OP)
    return program


PASSES = (Pass("tape", "memory", lambda program, options: move(program)),)
