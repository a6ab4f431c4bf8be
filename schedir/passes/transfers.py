"""Transfers: sends and receives, placed by one global order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.costs import Costs
from schedir.explain import deadlock
from schedir.graph import Graph
from schedir.ops import ROWS, Opcode
from schedir.program import ADDRESS, OP, STAGE, Program, Stream
from schedir.walk import walk

_SENT_BY = {
    Opcode.SendAct: (Opcode.Forward,),
    Opcode.SendGrad: (Opcode.Backward, Opcode.BackwardInput),
}


def transfers(program: Program, costs: Costs | None = None) -> Program:
    """A draft with its transfers, legal under every progress model.

    The draft is walked once in order of time at `costs`.  At the moment a value is made, its
    send is appended to the maker's Stream and its receive to the consumer's.  All Streams then
    agree with one global order, in which every edge of the dependency graph points forward,
    even with blocking transfers in a single queue: so there is no cycle.

    Raises DeadlockError if the draft itself cannot finish, which is all that can be wrong.
    """
    graph = Graph(program)
    reached = walk(graph, costs)
    if not reached.done.all():
        raise deadlock(graph, reached)
    index, plan = graph.index, program.plan
    stage = index.stage.astype(np.int32)
    turn = 2 * reached.turn
    where = np.arange(len(turn))
    # Columns of the new table: rank, time, turn (breaks ties as the walk did), place, word.
    rows: list[tuple[NDArray[Any], ...]] = [(index.rank, reached.start, turn, where, program.words)]
    for send, makers in _SENT_BY.items():
        row = ROWS[send]
        assert row.meets is not None
        other = stage + row.hop
        inside = (other >= 0) & (other < plan.stages)
        there = plan.rank_of[np.where(inside, other, 0)]
        at = np.flatnonzero(np.isin(index.op, makers) & inside & (there != index.rank))
        time, after = reached.end[at], turn[at] + 1
        address = program.words[at] & ADDRESS
        sent = address | int(send) << OP
        got = (address + (row.hop << STAGE)) | int(row.meets) << OP
        rows += [(index.rank[at], time, after, at, sent), (there[at], time, after, at, got)]
    rank, time, after, place, words = (np.concatenate(c) for c in zip(*rows, strict=True))
    order = np.lexsort((place, after, time, rank))
    cuts = np.searchsorted(rank[order], np.arange(1, plan.ranks))
    return replace(program, streams=tuple(map(Stream, np.split(words[order], cuts))))
