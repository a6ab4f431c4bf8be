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
    edges, node_mask, cost, fixed_end, rank, hop_time = problem
    nodes = len(cost)
    successors = _Successors.from_edges(nodes, edges)
    rows = successors.rows
    hop_delays = _compute_hop_delays(rows, rank, hop_time) if len(hop_time) else None
    pending_counts = successors.count_predecessors()
    frontier = np.flatnonzero(node_mask & (pending_counts[:nodes] == 0))
    start = np.zeros(nodes + 1)
    level = np.zeros(nodes + 1, np.int32)
    current_level = 0
    ones, all_numbers = np.empty((2, 0), np.int32)
    while len(frontier):
        current_level += 1
        level[frontier] = current_level
        end = start[frontier] + cost[frontier]
        if len(fixed_end):
            end = np.where(np.isnan(fixed_end[frontier]), end, fixed_end[frontier])
        targets = rows.take(frontier, 0).reshape(-1).astype(np.intp)
        edge_ends = end.repeat(_WIDTH)
        if hop_delays is not None:
            edge_ends += hop_delays.take(frontier, 0).reshape(-1)
        if successors.has_overflow is not None:
            overflow_indices = successors.has_overflow[frontier].nonzero()[0]
            if len(overflow_indices):
                overflow_targets, target_counts = successors.list_overflow(
                    frontier[overflow_indices]
                )
                overflow_ends = end[overflow_indices].repeat(target_counts)
                if len(hop_time):
                    source = frontier[overflow_indices].repeat(target_counts)
                    overflow_ends += np.where(
                        rank[source] != rank[overflow_targets], hop_time[source], 0.0
                    )
                targets = np.concatenate([targets, overflow_targets])
                edge_ends = np.concatenate([edge_ends, overflow_ends])
        if len(ones) < len(targets):
            ones = np.ones(2 * len(targets), np.int32)
            all_numbers = np.arange(2 * len(targets), dtype=np.int32)
        pending_counts[nodes] = _MAX_INT32  # an empty place must never become ready
        np.maximum.at(start, targets, edge_ends)
        np.subtract.at(pending_counts, targets, ones[: len(targets)])
        targets = targets[pending_counts[targets] == 0]
        level[targets] = numbers = all_numbers[: len(targets)]
        frontier = targets[level[targets] == numbers]  # removes duplicates
    return start[:-1], level[:-1]


@dataclass(frozen=True)
class _Successors:
    """The successors of each node: a table with `_WIDTH` columns, and a CSR list of the rest.

    Attributes:
        rows: A row per node with its first successors, and one more row that is empty. An empty
            place contains the number of nodes, because no node has this number.
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
        overflow = [np.empty((2, 0), np.int32)]
        for source, target in edges:
            for column in rows.T:
                source, target = _place_edges(source, target, column, nodes)
            overflow.append(np.stack([source, target]))
        source, target = np.concatenate(overflow, 1)
        overflow_counts = np.bincount(source, minlength=nodes)
        offsets = np.concatenate([[0], overflow_counts.cumsum()])
        targets = target[np.argsort(source, kind="stable")].astype(np.intp)
        return cls(rows, offsets, targets, overflow_counts > 0 if len(targets) else None)

    def list_overflow(self, nodes: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the successors of `nodes` in the CSR list, and their number per node."""
        starts = self.offsets[nodes]
        counts = self.offsets[nodes + 1] - starts
        count_sums = counts.cumsum()
        indices = (starts - count_sums + counts).repeat(counts) + np.arange(count_sums[-1])
        return self.targets[indices], counts

    def count_predecessors(self) -> Levels:
        """Return the number of edges to each node. The last entry counts the empty places."""
        counts = np.bincount(self.targets, minlength=len(self.rows)).astype(np.int32)
        for column in self.rows.T:
            for chunk in np.array_split(column, len(column) // 2**20 + 1):
                np.add.at(counts, chunk.astype(np.intp), np.ones(len(chunk), np.int32))
        return counts


def _place_edges(
    source: Positions, target: Positions, column: Positions, empty: int
) -> tuple[Positions, Positions]:
    """Put edges into free places of `column`, and return the edges that are not in `column`."""
    is_free = column[source] == empty
    column[source[is_free]] = target[is_free]
    is_unplaced = column[source] != target
    return source[is_unplaced], target[is_unplaced]


def _compute_hop_delays(rows: Positions, rank: Positions, hop: Times) -> Times:
    """Return, for each place of `rows`, the time from the end of the node to its successor."""
    padded_rank = np.append(rank, np.int32(-1))  # an empty place has no rank
    is_hop = (padded_rank[rows[:-1]] != rank[:, None]) & (rows[:-1] < len(rank))
    return np.asarray(is_hop * hop[:, None])
