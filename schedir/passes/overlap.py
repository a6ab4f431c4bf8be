"""Overlap: opposite transfers issued as one, gathers begun and other receives posted earlier.

Group first: an early receive has left the send that it could have gone with.  Gathers go before
receives: a host that blocks waits at a gather for its message, so that must stay where the
lowering has put the receive, or after.  All passes come after the lowering and keep its promise:
what they give is legal under the model they are told, and `check` says so again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from schedir.graph import Graph, Model
from schedir.index import Positions
from schedir.ops import COMPUTE, GATHERS, RECEIVES, SENDS
from schedir.program import JOINED, Program, Stream


def early_receives(program: Program, model: Model = "device", ahead: int = 1) -> Program:
    """Post each receive up to `ahead` computes earlier, so that its buffer waits, not its rank.

    A receive never passes an instruction of its own queue under `model`, and compute has no
    say in when a transfer runs, so the dependency graph stays as it is.  Each step ahead
    costs a buffer.
    """
    graph = Graph(program, model)
    joined, group_end = graph.index.joined, np.append(~graph.index.joined[1:], True)
    moves = graph.index.among(RECEIVES) & ~joined & group_end
    return _earlier(program, moves, graph.ahead, ahead)


def early_gathers(program: Program, ahead: int = 1) -> Program:
    """Begin each gather up to `ahead` computes earlier, but not before its message is received.

    It runs beside these computes.  A host that blocks waits for the message there, and begins the
    gather sooner for it.
    """
    graph = Graph(program, "serial")
    moves = graph.index.among(GATHERS)
    return _earlier(program, moves, graph.needs[0], ahead)


def _earlier(program: Program, moves: NDArray[np.bool_], behind: Positions, ahead: int) -> Program:
    """Put what moves up to `ahead` computes earlier, but not before what it must stay behind.

    Computes that run together are one, and groups stay whole.  `moves` and `behind`, a position
    or -1, have an entry for each instruction.
    """
    streams = []
    for rank, stream in enumerate(program.streams):
        lo = int(program.offsets[rank])
        own = slice(lo, lo + len(stream))
        index = np.arange(len(stream))
        joined = stream.joined
        ends = index[np.append(~joined[1:], True)]
        end_of = ends[np.searchsorted(ends, index)]
        computes = np.flatnonzero(np.isin(stream.op, COMPUTE) & ~joined)
        over = np.searchsorted(computes, index) - 1 - ahead  # the last compute to stay behind
        floor = np.where(over >= 0, computes[np.maximum(over, 0)], -1) if len(computes) else -1
        floor = np.maximum(floor, np.where(behind[own] < 0, -1, behind[own] - lo))
        floor = np.where(floor >= 0, end_of[np.maximum(floor, 0)], -1)
        key = np.where(moves[own], 2 * floor + 1, 2 * index)
        streams.append(Stream(stream.words[np.argsort(key, kind="stable")]))
    return replace(program, streams=tuple(streams))


def group_opposites(program: Program) -> Program:
    """Issue a send and the receive that goes the other way as one, where both ranks can.

    Two messages between two ranks, one each way, that stand next to each other in both Streams
    are joined on both.  No path leads from one to the other except directly, so this makes no
    cycle that was not there, under any model.
    """
    graph = Graph(program, "serial")
    index, partner = graph.index, graph.partner
    send, receive = np.isin(index.op, SENDS), np.isin(index.op, RECEIVES)
    second = np.flatnonzero((send[1:] & receive[:-1]) | (receive[1:] & send[:-1])) + 1
    first = second - 1
    matched = (partner[first] >= 0) & (partner[second] >= 0)
    same_rank = index.rank[first] == index.rank[second]
    beside = np.abs(partner[first] - partner[second]) == 1
    same_peer = index.rank[partner[first]] == index.rank[partner[second]]
    words = program.words.copy()
    taken = index.joined | np.append(index.joined[1:], False)
    pairs = np.stack([first, second], 1)[matched & same_rank & beside & same_peer]
    for a, b in pairs.tolist():
        there = sorted((int(partner[a]), int(partner[b])))
        if not taken[[a, b, *there]].any():
            taken[[a, b, *there]] = True
            words[[b, there[1]]] |= JOINED
    cuts = program.offsets[1:-1]
    return replace(program, streams=tuple(map(Stream, np.split(words, cuts))))
