"""Compute the time from one step to the next, of many consecutive steps.

The span of one step says nothing of that: a rank that has ended its step begins the next one when
nothing holds it, while others are busy still.  What holds it is what meets all ranks, as the norm
of the gradients that a step waits for (`Program.norm_check`), and what it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from schedir.analysis.critical_path.longest_path import build_problem, solve_longest_paths
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.instruction_index import Positions
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    OPTIMIZER_STEP_OPS,
    Lane,
    Value,
    find_consumers,
)
from schedir.ir.program import Program
from schedir.verify.check import check

# What reads weights in another lane than that of the update: no queue holds it back.
_WEIGHT_READS: Final = tuple(
    op for op in find_consumers(Value.PARAMS) if INSTRUCTIONS[op].lane is not Lane.COMPUTE
)


def compute_step_period(
    program: Program,
    costs: Costs | None = None,
    *,
    progress_model: ProgressModel = "per_device",
    blocking_hosts: bool = False,
    steps: int = 32,
) -> float:
    """The mean time of the second half of `steps` steps of a lowered program in a row, in the unit
    of the costs.

    In each queue a step follows the one before, and what reads weights beside what computes (an
    Unshard) follows the update that made them.  A step whose update is validated after waits for
    the norm of the one before it ahead of its own update, and never has to be run again here.  A
    host that `blocking_hosts` begins a step when all messages and reductions that it waits for are
    over.

    Raises what `check` raises, and UsageError for less than two steps.

    >>> from schedir import PipelineShape, compile, schedules, simulate
    >>> from schedir.predict.step_period import compute_step_period
    >>> programs = [
    ...     compile(schedules.zb_h2, PipelineShape(4, 8), clip_grad_norm=True, norm_check=when)
    ...     for when in ("before_step", "after_step")
    ... ]
    >>> [compute_step_period(program) for program in programs]
    [27.0, 24.0]
    >>> float(simulate(programs[1]).active_span.max())
    24.0
    """
    check(program, progress_model, blocking_hosts=blocking_hosts)
    if steps < 2:
        raise UsageError(f"a period is told of 2 steps or more, not of {steps}")
    graph = Graph.from_program(program, progress_model, blocking_hosts=blocking_hosts)
    one = build_problem(graph, costs or Costs())
    nodes, within, across = graph.node_id_limit, [*one.edges], [*_iter_step_edges(graph)]
    edges = [(a + nodes * n, b + nodes * n) for n in range(steps) for a, b in within]
    for n in range(steps - 1):
        edges += [(a + nodes * n, b + nodes * (n + 1)) for a, b in across]
    whole = one._replace(
        edges=edges, node_mask=np.tile(one.node_mask, steps), cost=np.tile(one.cost, steps)
    )
    start, _ = solve_longest_paths(whole)
    ends = (start + whole.cost).reshape(steps, nodes)[:, graph.node].max(1)
    half = steps // 2
    return float((ends[-1] - ends[half - 1]) / (steps - half))


def _iter_step_edges(graph: Graph) -> Iterator[tuple[Positions, Positions]]:
    """Edges from the nodes of a step to those of the next."""
    index, (enter, leave) = graph.index, graph.entry_exit_nodes
    _, first = np.unique(graph.queue, return_index=True)
    _, back = np.unique(graph.queue[::-1], return_index=True)
    last = len(index) - 1 - back
    yield leave[last], enter[first]
    updates, reads = (
        np.flatnonzero(index.is_op(ops)) for ops in (OPTIMIZER_STEP_OPS, _WEIGHT_READS)
    )
    for update in updates.tolist():
        own = reads[index.rank[reads] == index.rank[update]]
        yield np.repeat(leave[update], len(own)), enter[own]
    validates = index.is_op(find_consumers(Value.LOCAL_NORM))
    if graph.blocking_hosts:
        waited = last[~validates[last]]
        for rank in range(graph.program.shape.ranks):
            mine, next_ones = (at[index.rank[at] == rank] for at in (waited, first))
            yield np.repeat(leave[mine], len(next_ones)), np.tile(enter[next_ones], len(mine))
    behind = np.flatnonzero(validates)
    if len(behind):  # one each, rank by rank
        yield leave[behind], enter[updates]
