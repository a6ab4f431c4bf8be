"""Find longest paths with a plain loop over nodes and edges, which numba can compile.

Each loop receives all its inputs and outputs as arguments, and fills the outputs. The loops use
only Python that numba supports. So they can run in Python over lists, which is fastest for small
programs, or as machine code over arrays if numba is installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.numba_jit import Loop
from schedir.ir.instruction_index import Positions

Times = NDArray[np.float64]
Levels = NDArray[np.int32]
Numbers = Any  # a list, or an array of one dimension

_NO_TIMES, _NO_RANKS = np.empty(0), np.empty(0, np.int32)


class LongestPathProblem(NamedTuple):
    """The nodes and edges of a longest-path problem.

    A node ends `cost` after its start, or at `fixed_end` if this is not NaN. A successor can start
    at this end, or `hop_time` later if the successor has another `rank`.

    Attributes:
        edges: Pairs of arrays: the sources and the targets of some edges. A solver iterates over
            the pairs only once.
        node_mask: A mask of the numbers that are nodes, shape (nodes,).
        cost: The cost of each node, shape (nodes,).
        fixed_end: The given end of each node, or NaN if the cost determines the end; may be empty.
        rank: The rank of each node; may be empty.
        hop_time: The time from each node to a successor on another rank; may be empty.
    """

    edges: Iterable[tuple[Positions, Positions]]
    node_mask: NDArray[np.bool_]
    cost: Times
    fixed_end: Times = _NO_TIMES
    rank: Positions = _NO_RANKS
    hop_time: Times = _NO_TIMES


def solve_by_loop(
    problem: LongestPathProblem, loops: tuple[Loop, ...] | None = None
) -> tuple[Times, Levels]:
    """Return the start and the level of each node, with compiled loops or plain Python.

    Args:
        problem: The nodes and edges.
        loops: `LOOPS` as machine code; None runs them in Python over lists.

    Returns:
        The start of each node, shape (nodes,); and its level. The level is one more than the
        largest level among the predecessors, and 1 for a node without predecessors. The level is 0
        for a node of a cycle, and for a node after a cycle.
    """
    edges, node_mask, *node_tables = problem
    nodes = len(node_mask)
    sources, targets = zip(*edges, strict=True)
    del edges
    source = np.concatenate(sources, dtype=np.int32)
    del sources  # frees memory before the next arrays are allocated
    target = np.concatenate(targets, dtype=np.int32)
    del targets
    queue = np.zeros(nodes, np.int32)
    level = np.zeros(nodes, np.int32)
    start = np.zeros(nodes)
    if loops is None:
        sorted_targets = target[np.argsort(source, kind="stable")]
        offsets = np.append(0, np.cumsum(np.bincount(source, minlength=nodes)))
        pending_counts = np.bincount(target, minlength=nodes)
    else:
        offsets = np.zeros(nodes + 1, np.int32)
        pending_counts = np.zeros(nodes, np.int32)
        sorted_targets = np.empty(len(source), np.int32)
        loops[0](source, target, offsets, sorted_targets, pending_counts)
    pending_counts[~node_mask] = 1
    arguments: list[Any] = [
        *node_tables,
        pending_counts,
        offsets,
        sorted_targets,
        queue,
        start,
        level,
    ]
    if loops is not None:
        loops[1](*arguments)
        return start, level
    lists = [argument.tolist() for argument in arguments]
    fill_longest_paths(*lists)
    return np.array(lists[-2], float), np.array(lists[-1], np.int32)


def fill_successors(
    source: Numbers,
    target: Numbers,
    offsets: Numbers,
    sorted_targets: Numbers,
    pending_counts: Numbers,
) -> None:
    """Sort edges by their source, and count the edges to each node.

    Args:
        source: The source of each edge.
        target: The target of each edge.
        offsets: An output. Its length is the number of nodes + 1. The caller must fill it with
            zeros. Afterwards the edges of node a lead to
            `sorted_targets[offsets[a]:offsets[a + 1]]`.
        sorted_targets: An output: the targets, sorted by their source.
        pending_counts: An output: the number of edges to each node. The caller must fill it with
            zeros.
    """
    for a in source:
        offsets[a] += 1
    for b in target:
        pending_counts[b] += 1
    total = 0
    for a in range(len(offsets)):
        total += offsets[a]
        offsets[a] = total
    for k in range(len(source)):
        a = source[k]
        offsets[a] -= 1
        sorted_targets[offsets[a]] = target[k]


def fill_longest_paths(
    cost: Numbers,
    fixed_end: Numbers,
    rank: Numbers,
    hop_time: Numbers,
    pending_counts: Numbers,
    offsets: Numbers,
    sorted_targets: Numbers,
    queue: Numbers,
    start: Numbers,
    level: Numbers,
) -> None:
    """Fill the start and the level of each node.

    Args:
        cost: See `LongestPathProblem`.
        fixed_end: See `LongestPathProblem`.
        rank: See `LongestPathProblem`.
        hop_time: See `LongestPathProblem`.
        pending_counts: As `fill_successors` fills it, but 1 for numbers that are not nodes. The
            function reduces it to 0 for each node that it reaches.
        offsets: As `fill_successors` fills it.
        sorted_targets: As `fill_successors` fills it.
        queue: An output: the nodes, in the order in which the function reaches them.
        start: An output: the start of each node. The caller must fill it with zeros.
        level: An output: the level of each node, as `solve_by_loop` defines it. The caller must
            fill it with zeros.
    """
    nodes, has_fixed_ends, has_hops = len(cost), len(fixed_end) > 0, len(hop_time) > 0
    # The queue is first in, first out. So the last predecessor of a node has the largest level.
    head, tail = 0, 0
    for a in range(nodes):
        if pending_counts[a] == 0:
            level[a] = 1
            queue[tail] = a
            tail += 1
    while head < tail:
        a = queue[head]
        head += 1
        end = start[a] + cost[a]
        if has_fixed_ends and fixed_end[a] == fixed_end[a]:  # false for NaN
            end = fixed_end[a]
        for k in range(offsets[a], offsets[a + 1]):
            b = sorted_targets[k]
            edge_end = end
            if has_hops and rank[a] != rank[b]:
                edge_end = end + hop_time[a]
            if edge_end > start[b]:
                start[b] = edge_end
            pending_counts[b] -= 1
            if pending_counts[b] == 0:
                level[b] = level[a] + 1
                queue[tail] = b
                tail += 1


LOOPS: Final = (fill_successors, fill_longest_paths)  # compiled together by numba
