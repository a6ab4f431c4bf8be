"""The dependency graph: when may an instruction start?

The one place that knows.  A program finishes under a progress model if and only if this
graph has no cycle; the longest path is the predicted time; any topological order is a legal
execution.  `check`, `simulate`, the lowering and the in-process executor all walk it.

Nodes are instructions, with a send and its receive, or a collective, contracted to one.  A
group of transfers issued together is entered at one node (*posted*) and left at another
(*complete*), and each of its transfers lies between: contracting it would call legal rings a
cycle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from schedir.costs import Costs
from schedir.errors import UsageError
from schedir.ops import HANDED, RECEIVES, ROWS, SENDS, Instr, Lane, Opcode, Per, Token, givers
from schedir.program import JOINED, OP, OPS, STAGE, Program, Words

Model = Literal["edge", "pair", "device", "serial"]
MODELS: Final[tuple[Model, ...]] = ("edge", "pair", "device", "serial")

_NONE: Final = -1


class Index:
    """Where each instruction of a program stands: arrays over all ranks, one behind the other.

    `op`, `stage`, `mb`, `rank` have one entry per instruction.  `at[op]` has the position of
    each (stage, mb) as stage*microbatches + mb, or of each stage, or of each rank (`Row.per`);
    -1 where there is none.  What is out of range has no entry there.
    """

    def __init__(self, program: Program) -> None:
        plan, words = program.plan, program.words
        self.op = (words >> OP & 0xFF).astype(np.int16)
        self.stage = (words >> STAGE & 0xFFFF).astype(np.int32)
        self.mb = (words & 0xFFFFFFFF).astype(np.int64)
        self.rank = np.repeat(np.arange(plan.ranks, dtype=np.int32), np.diff(program.offsets))
        self.joined = (words & JOINED) != 0
        self.size = {
            Per.MICROBATCH: plan.stages * plan.microbatches,
            Per.STAGE: plan.stages,
            Per.RANK: plan.ranks,
        }
        self.key = self.stage * plan.microbatches + self.mb
        self.valid = (self.stage < plan.stages) & (self.mb < plan.microbatches)
        for row in ROWS[Opcode.ReduceGrads :]:
            own = self.op == row.op
            self.key[own] = (self.stage if row.per is Per.STAGE else self.rank)[own]
        self.at: dict[Opcode, Words] = {}
        for row in ROWS:
            here = np.flatnonzero((self.op == row.op) & self.valid)
            if len(here):
                table = np.full(self.size[row.per], _NONE, np.int64)
                table[self.key[here]] = here
                self.at[row.op] = table

    def where(self, op: Opcode, key: Words) -> Words:
        """Positions of `op` at the given keys; -1 where there is none, or no such key."""
        if op not in self.at:
            return np.full(len(key), _NONE, np.int64)
        inside = (key >= 0) & (key < len(self.at[op]))
        return np.where(inside, self.at[op][np.where(inside, key, 0)], _NONE)


@dataclass(frozen=True)
class Walk:
    """A walk over the graph: start and end of each node, and the order they were reached in.

    Nodes that never start (they wait in a cycle) are not `done`.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    order: Words
    done: NDArray[np.bool_]


class Graph:
    """The dependency graph of a program under a progress model.

    A draft is read as if every value that crosses ranks took `Costs.send` and no queue.
    """

    def __init__(
        self, program: Program, model: Model = "device", index: Index | None = None
    ) -> None:
        if model not in MODELS:
            raise UsageError(f"model must be one of {', '.join(MODELS)}, not {model!r}")
        self.program = program
        self.model = model
        self.index = index or Index(program)
        self.values = self._values()
        self._contract()

    # ------------------------------------------------------------ values: what needs what

    def _values(self) -> NDArray[np.int64]:
        """Pairs (giver, needer) of positions, shape (n, 2), for every value that is needed."""
        pairs = [
            self._needs(row.op, token)
            for row in ROWS
            if row.op in self.index.at
            for token in row.needs
        ]
        return np.concatenate([np.empty((0, 2), np.int64), *pairs])

    def _needs(self, op: Opcode, token: Token) -> NDArray[np.int64]:
        ix, m = self.index, self.program.plan.microbatches
        if ROWS[op].per is not Per.MICROBATCH:
            return self._needs_late(op, token)
        needer = np.flatnonzero((ix.op == op) & ix.valid)
        key = ix.key[needer]
        giver = self._first(givers(op, token), key)
        if token in HANDED:
            made, hop = HANDED[token]
            stage = ix.stage[needer] + hop
            inside = (stage >= 0) & (stage < self.program.plan.stages)
            makers = [r.op for r in ROWS if made in r.gives and made not in r.needs]
            other = self._first(tuple(makers), np.where(inside, key + hop * m, _NONE))
            giver = np.where(giver == _NONE, other, giver)
        found = giver != _NONE
        return np.stack([giver[found], needer[found]], 1)

    def _first(self, ops: tuple[Opcode, ...], key: Words) -> Words:
        """Positions of the first of `ops` that is there, by key."""
        giver = np.full(len(key), _NONE, np.int64)
        for op in ops:
            giver = np.where(giver == _NONE, self.index.where(op, key), giver)
        return giver

    def _needs_late(self, op: Opcode, token: Token) -> NDArray[np.int64]:
        """Needs of a reduction or a step: all values of its stage, or of all its rank's stages."""
        ix, pairs = self.index, []
        makers = givers(op, token)
        for needer in np.flatnonzero(ix.op == op).tolist():
            rank = int(ix.rank[needer])
            lo, hi = self.program.offsets[rank : rank + 2].tolist()
            own = np.isin(ix.op[lo:hi], makers)
            if ROWS[op].per is Per.STAGE:
                tied = op is Opcode.ReduceTied  # one rank may hold both copies
                stages = (0, self.program.plan.stages - 1) if tied else (ix.stage[needer],)
                own &= np.isin(ix.stage[lo:hi], stages)
            pairs += [(lo + g, needer) for g in np.flatnonzero(own).tolist() if lo + g != needer]
        return np.array(pairs, np.int64).reshape(-1, 2)

    # ------------------------------------------------------------ nodes

    def _contract(self) -> None:
        """Give every instruction its node, and the nodes by which it is entered and left."""
        ix, n = self.index, len(self.index.op)
        self.node = np.arange(n)
        meets = [op for op in (Opcode.ReduceTied, Opcode.ReduceNorm) if op in ix.at]
        for send in SENDS:
            row = ROWS[send]
            at = np.flatnonzero((ix.op == send) & ix.valid)
            stage = ix.stage[at] + row.hop
            key = np.where(stage < 0, _NONE, ix.key[at] + row.hop * self.program.plan.microbatches)
            assert row.meets is not None
            other = ix.where(row.meets, key)
            self.node[other[other != _NONE]] = at[other != _NONE]
        for op in meets:
            at = np.flatnonzero(ix.op == op)
            self.node[at] = at[0]
        begins = np.flatnonzero(~ix.joined)  # of each group, alone or not
        group = np.cumsum(~ix.joined) - 1
        first = begins[group]
        cell = ix.joined & (ix.op <= Opcode.BackwardWeight)
        self.node[cell] = first[cell]  # computes run together are one node
        self.enter, self.leave = self.node.copy(), self.node.copy()
        size = np.bincount(group, minlength=1)
        grouped = (size[group] > 1) & (ix.op[first] > Opcode.BackwardWeight)
        heads = np.unique(first[grouped])
        which = np.searchsorted(heads, first[grouped])
        self.enter[grouped], self.leave[grouped] = n + 2 * which, n + 2 * which + 1
        self.nodes = n + 2 * len(heads)
        self._grouped = np.flatnonzero(grouped)

    @cached_property
    def queue(self) -> Words:
        """The in-order queue of each instruction: equal numbers wait for each other."""
        ix, plan = self.index, self.program.plan
        lane = np.array([row.lane for row in ROWS])[ix.op]
        lane = np.where(lane == Lane.TP, Lane.COMPUTE, lane)  # the host issues both in order
        kinds = len(Lane) * 2 * (plan.ranks + 1)
        if self.model == "serial":
            return ix.rank.astype(np.int64)
        hop = np.array([row.hop for row in ROWS])[ix.op]
        transfer = hop != 0
        stage = np.clip(ix.stage + hop, 0, plan.stages - 1)
        peer = np.where(transfer, plan.rank_of[stage], 0)
        receive = np.isin(ix.op, RECEIVES)
        if self.model == "edge":
            cut = (lane * 2 + receive) * (plan.ranks + 1) + peer
        elif self.model == "pair":
            cut = Lane.ACT * 2 * (plan.ranks + 1) + peer
        else:
            cut = np.full(len(lane), Lane.ACT * 2 * (plan.ranks + 1))
        own = np.where(transfer, cut, lane * 2 * (plan.ranks + 1))
        return np.asarray(ix.rank * np.int64(kinds) + own, np.int64)

    @cached_property
    def ahead(self) -> Words:
        """The position of the instruction before each one in its queue, or -1."""
        order = np.argsort(self.queue, kind="stable")
        same = self.queue[order][1:] == self.queue[order][:-1]
        before = np.full(len(order), _NONE, np.int64)
        before[order[1:][same]] = order[:-1][same]
        return before

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """Edges between nodes, shape (n, 2)."""
        late = np.flatnonzero(self.ahead != _NONE)
        queue = np.stack([self.leave[self.ahead[late]], self.enter[late]], 1)
        value = np.stack([self.leave[self.values[:, 0]], self.enter[self.values[:, 1]]], 1)
        g = self._grouped
        posted = np.stack([self.enter[g], self.node[g]], 1)
        complete = np.stack([self.node[g], self.leave[g]], 1)
        edges = np.concatenate([queue, value, posted, complete])
        inside = np.stack([self.enter[late], self.leave[late]], 1)
        # Members of one group (or cell) follow each other in their queue without an edge.
        group = self.enter[self.ahead[late]] == inside[:, 0]
        keep = np.ones(len(edges), bool)
        keep[: len(late)] = ~(group & self.index.joined[late])
        return edges[keep]

    # ------------------------------------------------------------ walks

    def cost(self, costs: Costs) -> NDArray[np.float64]:
        """The cost of each node."""
        ix, stages = self.index, self.program.plan.stages
        table = costs.table(max(stages, 1))
        per_rank = ix.op >= Opcode.ReduceNorm
        column = np.where(per_rank, ix.rank, ix.stage)
        each = table[ix.op, np.minimum(column, stages - 1)]
        cost = np.zeros(self.nodes)
        np.add.at(cost, self.node, np.where(np.isin(ix.op, RECEIVES), 0.0, each))
        for op in (Opcode.ReduceTied, Opcode.ReduceNorm):
            if op in ix.at:
                own = np.flatnonzero(ix.op == op)
                cost[self.node[own[0]]] = each[own].max()
        together = costs.together(stages)
        if together is not None:
            second = np.flatnonzero(ix.joined & (ix.op <= Opcode.BackwardWeight))
            second = second[ix.op[second - 1] <= Opcode.BackwardWeight]
            one = np.where(ix.op[second] == Opcode.Forward, second, second - 1)
            cost[self.node[second]] = together[ix.stage[one]]
        return cost

    def walk(self, costs: Costs | None = None) -> Walk:
        """Reach every node that can be reached, each at its earliest time.

        A frontier at a time: all nodes whose predecessors have ended are one step.
        """
        costs = costs or Costs()
        edges = self.edges
        cost = self.cost(costs)
        wait = self._delay(costs, edges) if self.program.is_draft else None
        order = np.argsort(edges[:, 0], kind="stable")
        after = edges[order, 1]
        if wait is not None:
            wait = wait[order]
        first = np.searchsorted(edges[order, 0], np.arange(self.nodes + 1))
        missing = np.bincount(edges[:, 1], minlength=self.nodes)
        present = np.zeros(self.nodes, bool)
        present[self.node] = present[self.enter] = present[self.leave] = True
        start, done = np.zeros(self.nodes), np.zeros(self.nodes, bool)
        front = np.flatnonzero(present & (missing == 0))
        reached = [front]
        while len(front):
            done[front] = True
            many = first[front + 1] - first[front]
            each = np.repeat(first[front] - np.cumsum(many) + many, many) + np.arange(many.sum())
            to, end = after[each], np.repeat(start[front] + cost[front], many)
            np.maximum.at(start, to, end if wait is None else end + wait[each])
            np.subtract.at(missing, to, 1)
            front = np.unique(to[missing[to] == 0])
            reached.append(front)
        return Walk(start, start + cost, np.concatenate(reached), done | ~present)

    def _delay(self, costs: Costs, edges: NDArray[np.int64]) -> NDArray[np.float64]:
        """In a draft, what a value needs from one rank to another."""
        rank = self.index.rank
        send = costs.table(self.program.plan.stages)[Opcode.SendAct]
        source = np.minimum(edges[:, 0], len(rank) - 1)
        crosses = rank[source] != rank[np.minimum(edges[:, 1], len(rank) - 1)]
        return np.where(crosses, send[self.index.stage[source]], 0.0)

    def any_order(self, seed: int) -> Iterator[int]:
        """Nodes in a random legal order, decided by `seed`; stops early at a cycle."""
        rng = random.Random(seed)
        after: list[list[int]] = [[] for _ in range(self.nodes)]
        missing = [0] * self.nodes
        for a, b in self.edges.tolist():
            after[a].append(b)
            missing[b] += 1
        present = {*self.node.tolist(), *self.enter.tolist(), *self.leave.tolist()}
        ready = sorted(node for node in present if not missing[node])
        while ready:
            pick = rng.randrange(len(ready))
            ready[pick], ready[-1] = ready[-1], ready[pick]
            node = ready.pop()
            yield node
            for b in after[node]:
                missing[b] -= 1
                if not missing[b]:
                    ready.append(b)

    # ------------------------------------------------------------ places

    def place(self, position: int) -> tuple[int, int, Instr]:
        """Rank, index in its Stream and instruction at a position."""
        ix = self.index
        rank = int(ix.rank[position])
        instr = Instr(OPS[ix.op[position]], int(ix.stage[position]), int(ix.mb[position]))
        return rank, position - int(self.program.offsets[rank]), instr
