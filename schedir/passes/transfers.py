"""Transfers: sends and receives, placed by one global order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.deadlock import deadlock
from schedir.analysis.graph import Graph
from schedir.analysis.longest_path import Walk, walk
from schedir.ir.costs import Costs
from schedir.ir.index import NONE, Index, Positions
from schedir.ir.ops import ROWS, SENDS, Opcode, Per, makers
from schedir.ir.plan import Plan
from schedir.ir.program import ADDRESS, OP, STAGE, Cut, Program
from schedir.passes.ends import meets, together
from schedir.passes.record import Pass

_SENT_BY = {send: makers(ROWS[send].needs[0]) for send in SENDS}
_MAKE = tuple(op for ops in _SENT_BY.values() for op in ops)


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
    reached = walk(graph, _ordering(costs or Costs(), program.plan))
    if not reached.done.all():
        raise deadlock(graph, reached)
    index, made = graph.index, graph.index.where_all(_MAKE)
    begins, ends = _numbers(graph, reached, made)
    words, keys, order = [program.words], [_key(index.rank, begins)], {}
    for send, ops in _SENT_BY.items():
        at = index.where_all(ops)
        number = ends[np.searchsorted(made, at)]
        order[send] = np.full(index.size[Per.MICROBATCH], NONE, np.int32)
        order[send][index.key[at]] = number
        for op, which, rank, shift in _sides(index, send, at):
            words.append((program.words[at[which]] & ADDRESS) + shift | int(op) << OP)
            keys.append(_key(rank, number[which]))
    key = np.concatenate(keys)
    offsets = np.append(0, np.cumsum(np.bincount(key >> 32, minlength=program.plan.ranks)))
    streams = Cut.at(np.concatenate(words)[np.argsort(key, kind="stable")], offsets)
    return replace(program, streams=streams, order=order)


def _key(rank: NDArray[Any], number: NDArray[Any]) -> NDArray[np.int64]:
    """What sorts by rank, and along each Stream."""
    return np.asarray(np.asarray(rank, np.int64) << 32 | number)


def _numbers(
    graph: Graph, reached: Walk, made: Positions
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The global order: a number for each instruction, and one for what each maker makes.

    In order of time, of starts and ends.  Of those at one time, the turn of the walk tells what
    comes first, and else the position.
    """
    program, turn = graph.program, reached.turn.astype(np.int64)
    time = np.concatenate([reached.start, reached.end[made]])
    turn = np.concatenate([2 * turn, 2 * turn[made] + 1])
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
    return number[: len(graph)], number[len(graph) :]


def _ordering(costs: Costs, plan: Plan) -> Costs:
    """The costs that order the messages: around a ring of ranks none is quite free.

    Messages of one moment that took no time would stand in the order of their ranks.  Along a
    line that does no harm.  Around a ring each would wait for the one before it, and all again
    for the first at the next moment; so there they take a trifle, and go as they are needed.
    """
    neighbours = {frozenset(pair) for pair in pairwise(plan.rank_of.tolist()) if len({*pair}) == 2}
    if len(neighbours) < plan.ranks:  # a line, or a tree
        return costs
    table = costs.table(plan.stages)
    trifle = table.min(initial=1.0, where=table > 0) * 2.0**-30  # no sum of them is a cost
    return replace(costs, send=tuple(np.maximum(table[Opcode.SendAct], trifle).tolist()))


def _sides(
    index: Index, send: Opcode, at: Positions
) -> Iterator[tuple[Opcode, NDArray[np.intp], NDArray[Any], int]]:
    """Sends, and receives: which makers' values they move, and on which rank, rank by rank.

    The last is what leads from the word of the maker's stage to that of the transfer's.
    """
    row, plan = ROWS[send], index.program.plan
    other = index.stage[at].astype(np.int32) + row.hop
    inside = (other >= 0) & (other < plan.stages)
    here, there = index.rank[at], plan.rank_at(np.where(inside, other, 0), index.mb[at])
    crosses = np.flatnonzero(inside & (there != here))
    assert row.meets is not None
    yield send, crosses, here[crosses], 0
    crosses = crosses[np.argsort(there[crosses].astype(np.uint16), kind="stable")]
    yield row.meets, crosses, there[crosses], row.hop << STAGE


TRANSFER: Final = Pass(
    "transfers", "messages", lambda program, options: transfers(program, options.costs)
)
