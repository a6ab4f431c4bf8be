"""Walk: reach every instruction that can be reached, each at its earliest time.

A round at a time.  All queues look at their heads at once: those that can start do, and the
next round begins.  So the work is a few array operations per round, and the number of rounds
is the depth of the program, not its size.  Programs with groups take the longer way over
nodes and edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schedir.costs import Costs
from schedir.graph import COLLECTIVES, Graph
from schedir.index import NONE
from schedir.ops import ROWS, SENDS, Opcode

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """When each instruction starts and ends, by position; infinite if it never does.

    `turn` is the round in which it was reached: an instruction is reached in a later round than
    all that it waits for.
    """

    start: Times
    end: Times
    turn: NDArray[np.int32]

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether each instruction ends."""
        return np.isfinite(self.end)


def walk(graph: Graph, costs: Costs | None = None) -> Walk:
    """Walk the dependency graph of a program at the given costs, by default unit costs."""
    priced = costs or Costs()
    if graph.index.joined.any():
        return _over_edges(graph, priced)
    return _Rounds(graph, priced).run()


class _Rounds:
    """The state of a walk.

    Arrays by position are small integers to save memory; what indexes is made intp first, which
    is several times faster.

    `time` is by position, twice over: when an instruction ended, and, n + 2 further, when it
    became the head of its queue (or, in a draft, when its value is there on another rank).
    Infinite is not yet.  NOTHING (n) has ended at 0, for values that nobody need give; NEVER
    (n + 1) does not end, for queues that are through.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        n, op = len(graph), graph.index.op
        nothing, never, self.second = n, n + 1, n + 2
        self.graph, self.n = graph, n
        self.table, self.row = graph.costs(costs)
        self.start = np.full(n, np.inf)
        self.turn = np.zeros(n, np.int32)
        self.time = np.full(2 * self.second, np.inf)
        self.time[nothing] = 0.0
        self.needs = np.full((2, n + 2), never, np.int32)
        for row, needs in zip(self.needs, graph.needs, strict=True):
            row[:n] = needs
            row[:n][needs == NONE] = nothing
        self.late = self._far(costs) if graph.program.is_draft else None
        # A send needs the other side to be a head; what it takes along has no turn of its own.
        meets = np.flatnonzero(np.array([row.meets is not None for row in ROWS])[op])
        self.needs[1, meets] = never
        sends = np.flatnonzero(np.isin(op, SENDS))
        sends = sends[graph.partner[sends] != NONE]
        self.sends = np.zeros(n, bool)
        self.sends[sends] = True
        self.needs[1, sends] = graph.partner[sends] + self.second
        self._line_up()
        self.meetings = [at for o in COLLECTIVES if len(at := np.flatnonzero(op == o))]

    def _far(self, costs: Costs) -> Times | None:
        """In a draft, what a value takes from rank to rank, by its maker's stage."""
        late = costs.table(self.graph.program.plan.stages)[Opcode.SendAct]
        if not late.any():
            return None
        giver, rank = self.graph.needs, self.graph.index.rank
        far = (giver != NONE) & (rank[giver] != rank)
        self.needs[:, : self.n] += np.where(far, np.int32(self.second), np.int32(0))
        return np.asarray(late[self.graph.index.stage])

    def _line_up(self) -> None:
        """Put the first of each queue at its head, and everyone behind the one before."""
        queue, order = self.graph.queue, self.graph.in_queues()
        same = queue[order[1:]] == queue[order[:-1]]
        self.after = np.full(self.n, self.n + 1, np.int32)
        self.after[order[:-1][same]] = order[1:][same]
        self.queue = queue
        self.head = order[np.flatnonzero(np.r_[True, ~same][: self.n])]
        self.free = np.zeros(len(self.head))  # when each queue's last instruction ended
        if self.late is None:
            self.time[self.second + self.head] = 0.0

    def run(self) -> Walk:
        """Rounds until nothing moves."""
        first, second = self.needs
        time, head, free, partner = self.time, self.head, self.free, self.graph.partner
        turn, moved, messages = 0, True, bool(self.sends.any())
        while moved:
            turn += 1
            start = time[first[head].astype(np.intp)]
            np.maximum(start, time[second[head].astype(np.intp)], out=start)
            np.maximum(start, free, out=start)
            queue = (start < np.inf).nonzero()[0]
            moved = len(queue) > 0
            at, start = head[queue], start[queue]
            end = self._put(at, queue, start, turn)
            if self.late is not None:
                time[self.second + at] = end + self.late[at]
            if messages:
                sent = self.sends[at].nonzero()[0]
                if len(sent):
                    other = partner[at[sent]].astype(np.intp)
                    there = self.queue[other].astype(np.intp)
                    self._put(other, there, start[sent], turn, end[sent])
            if not moved:
                moved = any([self._meet(members, turn) for members in self.meetings])
        return Walk(self.start, time[: self.n], self.turn)

    def _put(
        self,
        at: NDArray[np.intp],
        queue: NDArray[np.intp],
        start: Times,
        turn: int,
        end: Times | None = None,
    ) -> Times:
        """Let heads of queues run, and those behind them come to the front."""
        if end is None:
            end = start + self.table[self.row[at].astype(np.intp)]
        after = self.after[at].astype(np.intp)
        self.start[at], self.time[at], self.turn[at] = start, end, turn
        self.free[queue], self.head[queue] = end, after
        if self.late is None:
            self.time[self.second + after] = end
        return end

    def _meet(self, members: NDArray[np.intp], turn: int) -> bool:
        """Let a collective run if all its members are heads and have their values."""
        queue = self.queue[members].astype(np.intp)
        ready = self.time[self.needs[0][members]].max()
        if not ready < np.inf or (self.head[queue] != members).any():
            return False
        start = np.full(len(members), max(ready, self.free[queue].max()))
        end = (start + self.table[self.row[members]]).max()
        self._put(members, queue, start, turn, np.full(len(members), end))
        return True


def _over_edges(graph: Graph, costs: Costs) -> Walk:
    """The same over explicit nodes and edges, groups among them: a frontier at a time."""
    edges, nodes = graph.edges, graph.nodes
    cost, delay = _node_costs(graph, costs)
    order = np.argsort(edges[:, 0], kind="stable")
    after = edges[order, 1]
    first = np.searchsorted(edges[order, 0], np.arange(nodes + 1))
    wait = delay[edges[order, 0]] * _crosses(graph, edges[order])
    missing = np.bincount(edges[:, 1], minlength=nodes)
    present = np.zeros(nodes, bool)
    present[graph.node] = present[graph.gates] = True
    start, turn = np.zeros(nodes), np.zeros(nodes, np.int32)
    front = np.flatnonzero(present & (missing == 0))
    turns = 0
    while len(front):
        turns += 1
        turn[front] = turns
        many = first[front + 1] - first[front]
        each = np.repeat(first[front] - np.cumsum(many) + many, many) + np.arange(many.sum())
        to = after[each]
        np.maximum.at(start, to, np.repeat(start[front] + cost[front], many) + wait[each])
        np.subtract.at(missing, to, 1)
        front = np.unique(to[missing[to] == 0])
    start[turn == 0] = np.inf
    node = graph.node
    return Walk(start[node], (start + cost)[node], turn[node])


def _node_costs(graph: Graph, costs: Costs) -> tuple[Times, Times]:
    """The cost of each node, and what its value takes to another rank of a draft."""
    index, stages = graph.index, graph.program.plan.stages
    table, row = graph.costs(costs)
    each = table[row]
    cost = np.zeros(graph.nodes)
    collective = np.isin(index.op, COLLECTIVES)
    np.add.at(cost, graph.node, np.where(collective, 0.0, each))
    late = np.flatnonzero(collective)
    np.maximum.at(cost, graph.node[late], each[late])
    together = costs.together(stages)
    if together is not None:
        second = np.flatnonzero(index.joined & (index.op <= Opcode.BackwardWeight))
        one = np.where(index.op[second] == Opcode.Forward, second, second - 1)
        cost[graph.node[second]] = together[index.stage[one]]
    delay = np.zeros(graph.nodes)
    if graph.program.is_draft:
        send = costs.table(stages)[Opcode.SendAct]
        delay[: len(index)] = send[index.stage]
    return cost, delay


def _crosses(graph: Graph, edges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each edge leads from one rank to another."""
    rank = np.zeros(graph.nodes, np.int64)
    rank[: len(graph)] = graph.index.rank
    return np.asarray(rank[edges[:, 0]] != rank[edges[:, 1]])
