"""Insert sends and receives, in one global order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import EarliestTimes, walk
from schedir.analysis.deadlock import deadlock
from schedir.analysis.dependency_graph import Graph
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid
from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import ROWS, SENDS, Opcode, Scope, producers
from schedir.ir.program import ADDRESS, OP, STAGE, Program, StreamSlices, Words
from schedir.passes.pass_types import Pass
from schedir.passes.update_boundaries import meets, together

_SENT_BY = {send: producers(ROWS[send].needs[0]) for send in SENDS}

_EMPTY = np.empty(0, np.int32)
_AT_ONCE = 2**16  # instructions that are merged at once


def transfers(program: Program, costs: Costs | None = None) -> Program:
    """A draft with its transfers, legal under every progress model.

    The draft is walked once in order of time at `costs`.  At the moment a value is made, its
    send is appended to the maker's Stream and its receive to the consumer's.  All Streams then
    agree with one global order, in which every edge of the dependency graph points forward,
    even with blocking transfers in a single queue: so there is no cycle.  Where ranks meet at the
    end of an update, all that it needs comes first in that order.

    Raises DeadlockError if the draft itself cannot finish, or OrderError if that is due to one rank
    alone, which is all that can be wrong.
    """
    graph = Graph.of(program)
    reached = walk(graph, _ordering(costs or Costs(), program))
    if not reached.done.all():
        raise deadlock(graph, reached)
    index = graph.index
    made = {
        send: index.where_all(ops)
        for send, ops in _SENT_BY.items()
        if program.has(ROWS[send].needs[0])
    }
    begins, ends = _numbers(graph, reached, np.concatenate([_EMPTY, *made.values()]))
    lasts = np.cumsum([len(at) for at in made.values()])
    order: dict[Opcode, Positions] = {}
    parts = [
        _MergedInstructions(
            np.arange(len(index), dtype=np.int32), begins, index.rank, keep=-1, lead=0
        )
    ]
    for (send, at), last in zip(made.items(), lasts.tolist(), strict=True):
        number = ends[last - len(at) : last]
        order[send] = np.full(index.size[Scope.MICROBATCH], NONE, np.int32)
        order[send][index.key[at]] = number
        parts += _sides(index, send, at, number)
    del graph, reached, index
    program.forget()  # to make room
    return replace(program, streams=_streams(program, parts), order=order)


class _MergedInstructions(NamedTuple):
    """Some of what is merged to Streams, rank by rank: instructions, sends or receives.

    Each is made of the instruction at a position, has a number in the global order, and a rank.
    Of the instruction's word it keeps some bits, and `lead` leads from these to its own word.
    """

    at: Positions
    number: NDArray[np.int32]
    rank: NDArray[Any]
    keep: int
    lead: int

    def cut(self, begin: int, end: int | None) -> _MergedInstructions:
        """Those from one index to before another."""
        own = slice(begin, end)
        return self._replace(at=self.at[own], number=self.number[own], rank=self.rank[own])


def _streams(program: Program, parts: list[_MergedInstructions]) -> StreamSlices:
    """Streams that have all parts, in the global order."""
    size = sum(np.bincount(part.rank, minlength=program.shape.ranks) for part in parts)
    offsets = np.append(0, np.cumsum(size))
    words = np.empty(int(offsets[-1]), np.int64)
    _merge(program.words, parts, 0, program.shape.ranks, words)
    return StreamSlices.at(words, offsets)


def _merge(
    given: Words, parts: list[_MergedInstructions], first: int, last: int, into: Words
) -> None:
    """Merge all parts for the ranks from `first` to before `last`; of many some at a time."""
    if len(into) > _AT_ONCE and last - first > 1:
        half = (first + last) // 2
        cuts = [int(np.searchsorted(part.rank, half)) for part in parts]
        low = [part.cut(0, cut) for part, cut in zip(parts, cuts, strict=True)]
        high = [part.cut(cut, None) for part, cut in zip(parts, cuts, strict=True)]
        _merge(given, low, first, half, into[: sum(cuts)])
        _merge(given, high, half, last, into[sum(cuts) :])
        return
    keys = [np.asarray(part.rank, np.int64) << 32 | part.number for part in parts]
    merged = [(given[part.at] & part.keep) + part.lead for part in parts]
    order = np.argsort(np.concatenate(keys), kind="stable")  # of sorted parts: fast
    into[:] = np.concatenate(merged)[order]


def _numbers(
    graph: Graph, reached: EarliestTimes, made: Positions
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The global order: a number for each instruction, and one for each value that is made, by its
    maker.

    In order of time, of starts and ends.  Of those at one time, the turn of the walk tells what
    comes first, and else the position.
    """
    program = graph.program
    place = np.argsort(made, kind="stable")
    made = made[place]
    time = np.concatenate([reached.start, reached.end[made]])
    turn = 2 * np.concatenate([reached.turn, reached.turn[made]])
    turn[len(graph) :] += 1
    keys = [turn.astype(np.uint16) if turn.max(initial=0) < 2**16 else turn, time]  # sorts faster
    if meets(program):  # then how many updates have ended ahead comes before time
        ended = np.zeros(len(graph), np.int64)
        for ends, (lo, hi) in zip(
            together(graph).T, pairwise(program.offsets.tolist()), strict=True
        ):
            ended[lo:hi] = np.searchsorted(ends, np.arange(lo, hi))
        keys.append(np.concatenate([ended, ended[made]]))
    order = np.lexsort(keys)
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    ends = np.empty(len(made), np.int32)
    ends[place] = number[len(graph) :]
    return number[: len(graph)], ends


def _ordering(costs: Costs, program: Program) -> Costs:
    """The costs that order the messages: around a ring of ranks none is quite free.

    Messages of one moment that took no time would stand in the order of their ranks.  Along a
    line that does no harm.  Around a ring each would wait for the one before it, and all again
    for the first at the next moment; so there they take a trifle, and go as they are needed.
    """
    shape, rows = program.shape, program.shape.holders.tolist()
    pairs = [pair for row in rows for pair in pairwise(row)]
    pairs += [(row[begin], row[end]) for row in rows for begin, end in program.skips]
    neighbours = {frozenset(pair) for pair in pairs if len({*pair}) == 2}
    if len(neighbours) < shape.ranks:  # a line, or a tree
        return costs
    each = [costs.of(op, shape) for op in Opcode]
    least = min(float(cost.min(initial=1.0, where=cost > 0)) for cost in each)
    trifle = least * 2.0**-30  # no sum of them is a cost
    return replace(costs, send=from_grid(np.maximum(each[Opcode.SendAct], trifle)))


def _sides(
    index: InstructionIndex, send: Opcode, at: Positions, number: NDArray[np.int32]
) -> Iterator[_MergedInstructions]:
    """The sends, and the receives, of what crosses ranks of all that is made at some positions."""
    row, shape = ROWS[send], index.program.shape
    assert row.partner is not None and row.peer is not None
    beside = index.program.beside(row.peer)
    other = beside[index.stage[at]]
    here, there = index.rank[at], shape.rank_at(np.maximum(other, 0), index.mb[at])
    crosses = np.flatnonzero((other >= index.program.first_of(send)) & (there != here))
    yield _MergedInstructions(at[crosses], number[crosses], here[crosses], ADDRESS, int(send) << OP)
    crosses = crosses[np.argsort(there[crosses].astype(np.uint16), kind="stable")]
    shift = beside - np.arange(shape.stages)
    shifts = np.unique(shift[beside >= 0]).tolist()  # one, but of skips of several lengths
    for each in shifts:
        own = crosses if len(shifts) == 1 else crosses[shift[index.stage[at[crosses]]] == each]
        lead = (int(row.partner) << OP) + (each << STAGE)
        yield _MergedInstructions(at[own], number[own], there[own], ADDRESS, lead)


PASSES: Final = (
    Pass("transfers", "messages", lambda program, options: transfers(program, options.costs)),
)
