"""Shard: the weights of a stage are whole while it is computed with, and parts in between.

ZeRO (arXiv 1910.02054) as instructions: at level 3 no more than `active` stages of a rank are whole
at once, below it all of them are, from the beginning of a step to their last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from schedir.analysis.residency import Ints, stays
from schedir.ir.ops import ROWS, Opcode, Token
from schedir.ir.program import STAGE, Cut, Program, Slots, pack
from schedir.passes.record import Expected, Options, Pass, Present

_READS: Final = tuple(row.op for row in ROWS if Token.FULL in {*row.needs} - {*row.frees})
_GATHERED: Final = 3  # the level from which on weights are parts between their uses


class _Uses(NamedTuple):
    """Where a program uses whole weights: `stage` in the `step` of a `rank`, as one run of
    instructions that use the same; the last of a run ends at `end`, a place between two."""

    rank: Ints
    step: Ints
    stage: Ints
    end: Ints

    @property
    def most(self) -> int:
        """The most stages that are used at once."""
        return int(np.bincount(self.step).max(initial=0))


def shard(program: Program, options: Options) -> Program:
    """Unshard and Reshard for each stay of a stage among those that are whole.

    A stage is let go of right behind the last reader of a stay, and made whole as soon as there is
    room for it: the first ones at the head of the Stream, which hides them under the warm-up.
    """
    uses = _uses(program)
    active = _active(program, uses)
    at, rank, words, most = [], [], [], []
    for one in range(program.plan.ranks):
        here = slice(*np.searchsorted(uses.rank, [one, one + 1]))
        step, stage, end = uses.step[here], uses.stage[here], uses.end[here]
        first, last = stays(step, stage, active, ahead=1).T
        ends = np.sort(end[last])
        room = min(active, len(np.unique(stage)))
        begins = np.append(np.full(room, program.offsets[one]), ends)[: len(first)]
        own, turn = stage[first], np.zeros(len(first), np.int64)
        order = np.argsort(own, kind="stable")
        turn[order] = np.arange(len(own)) - np.searchsorted(own[order], own[order])
        at += [end[last], begins]
        words += [pack(Opcode.Reshard, own, turn), pack(Opcode.Unshard, own, turn)]
        rank.append(np.full(2 * len(first), one))
        most.append(room)
    program = _put(program, np.concatenate(at), np.concatenate(rank), np.concatenate(words))
    if program.zero < _GATHERED:
        return program
    return program.with_slots([Slots.unsaid()._replace(full=room) for room in most])


def _uses(program: Program) -> _Uses:
    """All runs of groups of instructions that use the same stages."""
    group = np.cumsum(~program.joined)
    at = np.flatnonzero(np.isin(program.op, _READS))
    at = at[(program.words[at] >> STAGE & 0xFFFF) >= program.frozen]
    stage = program.words[at] >> STAGE & 0xFFFF
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    ends = np.flatnonzero(np.append(~program.joined[1:], True)) + 1
    order = np.lexsort((stage, group[at]))
    at, stage, rank, group = at[order], stage[order], rank[order], group[at[order]]
    other = np.append(True, (group[1:] != group[:-1]) | (stage[1:] != stage[:-1]))[: len(at)]
    at, stage, rank, group = at[other], stage[other], rank[other], group[other]
    begins = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(at)])
    size = np.diff(np.append(begins, len(at)))
    own = np.arange(len(at)) - np.repeat(begins, size)  # the place in its group
    before = np.append(0, begins)[:-1]
    alike = (size == np.append(0, size)[:-1]) & (rank[begins] == rank[before])
    equal = stage == stage[np.minimum(np.repeat(before, size) + own, max(len(at) - 1, 0))]
    if len(begins):
        alike &= np.logical_and.reduceat(equal, begins)
    step = np.cumsum(~alike) - 1
    last = np.append(~alike[1:], True)[: len(begins)]  # the last group of each run
    kept = np.repeat(last, size)
    end = ends[np.searchsorted(ends, at, side="right")]
    return _Uses(rank[kept], np.repeat(step, size)[kept], stage[kept], end[kept])


def _active(program: Program, uses: _Uses) -> int:
    """How many stages of a rank are whole at once."""
    if program.zero < _GATHERED:
        return program.plan.stages
    return min(uses.most + 1, program.plan.stages)


def _put(program: Program, at: Ints, rank: Ints, words: Ints) -> Program:
    """The program with words at places between others; at one place in the order told."""
    order = np.lexsort((np.arange(len(at)), at, rank))
    offsets = program.offsets.copy()
    offsets[1:] += np.cumsum(np.bincount(rank, minlength=program.plan.ranks))
    words = np.insert(program.words, at[order], words[order])
    return replace(program, streams=Cut.at(words, offsets))


def _both(program: Program, present: Present) -> Iterator[Expected]:
    once = present(Opcode.Unshard).copy()
    each = np.arange(program.plan.stages) >= program.frozen
    once[: program.plan.holders.size] = np.tile(each, program.plan.rows)
    once &= program.zero > 0
    why = "the program says 'zero 0'" if not program.zero else "its weights are not gathered"
    yield Expected(Opcode.Unshard, once, why)
    yield Expected(Opcode.Reshard, once, why)


PASSES = (
    Pass("shard", "memory", shard, lambda program, options: program.zero > 0, _both, order=1),
)
