"""The dependency graph: when may an instruction start?

The one place that knows.  A program finishes under a progress model if and only if this
graph has no cycle; the longest path is the predicted time; any topological order is a legal
execution.  `check`, `simulate`, the lowering and the in-process executor all ask it.

What an instruction waits for is four arrays: `needs` (values of its own rank), `reuses` (the
last reader of the slot that it fills, where slots are shared), `ahead` (the one before it in its
queue) and `partner` (the other side of a message).  As a graph of nodes
(`edges`), a send and its receive are one node, and so are all members of a collective.  A
group of transfers issued together is entered at one node (*posted*) and left at another
(*complete*), and each of its transfers lies between: contracting it would call legal rings a
cycle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.slots import reuses
from schedir.errors import UsageError, expect, said
from schedir.ir.costs import Costs
from schedir.ir.index import NONE, Index, Positions
from schedir.ir.ops import (
    COLLECTIVES,
    HANDED,
    RECEIVES,
    ROWS,
    SENDS,
    TRANSFERS,
    Lane,
    Opcode,
    Per,
    Token,
    givers,
    makers,
)
from schedir.ir.program import Program
from schedir.ir.ties import parties

Model = Literal["edge", "pair", "device", "serial"]
MODELS: Final[tuple[Model, ...]] = get_args(Model)

_PER_RANK: Final = tuple(row.op for row in ROWS if row.per is Per.RANK)
_LATE: Final = tuple(row.op for row in ROWS if row.per is not Per.MICROBATCH)
# What a rank queues apart, whatever the model: computes, reductions, gathers; and the wire, which
# is the last, as models cut it finer.
_LANES: Final = {Lane.COMPUTE: 0, Lane.DP: 1, Lane.TP: 2, Lane.ACT: 3, Lane.GRAD: 3}
_LINE: Final = np.array([_LANES[row.lane] for row in ROWS])


def known(model: Model) -> Model:
    """The progress model, if it is one; raises UsageError if not."""
    if not isinstance(model, str) or model not in MODELS:
        raise UsageError(f"model must be one of {', '.join(MODELS)}, not {said(model)}")
    return model


class Graph:
    """The dependency graph of a program under a progress model.

    A draft is read as if every value that crosses ranks took `Costs.send` and no queue.

    A host that `blocks`, as on CPUs, waits itself for what a compute needs, and for the message of
    a gather, and issues nothing meanwhile: so what stands behind either in its Stream follows it,
    in whatever queue.  Over NCCL messages wait so, and hosts do not.
    """

    def __init__(
        self,
        program: Program,
        model: Model = "device",
        index: Index | None = None,
        *,
        blocks: bool = False,
    ) -> None:
        self.program = program
        self.model = known(model)
        self.blocks = blocks
        self.index = index or Index(program)

    def __len__(self) -> int:
        return len(self.index)

    # ------------------------------------------------------------ what an instruction waits for

    @cached_property
    def needs(self) -> NDArray[np.int32]:
        """For each instruction, who gives the two values that it may need, shape (2, n).

        Positions, or -1.  Where many give a value (all backwards give a stage's gradient), it
        is the last of them: they are in one queue.
        """
        needs = np.full((2, len(self)), NONE, np.int32)
        for k, needer, giver in self._values():
            needs[k, needer] = giver
        return needs

    def _values(self) -> Iterator[tuple[int, NDArray[np.intp], Positions]]:
        """Who needs what from whom: the place of the value in `Row.needs`, needers, givers."""
        for row in ROWS:
            if row.op in self.index.at:
                needer = np.flatnonzero((self.index.op == row.op) & self.index.valid)
                giver = self._giver if row.per is Per.MICROBATCH else self._last_giver
                for k, token in enumerate(row.needs):
                    yield k, needer, giver(row.op, token, needer)

    @cached_property
    def reuses(self) -> Positions:
        """For each instruction, the last reader of the slot that it fills; -1 where it is new."""
        return reuses(self.index, self.program.slots)

    @cached_property
    def waits(self) -> NDArray[np.int32]:
        """All that each instruction waits for on its own rank outside its queue, shape (k, n)."""
        more = [self.reuses[None]] if self.program.slots else []
        more += [self.issued] if self.blocks else []
        return np.concatenate([self.needs, *more]) if more else self.needs

    @cached_property
    def issued(self) -> NDArray[np.int32]:
        """What a host that blocks has waited for before it issues each instruction, shape (3, n).

        Of computes it is the one before.  A reduction with partners waits for those before it, and
        so lets a host on when they end; but a sum of two holders only for one over replicas, which
        stands before all of them.  A gather stands for its message and those of the gathers
        before it: once they are there, nothing else can keep it.  The compute lane's own
        instructions, and gathers, follow each other anyway.
        """
        line, waited = _LINE[self.index.op], np.full((3, len(self)), NONE, np.int32)
        compute, reduce, gather = (np.flatnonzero(line == k) for k in range(3))
        waited[0, compute], waited[2, gather] = compute, gather
        waits = [op for op in COLLECTIVES if op is not Opcode.ReduceHolders or self.program.dp > 1]
        meets = self.index.among(tuple(waits))[reduce[1:]]
        waited[1, reduce[1:]] = np.where(meets, reduce[:-1], NONE)
        before = np.full_like(waited, NONE)
        before[:, 1:] = np.maximum.accumulate(waited, 1)[:, :-1]
        own = (before >= self.program.offsets[self.index.rank]) & (line != [[0], [1], [2]])
        return np.where(own, before, np.int32(NONE))

    def _giver(self, op: Opcode, token: Token, needer: NDArray[np.intp]) -> Positions:
        """Who gives a value of a (stage, mb) to `op`: the last in the chain that is there."""
        if token is Token.PARAMETERS:
            return self._stepped(needer)
        key = self.index.key[needer]
        giver = self._first(givers(op, token), key)
        if token in HANDED:
            made, hop = HANDED[token]
            stage = self.index.stage[needer].astype(np.int32) + hop
            inside = (stage >= 0) & (stage < self.program.plan.stages)
            other = np.where(inside, key + np.int32(hop * self.program.plan.microbatches), NONE)
            giver = np.where(giver == NONE, self._first(makers(made), other), giver)
        return giver

    def _stepped(self, needer: NDArray[np.intp]) -> Positions:
        """The step that makes the weights of a (stage, mb); -1 for those there from the start."""
        index, plan = self.index, self.program.plan
        if plan.updates == 1:
            return np.full(len(needer), NONE, np.int32)
        version = plan.version(index.stage[needer], index.mb[needer])
        key = np.where(version > 0, (version - 1) * plan.ranks + index.rank[needer], NONE)
        return index.where(Opcode.OptimizerStep, key.astype(np.int32))

    def _first(self, ops: tuple[Opcode, ...], key: Positions) -> Positions:
        """Positions of the first of `ops` that is there, by key."""
        giver = np.full(len(key), NONE, np.int32)
        for op in ops:
            if op in self.index.at:
                giver = np.where(giver == NONE, self.index.where(op, key), giver)
        return giver

    def _last_giver(self, op: Opcode, token: Token, needer: NDArray[np.intp]) -> Positions:
        """Who gives a value to reductions and steps: the last, of a stage or of a rank's all."""
        index = self.index
        gives = np.flatnonzero(index.among(givers(op, token)))
        per = Per.RANK if op is Opcode.ReduceTied else ROWS[op].per
        if op is Opcode.ReduceTied:  # all copies of the rank
            tied = [s for stages in self.program.tied for s in stages]
            gives = gives[np.isin(index.stage[gives], tied)]
        last = np.full(index.size[per], NONE, np.int32)
        last[index.ending(per, gives)] = gives
        return np.asarray(last[index.ending(per, needer)])

    @cached_property
    def partner(self) -> Positions:
        """For each transfer the position of its other side; -1 where there is none."""
        partner = np.full(len(self), NONE, np.int32)
        for send in SENDS:
            row = ROWS[send]
            at = np.flatnonzero((self.index.op == send) & self.index.valid)
            stage = self.index.stage[at].astype(np.int32) + row.hop
            inside = (stage >= 0) & (stage < self.program.plan.stages)
            key = self.index.key[at] + np.int32(row.hop * self.program.plan.microbatches)
            assert row.meets is not None
            other = self.index.where(row.meets, np.where(inside, key, NONE))
            met = other != NONE
            partner[at[met]], partner[other[met]] = other[met], at[met]
        return partner

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """The in-order queue of each instruction: equal numbers wait for each other."""
        index, plan = self.index, self.program.plan
        if self.model == "serial":
            return index.rank.astype(np.uint16)
        # First of all that there can be: by opcode, holder and stage, whose queue of which kind.
        held = np.zeros((len(ROWS), len(plan.holders), plan.stages), np.int64)
        for row, queues in zip(ROWS, held, strict=True):
            queues += 8 * plan.holders + _LINE[row.op]
            if row.hop and self.model != "device":  # and to whom
                there = np.clip(np.arange(plan.stages) + row.hop, 0, plan.stages - 1)
                queues += 8 * plan.ranks * (1 + plan.holders[:, there])
            if row.hop and self.model == "edge":
                queues += 2 * (row.lane is Lane.GRAD) + (row.op in RECEIVES)
        queues, numbers = np.unique(held, return_inverse=True)
        number = numbers.reshape(-1).astype(np.uint16 if len(queues) < 2**16 else np.uint32)
        cell = index.op.astype(np.int32) * np.int32(held[0].size)
        cell += np.minimum(index.stage, plan.stages - 1)
        if plan.two_way:
            cell[index.mb >= plan.down] += plan.stages
        queue: NDArray[np.unsignedinteger] = number[cell]
        late = np.flatnonzero(index.among(_LATE))  # any rank has them
        queue[late] = np.searchsorted(queues, 8 * index.rank[late] + _LINE[index.op[late]])
        return queue

    def in_queues(self) -> NDArray[np.intp]:
        """All positions, queue by queue, each in order."""
        return np.argsort(self.queue, kind="stable")

    @cached_property
    def ahead(self) -> Positions:
        """The position of the instruction before each one in its queue, or -1."""
        order = self.in_queues()
        same = self.queue[order[1:]] == self.queue[order[:-1]]
        before = np.full(len(order), NONE, np.int32)
        before[order[1:][same]] = order[:-1][same]
        return before

    def latest(self, end: NDArray[np.float64]) -> NDArray[np.int64]:
        """Of all that must have ended before each instruction starts, what ended last; -1 for none.

        All means what its partners and the members of its group wait for, too; of equals it is
        the first.  `end` has an entry per instruction.
        """
        before = np.concatenate([self.waits, self.ahead[None]])
        enter = self.gates[0]
        for same in (self.node, enter):  # what is issued together does not wait for itself
            before = np.where(same[before] == same, NONE, before)
        at = np.lexsort((-np.arange(len(self)), end))
        score = np.zeros(len(self) + 1, np.int64)  # the last entry is that of -1: nothing
        score[at] = np.arange(1, len(self) + 1)
        latest = np.zeros(self.nodes, np.int64)
        np.maximum.at(latest, enter, score[before].max(0, initial=0))
        np.maximum.at(latest, self.node, latest[enter])
        return np.concatenate([[NONE], at])[latest[self.node]]

    # ------------------------------------------------------------ costs

    def costs(self, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Cost of each instruction, as a table and where in it each one looks."""
        expect(costs, Costs, "Costs(F=1, B=2)")
        stages = self.program.plan.stages
        table = costs.table(stages)
        row = self.index.op.astype(np.int32) * np.int32(stages) + self.index.stage
        late = np.flatnonzero(self.index.among(_PER_RANK))  # the k-th number is rank k's
        column = np.minimum(self.index.rank[late], stages - 1)
        row[late] = self.index.op[late] * np.int32(stages) + column
        return table.reshape(-1), row

    # ------------------------------------------------------------ as nodes and edges

    @cached_property
    def _groups(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.bool_]]:
        """First member of each instruction's group, the group's size, and if it is transfers."""
        begins = np.flatnonzero(~self.index.joined)
        number = np.cumsum(~self.index.joined) - 1
        first, size = begins[number], np.bincount(number, minlength=1)[number]
        return first, size, (size > 1) & np.isin(self.index.op[first], TRANSFERS)

    @cached_property
    def meetings(self) -> list[NDArray[np.intp]]:
        """The members of each collective.

        All of a kind meet for an update, but the holders of each stage by themselves, and those
        who share no tied weight apart (`ties.parties`).
        """
        meetings: list[NDArray[np.intp]] = []
        for op in COLLECTIVES:
            at = np.flatnonzero(self.index.op == op)
            which = self.index.mb[at].astype(np.intp)
            if op is Opcode.ReduceHolders:
                which = self.index.stage[at].astype(np.intp)
            elif op is Opcode.ReduceTied:
                plan = self.program.plan
                party = np.array(parties(self.program.tied, plan))
                which = which * plan.ranks + party[self.index.rank[at]]
            meetings += [at[which == one] for one in np.unique(which)]
        return meetings

    @cached_property
    def node(self) -> Positions:
        """The node of each instruction, named by its first member: a send names its message."""
        node = np.arange(len(self), dtype=np.int32)
        got = np.flatnonzero(self.index.among(RECEIVES) & (self.partner != NONE))
        node[got] = self.partner[got]
        for members in self.meetings:
            node[members] = members[0]
        if self.index.joined.any():
            first, _, transfers = self._groups
            cell = self.index.joined & ~transfers  # computes run together are one node
            node[cell] = first[cell]
        return node

    @cached_property
    def gates(self) -> Positions:
        """The nodes by which each instruction is entered and left, shape (2, n)."""
        if not self.index.joined.any():
            return np.broadcast_to(self.node, (2, len(self)))
        gates = np.stack([self.node, self.node])
        first, _, grouped = self._groups
        which = np.unique(first[grouped], return_inverse=True)[1]
        gates[:, grouped] = len(self) + 2 * which + [[0], [1]]
        return gates

    @property
    def nodes(self) -> int:
        """More than the largest node and the largest position; not every number below is a node."""
        return max(len(self), int(self.gates.max(initial=-1)) + 1)

    @property
    def there(self) -> NDArray[np.bool_]:
        """Whether each number below `nodes` is a node."""
        there = np.zeros(self.nodes, bool)
        there[self.node] = there[self.gates[0]] = there[self.gates[1]] = True
        return there

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Edges between nodes, from whom and to whom, a kind at a time; some come twice."""
        enter, leave = self.gates
        order = self.in_queues().astype(np.int32)
        queue = self.queue[order]
        follows = queue[1:] == queue[:-1]
        before, after = order[:-1][follows], order[1:][follows]
        if self.index.joined.any():
            # Members of one group follow each other in their queue without an edge.
            apart = (enter[before] != enter[after]) | ~self.index.joined[after]
            before, after = before[apart], after[apart]
        del order, queue, follows
        yield leave[before], enter[after]
        for giver in self.needs:
            needer = np.flatnonzero(giver != NONE)
            yield leave[giver[needer]], enter[needer]
        if self.program.slots:
            late = np.flatnonzero(self.reuses != NONE)
            yield leave[self.reuses[late]], enter[late]
        if self.blocks:
            for before in self.issued:
                late = np.flatnonzero(before != NONE)
                yield leave[before[late]], enter[late]
        grouped = np.flatnonzero(enter != self.node)
        yield enter[grouped], self.node[grouped]
        yield self.node[grouped], leave[grouped]

    def any_order(self, seed: int) -> Iterator[int]:
        """Nodes in a random legal order, decided by `seed`; stops early at a cycle."""
        rng = random.Random(seed)
        after: list[list[int]] = [[] for _ in range(self.nodes)]
        missing = [0] * self.nodes
        for source, target in self.edges():
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                after[a].append(b)
                missing[b] += 1
        present = {*self.node.tolist(), *self.gates.reshape(-1).tolist()}
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
