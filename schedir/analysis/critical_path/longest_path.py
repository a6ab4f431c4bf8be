"""Compute the earliest start of every instruction that can start.

Over the nodes and edges of the dependency graph, in time that grows with both: a node at a time
in a loop, compiled where that pays, or a frontier of nodes at a time in arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.level_sweep import by_frontiers
from schedir.analysis.critical_path.node_loop import LOOPS, LongestPathProblem, Turns, by_loop
from schedir.analysis.critical_path.node_loop import Times as Times
from schedir.analysis.dependency_graph import Graph
from schedir.analysis.numba_jit import compiled, paid
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import look_up
from schedir.ir.isa.instructions import BACKWARDS, COMPUTE, FORWARD, SENDS

FEW = 4096  # nodes, of which a loop over lists takes less time than frontiers
SECONDS_PER_NODE = 2e-7  # of a walk by frontiers, where programs are large; docs/results/compile.md


@dataclass(frozen=True)
class EarliestTimes:
    """When each instruction starts and ends, by position; infinite if it never does.

    `turn` is one more than the latest turn of all that the instruction waits for, 1 if it waits
    for nothing, and 0 if it is never reached.
    """

    start: Times
    end: Times
    turn: Turns

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether each instruction ends."""
        return self.turn > 0


@np.errstate(over="ignore")  # sums of costs may be infinite
def walk(graph: Graph, costs: Costs | None = None, known: Times | None = None) -> EarliestTimes:
    """Walk the dependency graph of a program at the given costs, by default unit costs.

    `known` are ends, by position, of instructions that end then, whatever the costs say; it is
    not a number where the costs decide.
    """
    asked = problem_of(graph, costs or Costs(), known)
    start, turn = solve(asked)
    end = asked.cost + start
    if known is not None:
        end = np.where(np.isnan(asked.fixed), end, asked.fixed)
    del asked  # large programs need the room
    start, end, turn = start[graph.node], end[graph.node], turn[graph.node]
    start[turn == 0] = end[turn == 0] = np.inf
    return EarliestTimes(start, end, turn)


def remaining(graph: Graph, costs: Costs | None = None) -> Times:
    """The longest path from the start of each instruction of a lowered program to its end.

    What starts with less than that left makes the program longer.  The same walk, backwards.
    """
    asked = problem_of(graph, costs or Costs())
    left, _ = solve(asked._replace(edges=((b, a) for a, b in asked.edges)))
    return np.asarray((left + asked.cost)[graph.node])


def solve(problem: LongestPathProblem) -> tuple[Times, Turns]:
    """The start of each node, and its turn, as `by_loop`, in the way that takes least."""
    loops = compiled(LOOPS, len(problem.cost) * SECONDS_PER_NODE)
    if loops is not None:
        return by_loop(problem, loops)
    begin = thread_time()
    found = by_loop(problem) if len(problem.cost) <= FEW else by_frontiers(problem)
    paid(thread_time() - begin)
    return found


def problem_of(graph: Graph, costs: Costs, known: Times | None = None) -> LongestPathProblem:
    """What `walk` solves."""
    table, row = graph.costs(costs)
    problem = LongestPathProblem(
        graph.edges(), graph.node_mask, _node_costs(graph, costs, table[row])
    )
    if known is not None:
        fixed = np.full(graph.nodes, np.nan)
        fixed[graph.node] = known
        problem = problem._replace(fixed=fixed)
    if graph.program.is_draft:
        send = costs.of(SENDS[0], graph.program.shape)
        if send.any():
            hop = look_up(send, graph.index.stage, graph.index.mb)
            problem = problem._replace(rank=graph.index.rank, hop=hop)
    return problem


def _node_costs(graph: Graph, costs: Costs, each: Times) -> Times:
    """The cost of each node: of a collective the most that a member takes, of a pair the sum."""
    index, node = graph.index, graph.node
    cost = np.zeros(graph.nodes)
    cost[: len(index)] = each
    own = cost[: len(index)]
    for members in graph.collective_groups:
        cost[members[:1]] = own[members].max()
    if not index.any_joined:
        return cost
    pairs = np.flatnonzero(index.joined & (node != np.arange(len(index), dtype=np.int32)))
    pairs = pairs[np.isin(index.op[pairs], COMPUTE)]
    cost[node[pairs]] += own[pairs]
    together = costs.together(graph.program.shape)
    if together is not None:
        forward = np.where(index.op[pairs] == FORWARD, pairs, pairs - 1)
        other = index.op[2 * pairs - 1 - forward]
        priced = (index.op[forward] == FORWARD) & np.isin(other, BACKWARDS)
        cost[node[pairs[priced]]] = look_up(
            together, index.stage[forward[priced]], index.mb[forward[priced]]
        )
    return cost
