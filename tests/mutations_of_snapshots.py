"""Mutations of snapshots, and of the steps that need them."""

from __future__ import annotations

from schedir.ir.isa.instructions import Opcode
from schedir.ir.program import STAGE_SHIFT
from tests.edits import MUTATIONS, Edit, at, mb, move, move_to_other_rank, pull, push, stage, word

O = Opcode
_EARLIER_MUTATIONS = {*MUTATIONS}


@at(O.Snapshot)
def drop_snapshot(e: Edit) -> None:
    pull(e.own, e.at)


@at(O.Snapshot)
def duplicate_snapshot(e: Edit) -> None:
    push(e.own, e.rng.randint(0, len(e.own)), e.word)


@at(O.Snapshot)
def move_snapshot(e: Edit) -> None:
    """Move a snapshot anywhere. This is legal before the step."""
    move(e.own, e.at, e.rng.randint(0, len(e.own)))


@at(O.Snapshot)
def snapshot_after_step(e: Edit) -> None:
    move(e.own, e.at, len(e.own))


@at(O.OptimizerStep)
def step_before_snapshot(e: Edit) -> bool | None:
    if not (found := e.here(O.Snapshot)) or mb(e.word):
        return False
    move(e.own, e.at, e.rng.choice(found))
    return None


@at(O.Snapshot)
def snapshot_on_other_rank(e: Edit) -> bool | None:
    return move_to_other_rank(e)


@at(O.Snapshot)
def change_stage_of_snapshot(e: Edit) -> None:
    new = e.rng.choice(
        [*e.program.shape.stages_on_rank[e.rank], *range(e.program.shape.stages + 1)]
    )
    e.put(e.word & ~(0xFFFF << STAGE_SHIFT) | new << STAGE_SHIFT)


@at(O.Snapshot)
def change_update_of_snapshot(e: Edit) -> None:
    """Change the update of a snapshot. Only the first update has snapshots."""
    e.put(word(O.Snapshot, stage(e.word), e.rng.randint(0, 2)))


@at(O.Forward)
def insert_snapshot(e: Edit) -> None:
    """Insert a snapshot of any stage, also of a frozen stage or of a second replica."""
    push(e.own, e.at, word(O.Snapshot, stage(e.word)))


# The mutations that need a program with snapshots.
SNAPSHOT_MUTATIONS = tuple(name for name in MUTATIONS if name not in _EARLIER_MUTATIONS)
