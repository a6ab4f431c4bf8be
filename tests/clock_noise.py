"""Compute the timeline that ranks would measure on CPUs for a run with known times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import compute_earliest_times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import TRANSFER_OPS, Lane
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline, build_spans

Floats = NDArray[np.float64]


def measure_timeline(
    program: Program,
    costs: Costs,
    progress_model: ProgressModel = "per_edge",
    *,
    host: float = 0.0,
    clocks: Floats | None = None,
    blocking_hosts: bool = False,
) -> Timeline:
    """Return the timeline that ranks would record for a run with given costs.

    A rank records the end of a transfer only when it needs its value and its compute lane is free.
    The first `host` of the cost of each compute is time of the host before the compute starts. The
    host looks for ended transfers in the first half of this time. `clocks` has the offset of each
    rank's clock. Blocking hosts record the start of a message when both sides have reached it, even
    if the message waits in its queue.
    """
    graph = Graph(program, progress_model, blocking_hosts=blocking_hosts)
    true = compute_earliest_times(graph, costs)
    assert true.is_done.all()
    spans = build_spans(program, true.start, true.end)
    compute, own = spans["lane"] == Lane.COMPUTE, program.offsets[spans["rank"]]
    # The time at which the compute lane is free when the Stream reaches an instruction.
    free = np.where(compute, true.end, 0.0)
    for lo, hi in zip(program.offsets[:-1], program.offsets[1:], strict=True):
        free[lo:hi] = np.append(0.0, np.maximum.accumulate(free[lo:hi])[:-1])
    looked = np.full(graph.node_id_limit, -np.inf)
    for needs in graph.needs:
        late = (needs >= 0) & ~compute[needs] & (needs >= own)
        np.maximum.at(looked, graph.node[needs[late]], free[late] + host / 2 * compute[late])
    start, end = true.start.copy(), true.end.copy()
    end[~compute] = np.maximum(end, looked[graph.node])[~compute]
    if blocking_hosts:
        posted = np.zeros(graph.node_id_limit)
        np.maximum.at(posted, graph.node, free)
        moves = np.isin(spans["op"], TRANSFER_OPS)
        start[moves] = np.minimum(start, posted[graph.node])[moves]
    start[compute] += np.minimum(host, end - start)[compute]
    if clocks is not None:
        begun, over = np.full(graph.node_id_limit, -np.inf), np.full(graph.node_id_limit, -np.inf)
        ahead = clocks[spans["rank"]]
        np.maximum.at(begun, graph.node, start + ahead)
        np.maximum.at(over, graph.node, end + ahead)
        start = np.where(compute, start + ahead, begun[graph.node])
        end = np.where(compute, end + ahead, np.maximum(begun, over)[graph.node])
    error = 0.0 if clocks is None else float(np.ptp(clocks))
    spans["start"], spans["end"] = start - start.min(), end - start.min()
    return Timeline(
        program,
        spans,
        "measured",
        "s",
        progress_model,
        clock_error=error,
        blocking_hosts=blocking_hosts,
    )


def simulate_slow_last_microbatch(program: Program, times: float) -> Timeline:
    """Return a run whose computes of the last microbatch take `times` times as long as the others.

    Costs are 1. Messages have no lanes, so ranks wait only for values.
    """
    timeline = simulate(program)
    spans, graph = timeline.spans.copy(), timeline.graph
    after: list[list[int]] = [[] for _ in range(graph.node_id_limit)]
    for source, target in graph.edges():
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            after[a].append(b)
    takes, ready = np.zeros(graph.node_id_limit), np.zeros(graph.node_id_limit)
    slow = (spans["mb"] == program.shape.microbatches - 1) & (spans["lane"] == Lane.COMPUTE)
    np.maximum.at(takes, graph.node, (spans["end"] - spans["start"]) * np.where(slow, times, 1.0))
    for node in graph.random_topological_order(0):
        for b in after[node]:
            ready[b] = max(ready[b], ready[node] + takes[node])
    spans["start"] = ready[graph.node]
    spans["end"] = (ready + takes)[graph.node]
    return replace(timeline, spans=spans, kind="measured", unit="s")
