"""Frontiers: the longest path to every node in array operations, a frontier of nodes at a time.

What nothing holds back ends, and what waited for nothing else is the next frontier.  So the work
is a few array operations per frontier and some nanoseconds per edge.  The number of frontiers is
the depth of the program, not its size.  The result is that of `loops.longest`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.loops import Problem, Times, Turns
from schedir.ir.index import Positions

_MOST = np.iinfo(np.int32).max


def by_frontiers(problem: Problem) -> tuple[Times, Turns]:
    """The start of each node, and the turn in which it is reached, 0 if it never is."""
    edges, node_mask, cost, fixed, rank, hop = problem
    nodes = len(cost)
    # Where edges take time of their own, each has a place in the table.
    after = _Successors.of(nodes, edges, 0 if len(hop) else nodes // 64)
    rows, many = after.rows, nodes + 1
    lags = _lags(rows, rank, hop) if len(hop) else None
    missing = after.before()
    front = np.flatnonzero(node_mask & (missing[:nodes] == 0))
    missing[nodes:] = _MOST
    start, turn = np.zeros(nodes + 2), np.zeros(nodes + 2, np.int32)
    turns, one, count = 0, *np.empty((2, 0), np.int32)
    while len(front):
        turns += 1
        turn[front] = turns
        end = start[front] + cost[front]
        if len(fixed):
            end = np.where(np.isnan(fixed[front]), end, fixed[front])
        to = rows.take(front, 0).reshape(-1).astype(np.intp)
        given = end.repeat(rows.shape[1])
        if lags is not None:
            given += lags.take(front, 0).reshape(-1)
        if len(one) < len(to):
            one, count = np.ones(2 * len(to), np.int32), np.arange(2 * len(to), dtype=np.int32)
        np.maximum.at(start, to, given)
        np.subtract.at(missing, to, one[: len(to)])
        if missing[many] != _MOST:
            missing[many] = _MOST
            for k in np.flatnonzero(rows[front, -1] == many).tolist():
                more = after.rest[int(front[k])]
                start[more] = np.maximum(start[more], end[k])
                missing[more] -= 1
                to = np.concatenate([to, more])
        to = to[missing[to] == 0]
        if len(count) < len(to):  # one has had many successors
            count = np.arange(len(to), dtype=np.int32)
        turn[to] = number = count[: len(to)]
        front = to[turn[to] == number]  # once each
    return start[:-2], turn[:-2]


@dataclass(frozen=True)
class _Successors:
    """Who waits for each node.

    `rows` has a row of places per node.  A place that is not used has the number of nodes, which
    stands for nobody.  A node with more successors than places has the number after that in its
    last place, and the others in `rest`.
    """

    rows: Positions
    rest: dict[int, NDArray[np.intp]]

    @classmethod
    def of(cls, nodes: int, edges: Iterable[tuple[Positions, Positions]], few: int) -> _Successors:
        """Each edge in the first free place of its source; equal edges are one.

        Where no more than `few` edges want another place, there is none.
        """
        rows = np.full((nodes + 2, 2), nodes, np.int32)
        rest: dict[int, set[int]] = {}
        for source, target in edges:
            for place in rows.T:
                source, target = _put(source, target, place, nodes)
            while len(source) > few:
                rows = np.column_stack([rows, np.full(nodes + 2, nodes, np.int32)])
                source, target = _put(source, target, rows[:, -1], nodes)
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                rest.setdefault(a, set()).add(b)
        for a, more in rest.items():
            more.add(int(rows[a, -1]))
            rows[a, -1] = nodes + 1
        return cls(rows, {a: np.array([*more]) for a, more in rest.items()})

    def before(self) -> Turns:
        """How many nodes each one waits for."""
        count = np.zeros(len(self.rows), np.int32)
        for place in self.rows.T:
            for part in np.array_split(place, len(place) // 2**20 + 1):
                np.add.at(count, part.astype(np.intp), np.ones(len(part), np.int32))
        for more in self.rest.values():
            count[more] += 1
        return count


def _put(
    source: Positions, target: Positions, place: Positions, nobody: int
) -> tuple[Positions, Positions]:
    """Put edges where their source's place is free; returns those that must go elsewhere."""
    free = place[source] == nobody
    place[source[free]] = target[free]
    left = place[source] != target
    return source[left], target[left]


def _lags(rows: Positions, rank: Positions, hop: Times) -> Times:
    """What passes between the end of each node and the start of each successor, by place."""
    there = np.append(rank, np.full(2, -1, np.int32))  # nobody is on no rank
    far = (there[rows[:-2]] != rank[:, None]) & (rows[:-2] < len(rank))
    return np.asarray(far * hop[:, None])
