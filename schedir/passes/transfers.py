"""Transfers: sends and receives, placed by one global order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.deadlock import deadlock
from schedir.analysis.graph import Graph
from schedir.analysis.longest_path import Walk, walk
from schedir.ir.costs import Costs
from schedir.ir.index import NONE, Positions
from schedir.ir.ops import ROWS, SENDS, Opcode, Per, makers
from schedir.ir.plan import Plan
from schedir.ir.program import ADDRESS, OP, STAGE, Order, Program, Stream
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
    ended = _ended(graph)
    order, messages = _numbers(graph, reached, ended), list(_messages(graph))
    total = len(program) + sum(len(made) for _, made, _, _ in messages)
    streams, all_words, begin = [], np.empty(total, np.int64), 0
    for rank, (lo, hi) in enumerate(pairwise(program.offsets.tolist())):
        own = np.arange(lo, hi, dtype=np.int32)
        # Columns: updates ended, time, turn (breaks ties as the walk did), place, word.
        rows = [(ended[own], reached.start[own], 2 * reached.turn[own], own, program.words[own])]
        for op, made, cuts, shift in messages:
            at = made[cuts[rank] : cuts[rank + 1]]
            word = (program.words[at] & ADDRESS) + shift | int(op) << OP
            rows.append((ended[at], reached.end[at], 2 * reached.turn[at] + 1, at, word))
        after, time, turn, place, words = map(np.concatenate, zip(*rows, strict=True))
        stream = all_words[begin : begin + len(words)]
        stream[:] = words[np.lexsort((place, turn, time, after))]
        streams.append(Stream(stream))
        begin += len(words)
    return replace(program, streams=tuple(streams), order=order)


def _ended(graph: Graph) -> NDArray[np.int64]:
    """How many updates have ended ahead of each instruction, where ranks meet for that."""
    ended = np.zeros(len(graph), np.int64)
    if meets(graph.program):
        for ends, (lo, hi) in zip(
            together(graph).T, pairwise(graph.program.offsets.tolist()), strict=True
        ):
            ended[lo:hi] = np.searchsorted(ends, np.arange(lo, hi))
    return ended


def _numbers(graph: Graph, reached: Walk, ended: NDArray[np.int64]) -> Order:
    """The number of each message in the global order, by the stage and microbatch of its send."""
    index = graph.index
    numbers: dict[Opcode, Positions] = {}
    whose = np.flatnonzero(index.is_op(_MAKE)).astype(np.int32)
    order = whose[np.lexsort((reached.turn[whose], reached.end[whose], ended[whose]))]
    for send, ops in _SENT_BY.items():
        numbers[send] = np.full(index.size[Per.MICROBATCH], NONE, np.int32)
        number = np.flatnonzero(np.isin(index.op[order], ops)).astype(np.int32)
        numbers[send][index.key[order[number]]] = number
    return numbers


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


def _messages(graph: Graph) -> Iterator[tuple[Opcode, Positions, NDArray[np.intp], int]]:
    """Sends, and receives: who makes what is sent, by the rank of the transfer.

    The makers' positions come rank by rank, with the places where each rank's begin, and what
    leads from the word of the maker's stage to that of the transfer's.
    """
    index, plan = graph.index, graph.program.plan
    for send, ops in _SENT_BY.items():
        row = ROWS[send]
        at = np.flatnonzero(index.is_op(ops)).astype(np.int32)
        other = index.stage[at].astype(np.int32) + row.hop
        inside = (other >= 0) & (other < plan.stages)
        there = plan.rank_at(np.where(inside, other, 0), index.mb[at])
        crosses = inside & (there != index.rank[at])
        assert row.meets is not None
        sides = ((send, index.rank[at], 0), (row.meets, there, row.hop << STAGE))
        for op, rank, shift in sides:
            order = np.argsort(rank[crosses].astype(np.uint16), kind="stable")
            cuts = np.searchsorted(rank[crosses][order], np.arange(plan.ranks + 1))
            yield op, at[crosses][order], cuts, shift


TRANSFER: Final = Pass(
    "transfers", "messages", lambda program, options: transfers(program, options.costs)
)
