"""Tape: what each I leaves goes to the host, and comes back before its W."""

from __future__ import annotations

import numpy as np

from schedir.ir.isa.instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, Opcode
from schedir.ir.program import Program, replace_opcode
from schedir.passes.insertion import insert_after, insert_before
from schedir.passes.pass_types import Pass


def move(program: Program) -> Program:
    """OffloadTape behind each I, and ReloadTape before each W."""
    for new, beside, put in (
        (Opcode.OffloadTape, BACKWARD_INPUT, insert_after),
        (Opcode.ReloadTape, BACKWARD_WEIGHT, insert_before),
    ):
        at = np.flatnonzero(program.op == beside)
        program = put(program, at, replace_opcode(program.words[at], new))
    return program


PASSES = (Pass("tape", "memory", lambda program, options: move(program)),)
