"""Find the longest path to every node with numpy, one frontier of ready nodes at a time.

A frontier is the set of nodes whose last predecessor is in the previous frontier. Each frontier
takes a fixed number of array operations, and each edge is visited once. So the running time grows
with the number of edges plus the number of frontiers. The number of frontiers is the depth of the
graph. The result is bitwise equal to that of `node_loop.solve_by_loop`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.node_loop import Levels, LongestPathProblem, Times
from schedir.ir.instruction_index import Positions

_MAX_INT32 = np.iinfo(np.int32).max
_WIDTH: Final = 3  # columns of the table of successors; few nodes have more successors


def solve_by_frontiers(problem: LongestPathProblem) -> tuple[Times, Levels]:
    """Return the start and the level of each node.

    Args:
        problem: The nodes and edges.

    Returns:
        The start of each node in the unit of the costs, shape (nodes,); and its level, as in
        `node_loop.solve_by_loop`.
    """
    edges, node_mask, cost, fixed, rank, hop = problem
    nodes = len(cost)
    after = _Successors.from_edges(nodes, edges)
    rows = after.rows
    lags = _compute_hop_delays(rows, rank, hop) if len(hop) else None
    missing = after.count_predecessors()
    front = np.flatnonzero(node_mask & (missing[:nodes] == 0))
    start = np.zeros(nodes + 1)
    turn = np.zeros(nodes + 1, np.int32)
    turns, one, count = 0, *np.empty((2, 0), np.int32)
    while len(front):
        turns += 1
        turn[front] = turns
        end = start[front] + cost[front]
        if len(fixed):
            end = np.where(np.isnan(fixed[front]), end, fixed[front])
        to = rows.take(front, 0).reshape(-1).astype(np.intp)
        given = end.repeat(_WIDTH)
        if lags is not None:
            given += lags.take(front, 0).reshape(-1)
        if after.has_overflow is not None:
            wide = after.has_overflow[front].nonzero()[0]
            if len(wide):
                more, each = after.list_overflow(front[wide])
                ends = end[wide].repeat(each)
                if len(hop):
                    source = front[wide].repeat(each)
                    ends += np.where(rank[source] != rank[more], hop[source], 0.0)
                to = np.concatenate([to, more])
                given = np.concatenate([given, ends])
        if len(one) < len(to):
            one = np.ones(2 * len(to), np.int32)
            count = np.arange(2 * len(to), dtype=np.int32)
        missing[nodes] = _MAX_INT32  # an empty place must never become ready
        np.maximum.at(start, to, given)
        np.subtract.at(missing, to, one[: len(to)])
        to = to[missing[to] == 0]
        turn[to] = number = count[: len(to)]
        front = to[turn[to] == number]  # removes duplicates
    return start[:-1], turn[:-1]


@dataclass(frozen=True)
class _Successors:
    """The successors of each node: a table with `_WIDTH` columns, and a CSR list of the rest.

    Attributes:
        rows: A row per node with its first successors, and one more row that is empty. The number
            of nodes marks an empty place, because no node has this number.
        offsets: The successors of node `a` that do not fit in its row are
            `targets[offsets[a]:offsets[a + 1]]`.
        targets: The successors that do not fit in the rows.
        has_overflow: A mask of the nodes with successors in `targets`; None if there are none.
    """

    rows: Positions
    offsets: NDArray[np.int64]
    targets: NDArray[np.intp]
    has_overflow: NDArray[np.bool_] | None

    @classmethod
    def from_edges(cls, nodes: int, edges: Iterable[tuple[Positions, Positions]]) -> _Successors:
        """Put each edge into the first free place of its source's row, or else into the CSR list.

        An edge that is given several times may be stored once. `count_predecessors` counts the
        stored edges.
        """
        rows = np.full((nodes + 1, _WIDTH), nodes, np.int32)
        rest = [np.empty((2, 0), np.int32)]
        for source, target in edges:
            for place in rows.T:
                source, target = _place_edges(source, target, place, nodes)
            rest.append(np.stack([source, target]))
        source, target = np.concatenate(rest, 1)
        each = np.bincount(source, minlength=nodes)
        first = np.concatenate([[0], each.cumsum()])
        targets = target[np.argsort(source, kind="stable")].astype(np.intp)
        return cls(rows, first, targets, each > 0 if len(targets) else None)

    def list_overflow(self, nodes: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the successors of `nodes` in the CSR list, and their number per node."""
        begin = self.offsets[nodes]
        each = self.offsets[nodes + 1] - begin
        past = each.cumsum()
        at = (begin - past + each).repeat(each) + np.arange(past[-1])
        return self.targets[at], each

    def count_predecessors(self) -> Levels:
        """Return the number of edges to each node. The last entry counts the empty places."""
        count = np.bincount(self.targets, minlength=len(self.rows)).astype(np.int32)
        for place in self.rows.T:
            for part in np.array_split(place, len(place) // 2**20 + 1):
                np.add.at(count, part.astype(np.intp), np.ones(len(part), np.int32))
        return count


def _place_edges(
    source: Positions, target: Positions, column: Positions, empty: int
) -> tuple[Positions, Positions]:
    """Put edges into free places of `column`, and return the edges that are not in `column`."""
    free = column[source] == empty
    column[source[free]] = target[free]
    left = column[source] != target
    return source[left], target[left]


def _compute_hop_delays(rows: Positions, rank: Positions, hop: Times) -> Times:
    """Return, for each place of `rows`, the time from the end of the node to its successor."""
    there = np.append(rank, np.int32(-1))  # an empty place has no rank
    far = (there[rows[:-1]] != rank[:, None]) & (rows[:-1] < len(rank))
    return np.asarray(far * hop[:, None])
