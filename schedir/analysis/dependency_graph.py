"""The dependency graph: what must end before an instruction may start.

The one place that knows.  A program finishes under a progress model if and only if this
graph has no cycle; the longest path is the predicted time; any topological order is a legal
execution.  `check`, `simulate`, the lowering and the in-process executor all ask it.

What an instruction waits for: `givers` (the givers of its values, as `ir/dataflow.py` knows them),
`reuses` (the last reader of the slot that it fills, where slots are shared), `queue_predecessor`
(the one before it in its queue) and `partner` (the other side of a message).  As a graph of nodes
(`edges`), a send and its receive are one node, and so are all members of a collective; but a send
that waits for nobody is a node of its own, and its receive comes after.  A message whose ends
never meet comes after itself.  A group of transfers issued together is entered at one node
(*posted*) and left at another (*complete*), and each of its transfers lies between: contracting it
would call legal rings a cycle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.channels import assign_queues, find_mismatched_sends, is_batched
from schedir.analysis.host_waits import find_host_waits
from schedir.analysis.memory.buffer_slots import (
    compute_message_sizes,
    find_host_slot_reuses,
    find_slot_reuses,
)
from schedir.analysis.progress_models import ProgressModel, get_model_row
from schedir.errors import require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import EagerMessages
from schedir.ir.dataflow import Dataflow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    COLLECTIVE_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    TRANSFER_OPS,
    Value,
)
from schedir.ir.pipeline.tied_weights import number_tied_groups
from schedir.ir.program import Program, Proof


class Graph:
    """The dependency graph of a program under a progress model.

    A draft is read as if every value that crosses ranks took `Costs.send` and no queue.

    A host that `blocks`, as on CPUs, waits itself for what a compute needs, and for the message of
    a gather, and issues nothing meanwhile: so what stands behind either in its Stream follows it,
    in whatever queue.  Over NCCL messages wait so, and hosts do not.

    With `device_waits` it blocks, and each time that it launches anything but a message it waits
    for all that it has issued, as cudaMalloc, cudaFree and the first use of a kernel may (CUDA C++
    Programming Guide, "Implicit Synchronization" and "Lazy Loading").

    Messages that are small enough for `eager` leave without their receiver, which takes them in
    when it comes.
    """

    def __init__(
        self,
        program: Program,
        progress_model: ProgressModel = "per_device",
        *,
        blocking_hosts: bool = False,
        host_device_sync: bool = False,
        eager_messages: EagerMessages | None = None,
    ) -> None:
        self.program, self.eager_messages = program, eager_messages
        self.rules = get_model_row(progress_model)
        self.progress_model = progress_model
        self.blocking_hosts, self.host_device_sync = (
            blocking_hosts or host_device_sync,
            host_device_sync,
        )
        self.index = InstructionIndex.from_program(program)
        self.flow = Dataflow.from_program(program)

    @classmethod
    def from_program(
        cls,
        program: Program,
        progress_model: ProgressModel = "per_device",
        *,
        blocking_hosts: bool = False,
        host_device_sync: bool = False,
        eager_messages: EagerMessages | None = None,
    ) -> Graph:
        """The graph of a program, which is made once for each model and kind of host.

        That with small messages is kept by nobody: who looks for a limit tries many.
        """
        make = partial(
            cls,
            progress_model=progress_model,
            blocking_hosts=blocking_hosts,
            host_device_sync=host_device_sync,
            eager_messages=eager_messages,
        )
        if eager_messages is not None:
            return make(program)
        return program.cached(("graph", progress_model, blocking_hosts, host_device_sync), make)

    @property
    def proof(self) -> Proof:
        """What a walk of this graph to its end proves."""
        return Proof(
            self.progress_model,
            self.blocking_hosts,
            self.host_device_sync,
            eager_messages=self.eager_messages,
        )

    def __len__(self) -> int:
        return len(self.index)

    # ------------------------------------------------------------ what an instruction waits for

    @property
    def needs(self) -> NDArray[np.int32]:
        """Who gives the values that each instruction needs, shape (k, n): `Dataflow.needs`."""
        return self.flow.givers

    @cached_property
    def slot_reuses(self) -> dict[Value, tuple[Positions, Positions]]:
        """By kind, who fills a slot that had a value before, and the last reader of that."""
        return find_slot_reuses(self.program)

    @cached_property
    def host_slot_reuses(self) -> dict[str, tuple[Positions, Positions]]:
        """The same of the host's slots, by their name."""
        return find_host_slot_reuses(self.program)

    @cached_property
    def all_slot_reuses(self) -> list[tuple[Positions, Positions]]:
        """Who fills any slot, on the device or the host, that had a value before, and the last
        reader of that."""
        return [*self.slot_reuses.values(), *self.host_slot_reuses.values()]

    @cached_property
    def local_waits(self) -> NDArray[np.int32]:
        """All that each instruction waits for on its own rank outside its queue, shape (k, n)."""
        more = []
        for fill, free in self.all_slot_reuses:
            more.append(np.full((1, len(self)), NO_POSITION, np.int32))
            more[-1][0, fill] = free
        more += [self.host_waits] if self.blocking_hosts else []
        return np.concatenate([self.needs, *more]) if more else self.needs

    @cached_property
    def host_waits(self) -> NDArray[np.int32]:
        """What a host that blocks has waited for before each instruction, shape (k, n)."""
        return find_host_waits(self.program, self.entry_exit_nodes[0], self.host_device_sync)

    @cached_property
    def partner(self) -> Positions:
        """For each transfer the position of its other side; -1 where there is none."""
        partner = np.full(len(self), NO_POSITION, np.int32)
        for send in SEND_OPS:
            if (at := self.index.positions.get(send)) is None:
                continue
            row = INSTRUCTIONS[send]
            assert row.partner is not None and row.peer is not None
            other = self.index.find_positions(
                row.partner, self.index.find_neighbor_keys(row.peer, at)
            )
            met = other != NO_POSITION
            partner[at[met]], partner[other[met]] = other[met], at[met]
        return partner

    @cached_property
    def mismatched_sends(self) -> Positions:
        """The sends whose receive is on another communicator, so that the two never meet."""
        return find_mismatched_sends(self.index, self.partner, self.rules)

    @cached_property
    def eager_sends(self) -> Positions:
        """The sends that leave without their receiver."""
        if self.eager_messages is None:
            return np.empty(0, np.int32)
        at = self.index.find_all_positions(SEND_OPS)
        at = at[self.partner[at] != NO_POSITION]
        small = (
            compute_message_sizes(self.program, self.eager_messages.sizes, at)
            <= self.eager_messages.max_bytes
        )
        return np.asarray(at[small])

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """The in-order queue of each instruction: equal numbers wait for each other."""
        return assign_queues(self.index, self.rules)

    @cached_property
    def queue_predecessor(self) -> Positions:
        """The position of the instruction before each one in its queue, or -1."""
        order = np.argsort(self.queue, kind="stable").astype(np.int32)
        queue = self.queue[order]
        before = np.full(len(order), NO_POSITION, np.int32)
        before[order[1:]] = np.where(queue[1:] == queue[:-1], order[:-1], np.int32(NO_POSITION))
        return before

    def find_last_predecessors(self, end_times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Of all that must have ended before each instruction starts, what ended last; -1 for none.

        All means what its partners and the members of its group wait for, too; of equals it is
        the first.  `end_times` has an entry per instruction.
        """
        before = np.concatenate([self.local_waits, self.queue_predecessor[None]])
        enter = self.entry_exit_nodes[0]
        for same in (self.node, enter):  # what is issued together does not wait for itself
            before = np.where(same[before] == same, NO_POSITION, before)
        at = np.lexsort((-np.arange(len(self)), end_times))
        score = np.zeros(len(self) + 1, np.int64)  # the last entry is that of -1: nothing
        score[at] = np.arange(1, len(self) + 1)
        latest = np.zeros(self.node_id_limit, np.int64)
        np.maximum.at(latest, enter, score[before].max(0, initial=0))
        np.maximum.at(latest, self.node, latest[enter])
        return np.concatenate([[NO_POSITION], at])[latest[self.node]]

    # ------------------------------------------------------------ costs

    def get_cost_table(self, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
        """Cost of each instruction, as a table and where in it each one looks."""
        require_type(costs, Costs, "Costs(F=1, B=2)")
        return costs.per_instruction(self.index)

    # ------------------------------------------------------------ as nodes and edges

    @cached_property
    def _group_layout(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.bool_]]:
        """First member of each instruction's group, the group's size, and if it is transfers that
        are issued as one."""
        begins = np.flatnonzero(~self.index.joined)
        number = np.cumsum(~self.index.joined) - 1
        first, size = begins[number], np.bincount(number, minlength=1)[number]
        if self.rules.has_batch_queues:
            return first, size, is_batched(self.index)
        return first, size, (size > 1) & np.isin(self.index.op[first], TRANSFER_OPS)

    @cached_property
    def collective_groups(self) -> list[Positions]:
        """The members of each collective.

        All of a kind meet for an update, but the holders of each stage by themselves, and those
        who share no tied weight apart (`ties.parties`).
        """
        meetings: list[Positions] = []
        shape = self.program.shape
        for op in COLLECTIVE_OPS:
            if (at := self.index.positions.get(op)) is None:
                continue
            which, group = self.index.mb[at].astype(np.intp), INSTRUCTIONS[op].group
            if group == "stage_replicas":
                which = which * shape.stages + self.index.stage[at]
            elif group == "tied_weights":
                party = np.array(number_tied_groups(self.program.trained_ties, shape))
                which = which * shape.ranks + party[self.index.rank[at]]
            meetings += [at[which == one] for one in np.unique(which)]
        return meetings

    @cached_property
    def node(self) -> Positions:
        """The node of each instruction, named by its first member: a send names its message."""
        node = np.arange(len(self), dtype=np.int32)
        got = self.index.find_all_positions(RECV_OPS)
        got = got[self.partner[got] != NO_POSITION]
        node[got] = self.partner[got]
        late = self.partner[self.eager_sends]
        node[late] = late
        for members in self.collective_groups:
            node[members] = members[0]
        if self.index.has_joined:
            first, _, _ = self._group_layout
            cell = self.index.joined & ~self.index.is_op(TRANSFER_OPS)
            node[cell] = first[cell]  # computes run together are one node
        return node

    @cached_property
    def entry_exit_nodes(self) -> Positions:
        """The nodes by which each instruction is entered and left, shape (2, n)."""
        if not self.index.has_joined:
            return np.broadcast_to(self.node, (2, len(self)))
        gates = np.stack([self.node, self.node])
        first, _, grouped = self._group_layout
        which = np.unique(first[grouped], return_inverse=True)[1]
        gates[:, grouped] = len(self) + 2 * which + [[0], [1]]
        return gates

    @cached_property
    def node_id_limit(self) -> int:
        """More than the largest node and the largest position; not every number below is a node."""
        return (
            len(self)
            if not self.index.has_joined
            else max(len(self), int(self.entry_exit_nodes.max(initial=-1)) + 1)
        )

    @property
    def node_mask(self) -> NDArray[np.bool_]:
        """Whether each number below `node_id_limit` is a node."""
        there = np.zeros(self.node_id_limit, bool)
        there[: len(self)] = self.node == np.arange(len(self), dtype=np.int32)
        if self.index.has_joined:
            there[self.entry_exit_nodes] = True
        return there

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Edges between nodes, from whom and to whom, a kind at a time; some come twice."""
        enter, leave = self.entry_exit_nodes
        after = np.flatnonzero(self.queue_predecessor != NO_POSITION)
        before = self.queue_predecessor[after]
        if self.index.has_joined:
            # Members of one group follow each other in their queue without an edge.
            apart = (enter[before] != enter[after]) | ~self.index.joined[after]
            before, after = before[apart], after[apart]
        yield leave[before], enter[after]
        del before, after
        for giver in self.needs:
            needer = np.flatnonzero(giver != NO_POSITION)
            yield leave[giver[needer]], enter[needer]
        for fill, free in self.all_slot_reuses:
            yield leave[free], enter[fill]
        if self.blocking_hosts:
            for before in self.host_waits:
                late = np.flatnonzero(before != NO_POSITION)
                yield leave[before[late]], enter[late]
        if len(alone := self.eager_sends):
            yield alone, self.partner[alone]
        if len(never := self.mismatched_sends):
            yield never, never
        if self.index.has_joined:
            grouped = np.flatnonzero(enter != self.node)
            yield enter[grouped], self.node[grouped]
            yield self.node[grouped], leave[grouped]

    def random_topological_order(self, seed: int) -> Iterator[int]:
        """Nodes in a random legal order, decided by `seed`; stops early at a cycle."""
        rng = random.Random(seed)
        after: list[list[int]] = [[] for _ in range(self.node_id_limit)]
        missing = [0] * self.node_id_limit
        for source, target in self.edges():
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                after[a].append(b)
                missing[b] += 1
        present = {*self.node.tolist(), *self.entry_exit_nodes.reshape(-1).tolist()}
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
