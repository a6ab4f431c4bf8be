"""Explain: who waits for whom when a program cannot finish."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.errors import DeadlockError, Site, Wait
from schedir.graph import Graph
from schedir.index import NONE
from schedir.walk import Walk


def deadlock(graph: Graph, walk: Walk) -> DeadlockError:
    """The error that shows the shortest cycle among the ranks that wait."""
    import networkx as nx

    left = _left(graph, walk)
    heads = _heads(graph, left)
    waits = nx.DiGraph()
    for head in heads.values():
        for needed in _unmet(graph, left, head):
            waits.add_edge(head, heads[int(graph.queue[needed])], needed=needed)
    cycle = _shortest_cycle(waits)
    steps = []
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        needed = waits.edges[a, b]["needed"]
        rank, at, instr = graph.index.place(a)
        needs_rank, needs_at, needs = graph.index.place(needed)
        stands_at = graph.index.place(b)[1]
        steps.append(Wait(rank, at, instr, needs, needs_rank, needs_at, stands_at))
    ran = int(left.sum())
    ranks = len({w.rank for w in steps})
    who = f"{ranks} ranks wait for each other" if ranks > 1 else "a rank waits for itself"
    return DeadlockError(
        f"{who}; stopped after {ran} of {len(graph.program)} instructions",
        program=graph.program.name,
        model=graph.model,
        cycle=steps,
        ran=ran,
        total=len(graph.program),
        window=_window(graph, steps),
    )


def _left(graph: Graph, walk: Walk) -> NDArray[np.bool_]:
    """Whether each instruction ends, and all that are issued with it."""
    done = walk.done
    if not graph.index.joined.any():
        return done
    left = np.ones(graph.nodes, bool)
    np.logical_and.at(left, graph.gates[1], done)
    return np.asarray(left[graph.gates[1]])


def _heads(graph: Graph, left: NDArray[np.bool_]) -> dict[int, int]:
    """By queue, the first instruction that never ends."""
    stuck = np.flatnonzero(~left)
    queues, first = np.unique(graph.queue[stuck], return_index=True)
    return dict(zip(queues.tolist(), stuck[first].tolist(), strict=True))


def _unmet(graph: Graph, left: NDArray[np.bool_], head: int) -> list[int]:
    """The instructions that a head waits for: values not given, partners not there.

    A group is entered as one, so its first member waits for whatever any member needs.
    """
    enter = graph.gates[0]
    grouped = enter[head] != graph.node[head]
    members = np.flatnonzero(enter == enter[head]) if grouped else np.array([head])
    needed = [n for n in graph.waits[:, members].reshape(-1).tolist() if n != NONE]
    for one in members.tolist():
        needed += np.flatnonzero(graph.node == graph.node[one]).tolist()
    waits = [n for n in needed if not left[n] and n not in members]
    mine = graph.queue[head]
    return sorted(n for n in waits if graph.queue[n] != mine or n == head or n > head)


def _shortest_cycle(waits: nx.DiGraph) -> list[int]:  # type: ignore[name-defined] # noqa: F821
    """The shortest cycle, the earliest if several are as short."""
    import networkx as nx

    best: list[int] = []
    for part in nx.strongly_connected_components(waits):
        if len(part) == 1 and not any(waits.has_edge(n, n) for n in part):
            continue
        inner = waits.subgraph(part)
        for node in sorted(part):
            for after in sorted(inner.successors(node)):
                path = nx.shortest_path(inner, after, node)
                if not best or len(path) < len(best):
                    best = [node, *path[:-1]]
    return best


def _window(graph: Graph, steps: list[Wait]) -> list[Site]:
    """What the second rank of the cycle has before the instruction that the first waits for."""
    first, second = steps[0], steps[1 % len(steps)]
    stream = graph.program.streams[first.needs_rank]
    lo, hi = first.stands_at, first.needs_index
    shown = [i for i in range(max(0, lo - 2), min(len(stream), hi + 1)) if i <= lo + 2 or i >= hi]
    notes = {lo: "waits", hi: f"rank {first.rank} waits for this"}
    if lo == hi:
        notes = {lo: f"waits, and rank {first.rank} waits for it"}
    return [Site(second.rank, i, stream[i], notes.get(i, "")) for i in shown]
