"""Walk: reach every instruction that can be reached, each at its earliest time.

A frontier at a time, over the nodes and edges of the dependency graph: what nothing holds back
ends, and what waited for nothing else is the next frontier.  So the work is a few array
operations per frontier and some nanoseconds per edge.  The number of frontiers is the depth of
the program, not its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.ir.costs import Costs
from schedir.ir.index import Positions
from schedir.ir.ops import BACKWARDS, COMPUTE, Opcode

Times = NDArray[np.float64]
_MOST = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Walk:
    """When each instruction starts and ends, by position; infinite if it never does.

    `turn` is the frontier in which it was reached, from 1 on, and 0 if it never was: an
    instruction is reached in a later turn than all that it waits for.
    """

    start: Times
    end: Times
    turn: NDArray[np.int32]

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether each instruction ends."""
        return self.turn > 0


@np.errstate(over="ignore")  # sums of costs may be infinite
def walk(graph: Graph, costs: Costs | None = None, known: Times | None = None) -> Walk:
    """Walk the dependency graph of a program at the given costs, by default unit costs.

    `known` are ends, by position, of instructions that end then, whatever the costs say; it is
    not a number where the costs decide.
    """
    priced, node = costs or Costs(), graph.node
    cost, fixed = _node_costs(graph, priced), None
    if known is not None:
        fixed = np.full(graph.nodes, np.nan)
        fixed[node] = known
    # In a draft, edges can take time of their own, so each has a place in the table.
    few = 0 if graph.program.is_draft else graph.nodes // 64
    after = _Successors.of(graph.nodes, graph.edges(), few)
    start, turn = _longest(after, graph.there, cost, _lags(graph, after, priced), fixed)
    del after  # large programs need the room, so each array goes before the next comes
    cost += start
    if fixed is not None:
        cost = np.where(np.isnan(fixed), cost, fixed)
    turn = turn[node]
    start = start[node]
    end = cost[node]
    start[turn == 0] = end[turn == 0] = np.inf
    return Walk(start, end, turn)


def remaining(graph: Graph, costs: Costs | None = None) -> Times:
    """The longest path from the start of each instruction of a lowered program to its end.

    What starts with less than that left makes the program longer.  The same walk, backwards.
    """
    cost = _node_costs(graph, costs or Costs())
    back = ((target, source) for source, target in graph.edges())
    before = _Successors.of(graph.nodes, back, graph.nodes // 64)
    left, _ = _longest(before, graph.there, cost)
    return np.asarray((left + cost)[graph.node])


@dataclass(frozen=True)
class _Successors:
    """Who waits for each node.

    `rows` has a row of places per node.  A place that is not used has the number of nodes, which
    stands for nobody.  A node with more successors than places has the number after that in its
    last place, and the others in `rest`.
    """

    rows: Positions
    rest: dict[int, NDArray[np.intp]]

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.rows) - 2

    @classmethod
    def of(cls, nodes: int, edges: Iterable[tuple[Positions, Positions]], few: int) -> _Successors:
        """Each edge in the first free place of its source; equal edges are one.

        Where no more than `few` edges want another place, there is none.
        """
        places = [np.full(nodes + 2, nodes, np.int32)]
        rest: dict[int, set[int]] = {}
        for source, target in edges:
            for place in places:
                source, target = _put(source, target, place, nodes)
            while len(source) > few:
                places.append(np.full(nodes + 2, nodes, np.int32))
                source, target = _put(source, target, places[-1], nodes)
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                rest.setdefault(a, set()).add(b)
        for a, more in rest.items():
            more.add(int(places[-1][a]))
            places[-1][a] = nodes + 1
        return cls(np.stack(places, 1), {a: np.array([*more]) for a, more in rest.items()})

    def before(self) -> NDArray[np.int32]:
        """How many nodes each one waits for."""
        count = np.zeros(self.nodes + 2, np.int32)
        for place in self.rows.T:
            for part in np.array_split(place, len(place) // 2**20 + 1):
                np.add.at(count, part.astype(np.intp), np.ones(len(part), np.int32))
        for more in self.rest.values():
            count[more] += 1
        return count


def _put(
    source: Positions, target: Positions, place: Positions, nobody: int
) -> tuple[Positions, Positions]:
    """Put edges where their source's place is free; returns those that must go elsewhere."""
    free = place[source] == nobody
    place[source[free]] = target[free]
    left = place[source] != target
    return source[left], target[left]


def _longest(
    after: _Successors,
    there: NDArray[np.bool_],
    cost: Times,
    lags: Times | None = None,
    fixed: Times | None = None,
) -> tuple[Times, NDArray[np.int32]]:
    """The longest path to each node, and the turn in which it is reached, 0 if it never is.

    `there` and `cost` are by node; `lags`, what passes between its end and a successor's start,
    by place.  Where `fixed` is a number, the node ends then.
    """
    rows, many = after.rows, after.nodes + 1
    missing = after.before()
    front = np.flatnonzero(there & (missing[: after.nodes] == 0))
    missing[after.nodes :] = _MOST
    start, turn = np.zeros(after.nodes + 2), np.zeros(after.nodes + 2, np.int32)
    turns, one, count = 0, *np.empty((2, 0), np.int32)
    while len(front):
        turns += 1
        turn[front] = turns
        end = start[front] + cost[front]
        if fixed is not None:
            end = np.where(np.isnan(fixed[front]), end, fixed[front])
        to = rows.take(front, 0).reshape(-1).astype(np.intp)
        given = end.repeat(rows.shape[1])
        if lags is not None:
            given += lags.take(front, 0).reshape(-1)
        if len(one) < len(to):
            one, count = np.ones(2 * len(to), np.int32), np.arange(2 * len(to), dtype=np.int32)
        np.maximum.at(start, to, given)
        np.subtract.at(missing, to, one[: len(to)])
        if missing[many] != _MOST:
            missing[many] = _MOST
            for k in np.flatnonzero(rows[front, -1] == many).tolist():
                more = after.rest[int(front[k])]
                start[more] = np.maximum(start[more], end[k])
                missing[more] -= 1
                to = np.concatenate([to, more])
        to = to[missing[to] == 0]
        turn[to] = number = count[: len(to)]
        front = to[turn[to] == number]  # once each
    return start[:-2], turn[:-2]


def _node_costs(graph: Graph, costs: Costs) -> Times:
    """The cost of each node: of a collective the most that a member takes, of a pair the sum."""
    index, node = graph.index, graph.node
    table, row = graph.costs(costs)
    cost = np.zeros(graph.nodes)
    cost[: len(index)] = table[row]
    own = cost[: len(index)]
    for members in graph.meetings:
        cost[members[:1]] = own[members].max()
    pairs = np.flatnonzero(index.joined & (node != np.arange(len(index), dtype=np.int32)))
    pairs = pairs[np.isin(index.op[pairs], COMPUTE)]
    cost[node[pairs]] += own[pairs]
    together = costs.together(graph.program.plan.stages)
    if together is not None:
        forward = np.where(index.op[pairs] == Opcode.Forward, pairs, pairs - 1)
        other = index.op[2 * pairs - 1 - forward]
        priced = (index.op[forward] == Opcode.Forward) & np.isin(other, BACKWARDS)
        cost[node[pairs[priced]]] = together[index.stage[forward[priced]]]
    return cost


def _lags(graph: Graph, after: _Successors, costs: Costs) -> Times | None:
    """In a draft, what a value takes to each successor that is on another rank."""
    if not graph.program.is_draft:
        return None
    send = costs.table(graph.program.plan.stages)[Opcode.SendAct]
    if not send.any():
        return None
    rank = np.append(graph.index.rank, np.full(2, -1, np.int32))
    far = (rank[after.rows[:-2]] != rank[:-2, None]) & (after.rows[:-2] < after.nodes)
    return np.asarray(far * send[graph.index.stage][:, None])
