"""Mutations of stage segments, of microbatch chunks, and of collectives between segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, Lane, Opcode, Scope
from tests.edits import MUTATIONS, Edit, at, mb, move, pull, push, stage, whole, with_op, word

# Tensor-parallel collectives per microbatch, and all-to-alls of experts.
SUMS = tuple(
    row.op
    for row in INSTRUCTIONS
    if row.lane in (Lane.TP, Lane.EP) and row.scope is Scope.MICROBATCH
)
_BEFORE = {*MUTATIONS}


def _beside(e: Edit) -> None:
    """Change the current instruction to an adjacent stage or to a random microbatch."""
    s, m = stage(e.word), mb(e.word)
    if e.rng.random() < 0.5:
        s = max(s + e.rng.choice([-1, 1]), 0)
    else:
        m = e.rng.randrange(e.program.shape.microbatches)
    e.put(word(Opcode(e.word >> 48 & 0xFF), s, m))


@at(*SUMS)
def drop_sum(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*SUMS)
def double_sum(e: Edit) -> None:
    push(e.own, e.at + e.rng.randint(0, 3), e.word)


@at(*SUMS)
def move_sum(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-3, -2, -1, 1, 2, 3, 4]))


@at(*SUMS)
def sum_elsewhere(e: Edit) -> None:
    """Move a collective to an adjacent boundary, or to another microbatch."""
    _beside(e)


@at(*SUMS)
def sum_the_other(e: Edit) -> None:
    """Replace a collective by another one."""
    op = Opcode(e.word >> 48 & 0xFF)
    e.put(with_op(e.word, e.rng.choice([other for other in SUMS if other is not op])))


@at(*COMPUTE_OPS)
def drop_piece(e: Edit) -> object:
    return pull(e.own, e.at)


@at(*COMPUTE_OPS)
def double_piece(e: Edit) -> None:
    push(e.own, e.at + e.rng.randint(0, 3), e.word)


@at(*COMPUTE_OPS)
def move_piece(e: Edit) -> None:
    move(e.own, e.at, e.at + e.rng.choice([-3, -2, -1, 1, 2, 3, 4]))


@at(*COMPUTE_OPS)
def other_piece(e: Edit) -> None:
    """Replace a compute by that of an adjacent segment or of another chunk."""
    _beside(e)


@whole
def other_letter(e: Edit) -> Any:
    """Change one letter of `segment_boundaries`."""
    meets = e.program.segment_boundaries
    if not meets:
        return False
    k = e.rng.randrange(len(meets))
    letter = e.rng.choice(sorted({*"fgdc.-"} - {meets[k]}))
    e.program = replace(e.program, segment_boundaries=meets[:k] + letter + meets[k + 1 :])
    return None


@whole
def other_tokens(e: Edit) -> Any:
    """Toggle `sequence_parallel`."""
    if e.program.tp == 1:
        return False
    e.program = replace(e.program, sequence_parallel=not e.program.sequence_parallel)
    return None


SUMMED = tuple(name for name in MUTATIONS if name not in _BEFORE)
