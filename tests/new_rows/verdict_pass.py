"""Judge: all ranks come to one verdict on the gradients of an update before any of them steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.passes.communication.gradient_reduction import append
from schedir.passes.pass_types import ExpectedInstructions, Pass, Present


def judge(program: Program) -> Program:
    """A Judge at the end of every update of every rank."""
    return append(program, Opcode.Judge, [[0]] * program.shape.ranks)


def _all(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(
        Opcode.Judge, np.full(program.shape.ranks, present(Opcode.Judge).any())
    )


PASSES = (
    Pass(
        "judge",
        "ends",
        lambda program, options: judge(program),
        wanted=lambda program, options: bool(options.more.get("judge")),
        expected=_all,
        options=("judge",),
        order=6,  # behind the norm
    ),
)
