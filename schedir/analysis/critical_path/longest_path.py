"""Compute the earliest start of every instruction that can start.

Over the nodes and edges of the dependency graph, in time that grows with both: a node at a time
in a loop, compiled where that pays, or a frontier of nodes at a time in arrays.
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

MAX_LOOP_NODES = 4096  # nodes, of which a loop over lists takes less time than frontiers
SECONDS_PER_NODE = 2e-7  # of a walk by frontiers, where programs are large; docs/results/compile.md


@dataclass(frozen=True)
class EarliestTimes:
    """When each instruction starts and ends, by position; infinite if it never does.

    `level` is one more than the latest turn of all that the instruction waits for, 1 if it waits
    for nothing, and 0 if it is never reached.
    """

    start: Times
    end: Times
    level: Levels

    @property
    def is_done(self) -> NDArray[np.bool_]:
        """Whether each instruction ends."""
        return self.level > 0


@np.errstate(over="ignore")  # sums of costs may be infinite
def compute_earliest_times(
    graph: Graph, costs: Costs | None = None, known_ends: Times | None = None
) -> EarliestTimes:
    """Walk the dependency graph of a program at the given costs, by default unit costs.

    `known_ends` are ends, by position, of instructions that end then, whatever the costs say; it is
    not a number where the costs decide.
    """
    asked = build_problem(graph, costs or Costs(), known_ends)
    start, turn = solve_longest_paths(asked)
    end = asked.cost + start
    if known_ends is not None:
        end = np.where(np.isnan(asked.fixed_end), end, asked.fixed_end)
    del asked  # large programs need the room
    start, end, turn = start[graph.node], end[graph.node], turn[graph.node]
    start[turn == 0] = end[turn == 0] = np.inf
    return EarliestTimes(start, end, turn)


def compute_remaining_times(graph: Graph, costs: Costs | None = None) -> Times:
    """The longest path from the start of each instruction of a lowered program to its end.

    What starts with less than that left makes the program longer.  The same walk, backwards.
    """
    asked = build_problem(graph, costs or Costs())
    left, _ = solve_longest_paths(asked._replace(edges=((b, a) for a, b in asked.edges)))
    return np.asarray((left + asked.cost)[graph.node])


def solve_longest_paths(problem: LongestPathProblem) -> tuple[Times, Levels]:
    """The start of each node, and its turn, as `solve_by_loop`, in the way that takes least."""
    loops = compile_if_worthwhile(LOOPS, len(problem.cost) * SECONDS_PER_NODE)
    if loops is not None:
        return solve_by_loop(problem, loops)
    begin = thread_time()
    found = (
        solve_by_loop(problem)
        if len(problem.cost) <= MAX_LOOP_NODES
        else solve_by_frontiers(problem)
    )
    add_uncompiled_time(thread_time() - begin)
    return found


def build_problem(
    graph: Graph, costs: Costs, known_ends: Times | None = None
) -> LongestPathProblem:
    """What `compute_earliest_times` solves."""
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
    """The cost of each node: of a collective the most that a member takes, of a pair the sum."""
    index, node = graph.index, graph.node
    cost = np.zeros(graph.node_id_limit)
    cost[: len(index)] = instruction_costs
    own = cost[: len(index)]
    for members in graph.collective_groups:
        cost[members[:1]] = own[members].max()
    if not index.has_joined:
        return cost
    pairs = np.flatnonzero(index.joined & (node != np.arange(len(index), dtype=np.int32)))
    pairs = pairs[np.isin(index.op[pairs], COMPUTE_OPS)]
    cost[node[pairs]] += own[pairs]
    together = costs.paired(graph.program.shape)
    if together is not None:
        forward = np.where(index.op[pairs] == FORWARD, pairs, pairs - 1)
        other = index.op[2 * pairs - 1 - forward]
        priced = (index.op[forward] == FORWARD) & np.isin(other, BACKWARD_OPS)
        cost[node[pairs[priced]]] = look_up(
            together, index.stage[forward[priced]], index.mb[forward[priced]]
        )
    return cost
