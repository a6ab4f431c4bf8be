"""Clamp: clamp the gradient of each stage, before the optimizer step of its rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program
from schedir.passes.communication.gradient_reduction import append_to_updates
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    yield ExpectedInstructions(
        Opcode.Clamp, np.full(program.shape.replica_ranks.size, program.has_backward)
    )


PASSES = (
    Pass(
        "clamp",
        "ends",
        lambda program, options: append_to_updates(
            program, Opcode.Clamp, program.shape.stages_on_rank
        ),
        should_run=lambda program, options: program.has_backward,
        list_expected=_list_expected,
        order=8,
    ),
)
