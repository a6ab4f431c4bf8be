"""Judge: all ranks come to one verdict on the gradients of an update before any of them steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.passes.communication.gradient_reduction import append_to_updates
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery


def judge(program: Program) -> Program:
    """A Judge at the end of every update of every rank."""
    return append_to_updates(program, Opcode.Judge, [[0]] * program.shape.ranks)


def _all(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(
        Opcode.Judge, np.full(program.shape.ranks, present(Opcode.Judge).any())
    )


PASSES = (
    Pass(
        "judge",
        "ends",
        lambda program, options: judge(program),
        should_run=lambda program, options: bool(options.extra_options.get("judge")),
        list_expected=_all,
        option_names=("judge",),
        opcodes=(Opcode.Judge,),
        order=6,  # behind the norm
    ),
)
