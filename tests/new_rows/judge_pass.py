"""Judge: all ranks decide together whether the gradients of an update are finite."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.passes.communication.gradient_reduction import append_to_updates
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery


def judge(program: Program) -> Program:
    """Append a Judge to every update of every rank.

    Args:
        program: A program whose gradients are reduced.
    """
    return append_to_updates(program, Opcode.Judge, [[0]] * program.shape.ranks)


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    """Expect a Judge on every rank, if there is one on any rank."""
    yield ExpectedInstructions(
        Opcode.Judge, np.full(program.shape.ranks, present(Opcode.Judge).any())
    )


PASSES = (
    Pass(
        "judge",
        "ends",
        lambda program, options: judge(program),
        should_run=lambda program, options: bool(options.extra_options.get("judge")),
        list_expected=_list_expected,
        option_names=("judge",),
        opcodes=(Opcode.Judge,),
        order=6,  # after the norm
    ),
)
