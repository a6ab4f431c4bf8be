"""Simulate a program whose ranks share fewer processors than there are ranks."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from schedir.analysis.critical_path.longest_path import build_problem
from schedir.analysis.critical_path.node_loop import Times
from schedir.analysis.dependency_graph import Graph
from schedir.errors import UsageError, describe, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane
from schedir.ir.program import Program
from schedir.predict.simulate import require_representable
from schedir.predict.timeline import Timeline, build_spans
from schedir.verify.check import build_complete_graph, prove

CPU_LANES: Final = (Lane.COMPUTE, Lane.TP, Lane.DP, Lane.PARAMS)  # lanes that use a processor


def simulate_on_cpus(
    program: Program,
    costs: Costs,
    processors: float,
) -> Timeline:
    """Simulate a program with ranks that share the processors of a machine.

    If n ranks compute on fewer than n processors, each rank runs at processors/n of its speed. This
    is the ideal processor sharing of a fair thread scheduler. Sums and gathers of several processes
    use processors too, because they copy and add bytes. Messages use no processor. Hosts block, and
    each edge has its own queue, as with Gloo. If each running instruction has a processor, the
    result is the same as from `simulate`.

    Args:
        program: A lowered program.
        costs: The costs of a rank that runs alone.
        processors: The number of processors. The number may be below 1 if each rank represents
            several processes that share a machine.

    Raises:
        UsageError: `processors` is not a number above 0, or the program is a draft.
        CostsError: The costs add up to more than `MAX_TIME`.
        SchedirError: `check` refuses the program.

    References:
        Kleinrock 1967, "Time-shared systems: a theoretical treatment".

    Example:
        >>> from schedir import Costs, PipelineShape, compile, schedules, simulate
        >>> from schedir.predict.cpu_contention import simulate_on_cpus
        >>> program = compile(schedules.one_f_one_b, PipelineShape(ranks=4, microbatches=8))
        >>> costs = Costs(F=1, B=2)
        >>> [simulate_on_cpus(program, costs, n).span for n in (1, 2, 4)], 4 * 8 * 3
        ([96.0, 51.0, 33.0], 96)
    """
    require_type(program, "program", Program, "schedir.compile(schedule, shape)")
    require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
    is_invalid = isinstance(processors, NON_NUMBER_TYPES) or not isinstance(processors, int | float)
    if is_invalid or not 0 < processors < inf:
        raise UsageError(
            f"processors must be a number > 0, not {describe(processors)}", fields=["processors"]
        )
    if program.is_draft:
        raise UsageError(
            "program is a draft, which has no messages yet", hint="schedir.compile(schedule, shape)"
        )
    graph = build_complete_graph(program, "per_edge", blocking_hosts=True)
    prove(graph)
    start, end = _share_processors(graph, costs, float(processors))
    require_representable(end, program)
    spans = build_spans(program, start, end)
    return Timeline(program, spans, progress_model="per_edge", blocking_hosts=True)


def _share_processors(graph: Graph, costs: Costs, processors: float) -> tuple[Times, Times]:
    """Return the start and the end of each instruction.

    All running computes have the same speed at any time. So one number is enough for all of them:
    `progress`, the work that a compute would have done since time 0. A compute ends when `progress`
    has grown by its cost.
    """
    problem = build_problem(graph, costs)
    runs = [row.lane in CPU_LANES for row in INSTRUCTIONS]
    computes = np.zeros(graph.node_id_limit, bool)
    computes[: len(graph.index)] = np.array(runs)[graph.index.op]
    after: list[list[int]] = [[] for _ in range(graph.node_id_limit)]
    missing = [0] * graph.node_id_limit
    for source, target in problem.edges:
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            after[a].append(b)
            missing[b] += 1
    cost, shares = problem.cost.tolist(), computes.tolist()
    start = np.zeros(graph.node_id_limit)
    end = np.zeros(graph.node_id_limit)
    # Heap of running instructions that use no processor: (end, node).
    waiting: list[tuple[float, int]] = []
    # Heap of running instructions that use a processor: (`progress` at the end, node).
    working: list[tuple[float, int]] = []
    ready = [a for a in np.flatnonzero(problem.node_mask).tolist() if not missing[a]]
    time = progress = 0.0
    while ready or waiting or working:
        while ready:
            a = ready.pop()
            start[a] = time
            if shares[a]:
                heappush(working, (progress + cost[a], a))
            else:
                heappush(waiting, (time + cost[a], a))
        speed = min(1.0, processors / len(working)) if working else 1.0
        computed = time + max(0.0, working[0][0] - progress) / speed if working else inf
        next_time = min(computed, waiting[0][0] if waiting else inf)
        if computed <= next_time:
            progress, a = heappop(working)
        else:
            progress += (next_time - time) * speed
            _, a = heappop(waiting)
        time = end[a] = next_time
        if time == inf:
            break
        for b in after[a]:
            missing[b] -= 1
            if not missing[b]:
                ready.append(b)
    node = graph.node
    return start[node], end[node] if time < inf else np.full(len(node), inf)
