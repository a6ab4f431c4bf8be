"""Mutations of stage segments, of microbatch chunks, and of collectives between segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, Lane, Opcode, Scope
from tests.edits import MUTATIONS, Edit, at, mb, move, pull, push, stage, whole, with_op, word

# Tensor-parallel collectives per microbatch, and all-to-alls of experts.
SEGMENT_COLLECTIVES = tuple(
    row.op
    for row in INSTRUCTIONS
    if row.lane in (Lane.TP, Lane.EP) and row.scope is Scope.MICROBATCH
)
_EARLIER_MUTATIONS = {*MUTATIONS}


def _change_address(e: Edit) -> None:
    """Change the current instruction to an adjacent stage or to a random microbatch."""
    s, m = stage(e.word), mb(e.word)
    if e.rng.random() < 0.5:
        s = max(s + e.rng.choice([-1, 1]), 0)
    else:
        m = e.rng.randrange(e.program.shape.microbatches)
    e.put(word(Opcode(e.word >> 48 & 0xFF), s, m))


@at(*SEGMENT_COLLECTIVES)
def drop_segment_collective(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*SEGMENT_COLLECTIVES)
def duplicate_segment_collective(e: Edit) -> None:
    push(e.own, e.at + e.rng.randint(0, 3), e.word)


@at(*SEGMENT_COLLECTIVES)
def move_segment_collective(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-3, -2, -1, 1, 2, 3, 4]))


@at(*SEGMENT_COLLECTIVES)
def change_address_of_collective(e: Edit) -> None:
    """Move a collective to an adjacent boundary, or to another microbatch."""
    _change_address(e)


@at(*SEGMENT_COLLECTIVES)
def change_segment_collective(e: Edit) -> None:
    """Replace a collective by another one."""
    op = Opcode(e.word >> 48 & 0xFF)
    e.put(
        with_op(e.word, e.rng.choice([other for other in SEGMENT_COLLECTIVES if other is not op]))
    )


@at(*COMPUTE_OPS)
def drop_segment_compute(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*COMPUTE_OPS)
def duplicate_segment_compute(e: Edit) -> None:
    push(e.own, e.at + e.rng.randint(0, 3), e.word)


@at(*COMPUTE_OPS)
def move_segment_compute(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-3, -2, -1, 1, 2, 3, 4]))


@at(*COMPUTE_OPS)
def change_address_of_compute(e: Edit) -> None:
    """Replace a compute by that of an adjacent segment or of another chunk."""
    _change_address(e)


@whole
def change_boundary_letter(e: Edit) -> Any:
    """Change one letter of `segment_boundaries`."""
    boundaries = e.program.segment_boundaries
    if not boundaries:
        return False
    k = e.rng.randrange(len(boundaries))
    letter = e.rng.choice(sorted({*"fgdc.-"} - {boundaries[k]}))
    e.program = replace(e.program, segment_boundaries=boundaries[:k] + letter + boundaries[k + 1 :])
    return None


@whole
def toggle_sequence_parallel(e: Edit) -> Any:
    """Toggle `sequence_parallel`."""
    if e.program.tp == 1:
        return False
    e.program = replace(e.program, sequence_parallel=not e.program.sequence_parallel)
    return None


SEGMENT_MUTATIONS = tuple(name for name in MUTATIONS if name not in _EARLIER_MUTATIONS)
