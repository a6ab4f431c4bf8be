"""Insert copies of what a step changes, so that a checkpoint is written beside the step.

CheckFreq (Mohan et al., FAST 2021, section 4.1) calls the two halves of a checkpoint snapshot and
persist; here the first is an instruction, and the step is what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from schedir.errors import ShapeError
from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import Program, pack
from schedir.passes.insertion import insert_at_positions
from schedir.passes.pass_types import ExpectedInstructions, Mask, Pass, PresenceQuery


def insert_snapshots(program: Program) -> Program:
    """Begin each Stream with the snapshots of its rank's trained stages.

    A copy is under way while forwards and backwards run, for the step alone waits for it.  Of
    several holders of a stage the first has it, whose weights are the others'.  What is frozen does
    not change: it needs none.  Raises ShapeError for a program that does not train.
    """
    if not program.has_backward:
        raise ShapeError(
            "the program has no backward: it changes nothing that could be lost",
            program=program.name,
            hint="leave checkpoint_snapshots out",
            fields=["checkpoint_snapshots"],
        )
    stage = np.arange(program.frozen_stages, program.shape.stages)
    rank = program.shape.replica_ranks[0, stage]
    at = program.offsets[rank]
    return insert_at_positions(program, at, rank, pack(Opcode.Snapshot, stage, 0))


def _mask_first_replicas(program: Program) -> Mask:
    """Whose stages have a snapshot: a mask over the holders of stages."""
    shape = program.shape
    once = np.zeros(shape.replica_ranks.shape, bool)
    once[0, program.frozen_stages :] = program.checkpoint_snapshots and program.has_backward
    return once.reshape(-1)


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    once = np.zeros(len(present(Opcode.Snapshot)), bool)  # of update 0 alone: once in a step
    once[: program.shape.replica_ranks.size] = _mask_first_replicas(program)
    yield ExpectedInstructions(
        Opcode.Snapshot,
        once,
        "one for each trained stage in a step, on its first holder"
        if program.checkpoint_snapshots
        else "the program says 'checkpoint_snapshots no'",
        "one stands at the beginning of its rank's Stream",
    )


PASSES: Final = (
    Pass(
        "snapshots",
        "ends",
        lambda program, options: insert_snapshots(program),
        lambda program, options: (
            program.checkpoint_snapshots and Opcode.Snapshot not in program.used_opcodes
        ),
        _list_expected,
        order=30,  # so they come before all else, also before gathers of weights
    ),
)
