"""Clamp: the gradient of each stage is clamped by itself, before the step of its rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.passes.communication.gradient_reduction import append
from schedir.passes.pass_types import ExpectedInstructions, Pass, Present


def _each(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(Opcode.Clamp, np.full(program.shape.holders.size, program.trains))


PASSES = (
    Pass(
        "clamp",
        "ends",
        lambda program, options: append(program, Opcode.Clamp, program.shape.stages_of),
        wanted=lambda program, options: program.trains,
        expected=_each,
        order=8,
    ),
)
