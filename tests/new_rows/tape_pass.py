"""Tape: move deferred weight gradients to the host after each I, and back before each W."""

from __future__ import annotations

import numpy as np

from schedir.ir.isa.instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, Opcode
from schedir.ir.program import Program, replace_opcode
from schedir.passes.insertion import insert_after, insert_before
from schedir.passes.pass_types import Pass


def move(program: Program) -> Program:
    """Insert an OffloadTape after each I, and a ReloadTape before each W.

    Args:
        program: A program.
    """
    for op, compute_op, insert in (
        (Opcode.OffloadTape, BACKWARD_INPUT, insert_after),
        (Opcode.ReloadTape, BACKWARD_WEIGHT, insert_before),
    ):
        at = np.flatnonzero(program.op == compute_op)
        program = insert(program, at, replace_opcode(program.words[at], op))
    return program


PASSES = (Pass("tape", "memory", lambda program, options: move(program)),)
