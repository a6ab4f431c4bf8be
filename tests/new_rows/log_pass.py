"""Log: move a value of each forward to the host, and log it there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import FORWARD, Opcode
from schedir.ir.program import Program, replace_opcode
from schedir.passes.insertion import insert_after
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery


def log(program: Program) -> Program:
    """Insert a ToHost after each forward, and a Log after each ToHost.

    Args:
        program: A program.
    """
    for op, before in ((Opcode.ToHost, FORWARD), (Opcode.Log, Opcode.ToHost)):
        at = np.flatnonzero(program.op == before)
        program = insert_after(program, at, replace_opcode(program.words[at], op))
    return program


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(Opcode.ToHost, present(Opcode.Log), "its value is not logged")
    yield ExpectedInstructions(Opcode.Log, present(Opcode.ToHost), "its value is not on the host")


PASSES = (
    Pass("log", "memory", lambda program, options: log(program), list_expected=_list_expected),
)
