"""Insert a copy of each stage's weights and optimizer state, for checkpoints during the step.

CheckFreq divides a checkpoint into "snapshot", a copy in memory, and "persist", the write to the
disk. In schedir, the snapshot is an instruction, and the optimizer step waits for it.

References:
    Mohan et al., "CheckFreq", FAST 2021, section 4.1.
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
    """Insert the snapshots of a rank's trained stages at the start of its Stream.

    A copy runs during forwards and backwards, because only the optimizer step waits for it. If a
    stage has several stage replicas, only the first replica has a snapshot, because all replicas
    have the same weights. Frozen stages do not change, so they have no snapshots.

    Args:
        program: The program.

    Raises:
        ShapeError: The program does not train.
    """
    if not program.has_backward:
        raise ShapeError(
            "checkpoint_snapshots needs a program that trains: this program has no backward",
            program=program.name,
            hint="leave checkpoint_snapshots out",
            fields=["checkpoint_snapshots"],
        )
    stage = np.arange(program.frozen_stages, program.shape.stages)
    rank = program.shape.replica_ranks[0, stage]
    positions = program.offsets[rank]
    return insert_at_positions(program, positions, rank, pack(Opcode.Snapshot, stage, 0))


def _mask_first_replicas(program: Program) -> Mask:
    """Return a mask of the stage replicas that have a snapshot."""
    shape = program.shape
    required = np.zeros(shape.replica_ranks.shape, bool)
    required[0, program.frozen_stages :] = program.checkpoint_snapshots and program.has_backward
    return required.reshape(-1)


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    # A program has snapshots in update 0 only.
    required = np.zeros(len(present(Opcode.Snapshot)), bool)
    required[: program.shape.replica_ranks.size] = _mask_first_replicas(program)
    yield ExpectedInstructions(
        Opcode.Snapshot,
        required,
        "a step has one snapshot for each trained stage, on the first replica of the stage"
        if program.checkpoint_snapshots
        else "the program has 'checkpoint_snapshots no'",
        "place it at the beginning of the Stream",
    )


PASSES: Final = (
    Pass(
        "snapshots",
        "ends",
        lambda program, options: insert_snapshots(program),
        should_run=lambda program, options: (
            program.checkpoint_snapshots and Opcode.Snapshot not in program.used_opcodes
        ),
        list_expected=_list_expected,
        order=30,  # runs last, so that snapshots are first in the Stream, even before unshards
    ),
)
