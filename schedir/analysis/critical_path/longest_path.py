"""Compute the earliest start and end of every instruction.

The running time grows with the number of nodes and edges of the dependency graph. Small graphs use
a loop over nodes, and large graphs use arrays (`level_sweep`). If numba is installed and saves more
time than its import takes, the loop runs as machine code.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.level_sweep import solve_by_frontiers
from schedir.analysis.critical_path.node_loop import (
    LOOPS,
    Levels,
    LongestPathProblem,
    solve_by_loop,
)
from schedir.analysis.critical_path.node_loop import Times as Times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.numba_jit import add_uncompiled_time, compile_if_worthwhile
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, FORWARD, SEND_OPS

MAX_LOOP_NODES = 4096  # up to this number of nodes, a loop over lists is faster than frontiers
SECONDS_PER_NODE = 2e-7  # seconds per node of `solve_by_frontiers`; docs/results/compile.md


@dataclass(frozen=True)
class EarliestTimes:
    """The earliest start and end of each instruction, by position.

    Attributes:
        start: Earliest start of each instruction, shape (n,), in the unit of the costs; infinite
            for an instruction that never ends because of a cycle.
        end: Earliest end of each instruction, shape (n,); infinite if the start is infinite.
        level: One more than the largest level among the predecessors of the instruction. 1 for an
            instruction without predecessors, and 0 for an instruction that never ends.
    """

    start: Times
    end: Times
    level: Levels

    @property
    def is_done(self) -> NDArray[np.bool_]:
        """A mask of the instructions that end."""
        return self.level > 0


@np.errstate(over="ignore")  # sums of costs may be infinite
def compute_earliest_times(
    graph: Graph, costs: Costs | None = None, known_ends: Times | None = None
) -> EarliestTimes:
    """Return the earliest start and end of each instruction of a program.

    Args:
        graph: The dependency graph of the program.
        costs: The costs of instructions; unit costs by default.
        known_ends: Given ends of instructions, shape (n,). If an entry is NaN, the cost determines
            the end of the instruction. With None, the costs determine all ends.
    """
    problem = build_problem(graph, costs or Costs(), known_ends)
    start, level = solve_longest_paths(problem)
    end = problem.cost + start
    if known_ends is not None:
        end = np.where(np.isnan(problem.fixed_end), end, problem.fixed_end)
    del problem  # frees memory before the next arrays are allocated
    start, end, level = start[graph.node], end[graph.node], level[graph.node]
    start[level == 0] = end[level == 0] = np.inf
    return EarliestTimes(start, end, level)


def compute_remaining_times(graph: Graph, costs: Costs | None = None) -> Times:
    """Return the longest time from the start of each instruction to the end of the program.

    The length of the critical path minus this time is the latest time at which the instruction can
    start without making the program longer.

    Args:
        graph: The dependency graph of a lowered program.
        costs: The costs of instructions; unit costs by default.

    Returns:
        Times of shape (n,), in the unit of the costs.
    """
    problem = build_problem(graph, costs or Costs())
    time_after, _ = solve_longest_paths(problem._replace(edges=((b, a) for a, b in problem.edges)))
    return np.asarray((time_after + problem.cost)[graph.node])


def solve_longest_paths(problem: LongestPathProblem) -> tuple[Times, Levels]:
    """Return the start and the level of each node, with the fastest available method.

    Args:
        problem: The nodes and edges.

    Returns:
        See `solve_by_loop`.
    """
    loops = compile_if_worthwhile(LOOPS, len(problem.cost) * SECONDS_PER_NODE)
    if loops is not None:
        return solve_by_loop(problem, loops)
    begin_time = thread_time()
    solution = (
        solve_by_loop(problem)
        if len(problem.cost) <= MAX_LOOP_NODES
        else solve_by_frontiers(problem)
    )
    add_uncompiled_time(thread_time() - begin_time)
    return solution


def build_problem(
    graph: Graph, costs: Costs, known_ends: Times | None = None
) -> LongestPathProblem:
    """Return the longest-path problem of a dependency graph at the given costs.

    In a draft, a value that passes between ranks takes the cost of a send, because the draft has no
    messages.

    Args:
        graph: The dependency graph.
        costs: The costs of instructions.
        known_ends: See `compute_earliest_times`.
    """
    table, row = graph.get_cost_table(costs)
    problem = LongestPathProblem(
        graph.edges(), graph.node_mask, _compute_node_costs(graph, costs, table[row])
    )
    if known_ends is not None:
        fixed = np.full(graph.node_id_limit, np.nan)
        fixed[graph.node] = known_ends
        problem = problem._replace(fixed_end=fixed)
    if graph.program.is_draft:
        send = costs.for_opcode(SEND_OPS[0], graph.program.shape)
        if send.any():
            hop = look_up(send, graph.index.stage, graph.index.mb)
            problem = problem._replace(rank=graph.index.rank, hop_time=hop)
    return problem


def _compute_node_costs(graph: Graph, costs: Costs, instruction_costs: Times) -> Times:
    """Return the cost of each node.

    A collective costs the largest cost of its members. A pair of joined computes costs the sum of
    both, or the cost that `Costs` gives to the pair.
    """
    index, node = graph.index, graph.node
    cost = np.zeros(graph.node_id_limit)
    cost[: len(index)] = instruction_costs
    member_costs = cost[: len(index)]
    for members in graph.collective_groups:
        cost[members[:1]] = member_costs[members].max()
    if not index.has_joined:
        return cost
    pairs = np.flatnonzero(index.joined & (node != np.arange(len(index), dtype=np.int32)))
    pairs = pairs[np.isin(index.op[pairs], COMPUTE_OPS)]
    cost[node[pairs]] += member_costs[pairs]
    pair_costs = costs.paired(graph.program.shape)
    if pair_costs is not None:
        forward = np.where(index.op[pairs] == FORWARD, pairs, pairs - 1)
        partner_op = index.op[2 * pairs - 1 - forward]
        has_pair_cost = (index.op[forward] == FORWARD) & np.isin(partner_op, BACKWARD_OPS)
        cost[node[pairs[has_pair_cost]]] = look_up(
            pair_costs, index.stage[forward[has_pair_cost]], index.mb[forward[has_pair_cost]]
        )
    return cost
