"""Compare the times of a Timeline with the dependency graph."""

from __future__ import annotations

import numpy as np

from schedir.predict.timeline import Timeline


def find_early_instructions(timeline: Timeline, tolerance: float = 0.0) -> list[str]:
    """The instructions that begin before all that they wait for has ended, and those that end
    before they begin."""
    graph, spans = timeline.graph, timeline.spans
    after: list[list[int]] = [[] for _ in range(graph.node_id_limit)]
    for source, target in graph.edges():
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            after[a].append(b)
    begins = np.full(graph.node_id_limit, np.inf)
    over = np.full(graph.node_id_limit, -np.inf)
    np.minimum.at(begins, graph.node, spans["start"])
    np.maximum.at(over, graph.node, spans["end"])
    ready, found = np.full(graph.node_id_limit, -np.inf), []
    for node in graph.random_topological_order(0):
        over[node] = max(over[node], ready[node])  # the end of a group is not recorded
        if begins[node] < ready[node] - tolerance:
            found.append(str(graph.index.locate(node)[2]))
        for b in after[node]:
            ready[b] = max(ready[b], over[node])
    backwards = np.flatnonzero(spans["end"] < spans["start"]).tolist()
    found += [str(graph.index.locate(k)[2]) for k in backwards]
    return found
