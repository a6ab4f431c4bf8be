"""Find longest paths with a plain loop over nodes and edges, which numba can compile.

A loop gets all that it works on, and changes what it is given to fill.  It is written in what
Python and numba have in common, so it runs in two ways: over lists, which is fastest for small
programs, and compiled over arrays (`compiled`), where numba is installed.
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
Numbers = Any  # of one dimension: a list, or an array

_NO_TIMES, _NO_RANKS = np.empty(0), np.empty(0, np.int32)


class LongestPathProblem(NamedTuple):
    """Nodes and edges to find longest paths in.

    `edges` come once, as arrays from whom and to whom, some at a time.  `node_mask` says which
    numbers are nodes; a node ends `cost` after its start, or at `fixed_end` where that is a number.
    The next may start then, or, where it has another `rank`, after a `hop_time` of the node's.
    `fixed_end`, and `rank` and `hop_time`, may be empty.
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
    """The start of each node, and its turn: by LOOPS compiled, or by Python, over lists.

    The turn is one more than the latest turn of all that the node waits for, 1 if it waits for
    nothing, and 0 if it is never reached.
    """
    edges, node_mask, *given = problem
    nodes, (sources, targets) = len(node_mask), zip(*edges, strict=True)
    del edges
    source = np.concatenate(sources, dtype=np.int32)
    del sources  # large programs need the room
    target = np.concatenate(targets, dtype=np.int32)
    del targets
    ready, turn, start = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32), np.zeros(nodes)
    if loops is None:
        after = target[np.argsort(source, kind="stable")]
        first = np.append(0, np.cumsum(np.bincount(source, minlength=nodes)))
        missing = np.bincount(target, minlength=nodes)
    else:
        first, missing = np.zeros(nodes + 1, np.int32), np.zeros(nodes, np.int32)
        after = np.empty(len(source), np.int32)
        loops[0](source, target, first, after, missing)
    missing[~node_mask] = 1
    everything: list[Any] = [*given, missing, first, after, ready, start, turn]
    if loops is not None:
        loops[1](*everything)
        return start, turn
    lists = [each.tolist() for each in everything]
    fill_longest_paths(*lists)
    return np.array(lists[-2], float), np.array(lists[-1], np.int32)


def fill_successors(
    source: Numbers,
    target: Numbers,
    offsets: Numbers,
    sorted_targets: Numbers,
    pending_counts: Numbers,
) -> None:
    """Fill edges by their source: those of node a lead to `after[first[a]:first[a + 1]]`.

    `offsets` comes with one zero more than there are nodes, and `pending_counts`, in which the
    edges to each node are counted, with one for each.
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
    """Fill `start` and `level`, which come with zeros, as `queue`, which has room for all nodes.

    The first four are the SchedulingProblem's, the others as `fill_successors` fills them.
    """
    nodes, fixes, hops = len(cost), len(fixed_end) > 0, len(hop_time) > 0
    # First in, first out: so the last that a node waits for is of the latest turn.
    done, known = 0, 0
    for a in range(nodes):
        if pending_counts[a] == 0:
            level[a] = 1
            queue[known] = a
            known += 1
    while done < known:
        a = queue[done]
        done += 1
        end = start[a] + cost[a]
        if fixes and fixed_end[a] == fixed_end[a]:  # else it is not a number
            end = fixed_end[a]
        for k in range(offsets[a], offsets[a + 1]):
            b = sorted_targets[k]
            given = end
            if hops and rank[a] != rank[b]:
                given = end + hop_time[a]
            if given > start[b]:
                start[b] = given
            pending_counts[b] -= 1
            if pending_counts[b] == 0:
                level[b] = level[a] + 1
                queue[known] = b
                known += 1


LOOPS: Final = (fill_successors, fill_longest_paths)  # what is compiled
