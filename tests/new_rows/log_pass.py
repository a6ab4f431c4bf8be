"""Log: what each forward shows goes to the host behind it, and is logged there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import FORWARD, Opcode
from schedir.ir.program import Program, replace_opcode
from schedir.passes.insertion import insert_after
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery


def log(program: Program) -> Program:
    """ToHost behind each forward, and Log behind that."""
    for new, after in ((Opcode.ToHost, FORWARD), (Opcode.Log, Opcode.ToHost)):
        at = np.flatnonzero(program.op == after)
        program = insert_after(program, at, replace_opcode(program.words[at], new))
    return program


def _both(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(Opcode.ToHost, present(Opcode.Log), "nobody logs it")
    yield ExpectedInstructions(Opcode.Log, present(Opcode.ToHost), "nothing was moved to the host")


PASSES = (Pass("log", "memory", lambda program, options: log(program), list_expected=_both),)
