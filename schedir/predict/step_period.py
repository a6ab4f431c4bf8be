"""Compute the step period: the mean time of a step among many consecutive steps.

The step period can be shorter than the span of one step. A rank that ends its step early can begin
the next step while other ranks are busy. The rank waits only for messages, and for collectives of
all ranks, such as the norm of the gradients before a step (`Program.norm_check`).
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

# Instructions that read weights on a lane other than compute. The update is on the compute lane. So
# no queue orders these instructions after the update.
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
    """Return the mean time of a step among many consecutive steps, in the unit of the costs.

    Each queue runs one step after the other. Some instructions on lanes other than compute read
    weights, such as Unshard. These instructions wait for the update of the previous step. With
    norm_check= "after_step", an update waits for the norm of the previous step. The simulation
    assumes that no update must be repeated. A blocking host begins a step when all messages and
    reductions of the previous step have ended.

    Args:
        program: A lowered program.
        costs: The cost of each instruction. The default is `Costs()`.
        progress_model: The progress model of the transport.
        blocking_hosts: True if hosts are blocking, as on CPUs.
        steps: The number of simulated steps. The result is the mean over the second half of these
            steps.

    Raises:
        UsageError: `steps` is less than 2.
        SchedirError: `check` refuses the program.

    Example:
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
        raise UsageError(f"steps must be at least 2, not {steps}")
    graph = Graph.from_program(program, progress_model, blocking_hosts=blocking_hosts)
    step_problem = build_problem(graph, costs or Costs())
    nodes = graph.node_id_limit
    step_edges = [*step_problem.edges]
    next_step_edges = [*_iter_step_edges(graph)]
    edges = [(a + nodes * n, b + nodes * n) for n in range(steps) for a, b in step_edges]
    for n in range(steps - 1):
        edges += [(a + nodes * n, b + nodes * (n + 1)) for a, b in next_step_edges]
    problem = step_problem._replace(
        edges=edges,
        node_mask=np.tile(step_problem.node_mask, steps),
        cost=np.tile(step_problem.cost, steps),
    )
    start, _ = solve_longest_paths(problem)
    ends = (start + problem.cost).reshape(steps, nodes)[:, graph.node].max(1)
    half = steps // 2
    return float((ends[-1] - ends[half - 1]) / (steps - half))


def _iter_step_edges(graph: Graph) -> Iterator[tuple[Positions, Positions]]:
    """Yield edges from the nodes of a step to the nodes of the next step."""
    index, (enter, leave) = graph.index, graph.entry_exit_nodes
    _, first_of_queue = np.unique(graph.queue, return_index=True)
    _, last_from_end = np.unique(graph.queue[::-1], return_index=True)
    last_of_queue = len(index) - 1 - last_from_end
    yield leave[last_of_queue], enter[first_of_queue]
    updates, reads = (
        np.flatnonzero(index.is_op(ops)) for ops in (OPTIMIZER_STEP_OPS, _WEIGHT_READS)
    )
    for update in updates.tolist():
        rank_reads = reads[index.rank[reads] == index.rank[update]]
        yield np.repeat(leave[update], len(rank_reads)), enter[rank_reads]
    is_validation = index.is_op(find_consumers(Value.LOCAL_NORM))
    if graph.blocking_hosts:
        awaited_last = last_of_queue[~is_validation[last_of_queue]]
        for rank in range(graph.program.shape.ranks):
            rank_last, rank_first = (
                positions[index.rank[positions] == rank]
                for positions in (awaited_last, first_of_queue)
            )
            yield (
                np.repeat(leave[rank_last], len(rank_first)),
                np.tile(enter[rank_first], len(rank_last)),
            )
    validations = np.flatnonzero(is_validation)
    if len(validations):  # each rank has one validation and one update
        yield leave[validations], enter[updates]
