"""The dependency graph of a program: the instructions that each instruction waits for.

A program finishes under a progress model if and only if this graph has no cycle. The length of the
longest path is the predicted time, and any topological order is a legal execution. `check`,
`simulate`, the lowering and the in-process executor all use this graph.

An instruction waits for four kinds of predecessors:

- `needs`: the instructions that produce its values (`ir/dataflow.py`).
- `slot_reuses`: the instruction that frees the slot that it fills, if slots are shared.
- `queue_predecessor`: the instruction before it in its queue.
- `partner`: the other end of a message.

`edges` yields the edges between nodes. A send and its receive are one node, and all members of a
collective are one node. An eager send and its receive are two nodes, with an edge to the receive. A
message with mismatched communicators has an edge to itself, so that it never ends.

A group of transfers that are issued together has a node at which it starts and a node at which it
is complete. The nodes of its transfers are between these two nodes. If the group had only one node,
a legal ring of messages would be a cycle.
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
from schedir.analysis.progress_models import (
    ModelRow,
    ProgressModel,
    get_model_row,
    require_model,
)
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

    The graph of a draft has no messages. In it, each value that passes between ranks takes the time
    `Costs.send`, and uses no queue.

    Args:
        program: The program or draft.
        progress_model: The progress model of the transport.
        blocking_hosts: True if the host itself waits for the inputs of a compute and for the
            message of a gather, as on CPUs. While the host waits, it issues nothing, so all later
            instructions of the Stream wait, too, in every queue. Over NCCL the device waits, and
            the host does not.
        host_device_sync: True if the host also waits for all issued instructions at each launch of
            an instruction that is not a message. cudaMalloc, cudaFree and the first use of a kernel
            can cause such waits. Implies `blocking_hosts`.
        eager_messages: Messages whose send can end before the receive is posted. None if there are
            none.

    References:
        CUDA C++ Programming Guide, "Implicit Synchronization" and "Lazy Loading".
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
        self.program: Program = program
        self.eager_messages: EagerMessages | None = eager_messages
        self.rules: ModelRow = get_model_row(progress_model)
        self.progress_model = progress_model
        self.blocking_hosts: bool = blocking_hosts or host_device_sync
        self.host_device_sync: bool = host_device_sync
        self.index: InstructionIndex = InstructionIndex.from_program(program)
        self.flow: Dataflow = Dataflow.from_program(program)

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
        """Return the dependency graph of a program. The program caches it.

        A graph with eager messages is not cached, because the search for an eager limit builds many
        graphs.

        Args:
            program: The program or draft.
            progress_model: See `Graph`.
            blocking_hosts: See `Graph`.
            host_device_sync: See `Graph`.
            eager_messages: See `Graph`.
        """
        make = partial(
            cls,
            progress_model=require_model(progress_model),
            blocking_hosts=blocking_hosts,
            host_device_sync=host_device_sync,
            eager_messages=eager_messages,
        )
        if eager_messages is not None:
            return make(program)
        return program.cached(("graph", progress_model, blocking_hosts, host_device_sync), make)

    @property
    def proof(self) -> Proof:
        """The conditions under which the program finishes if this graph has no cycle."""
        return Proof(
            self.progress_model,
            self.blocking_hosts,
            self.host_device_sync,
            eager_messages=self.eager_messages,
        )

    def __len__(self) -> int:
        return len(self.index)

    # ------------------------------------------------------------ predecessors of instructions

    @property
    def needs(self) -> NDArray[np.int32]:
        """Positions of the producers of needed values, shape (k, n): `Dataflow.givers`."""
        return self.flow.givers

    @cached_property
    def slot_reuses(self) -> dict[Value, tuple[Positions, Positions]]:
        """Kind of value -> instructions that fill a slot again, and those that free it before."""
        return find_slot_reuses(self.program)

    @cached_property
    def host_slot_reuses(self) -> dict[str, tuple[Positions, Positions]]:
        """The same as `slot_reuses` for slots on the host, by name in `HOST_SLOT_VALUES`."""
        return find_host_slot_reuses(self.program)

    @cached_property
    def all_slot_reuses(self) -> list[tuple[Positions, Positions]]:
        """All values of `slot_reuses` and `host_slot_reuses`."""
        return [*self.slot_reuses.values(), *self.host_slot_reuses.values()]

    @cached_property
    def local_waits(self) -> NDArray[np.int32]:
        """Positions of the instructions that each instruction waits for on its rank, shape (k, n).

        The predecessors in the queues are not included.
        """
        more = []
        for fill, free in self.all_slot_reuses:
            more.append(np.full((1, len(self)), NO_POSITION, np.int32))
            more[-1][0, fill] = free
        more += [self.host_waits] if self.blocking_hosts else []
        return np.concatenate([self.needs, *more]) if more else self.needs

    @cached_property
    def host_waits(self) -> NDArray[np.int32]:
        """Positions that a blocking host has waited for before each instruction, shape (k, n)."""
        return find_host_waits(self.program, self.entry_exit_nodes[0], self.host_device_sync)

    @cached_property
    def partner(self) -> Positions:
        """The position of the other end of each transfer, shape (n,); -1 where there is none."""
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
        """Positions of the sends whose receive uses another communicator."""
        return find_mismatched_sends(self.index, self.partner, self.rules)

    @cached_property
    def eager_sends(self) -> Positions:
        """Positions of the sends that do not wait for their receive."""
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
        """The number of the in-order queue of each instruction, shape (n,)."""
        return assign_queues(self.index, self.rules)

    @cached_property
    def queue_predecessor(self) -> Positions:
        """Position of the previous instruction in the same queue, shape (n,); -1 for the first."""
        order = np.argsort(self.queue, kind="stable").astype(np.int32)
        queue = self.queue[order]
        before = np.full(len(order), NO_POSITION, np.int32)
        before[order[1:]] = np.where(queue[1:] == queue[:-1], order[:-1], np.int32(NO_POSITION))
        return before

    def find_last_predecessors(self, end_times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return, for each instruction, the predecessor that ends last.

        The predecessors of its partner and of the members of its group are included. If several
        predecessors end at the same time, the one with the lowest position counts.

        Args:
            end_times: The end of each instruction, shape (n,).

        Returns:
            Positions of shape (n,); -1 for an instruction without predecessors.
        """
        before = np.concatenate([self.local_waits, self.queue_predecessor[None]])
        enter = self.entry_exit_nodes[0]
        for same in (self.node, enter):  # members of a node or group do not wait for each other
            before = np.where(same[before] == same, NO_POSITION, before)
        at = np.lexsort((-np.arange(len(self)), end_times))
        score = np.zeros(len(self) + 1, np.int64)  # index -1, no predecessor, has score 0
        score[at] = np.arange(1, len(self) + 1)
        latest = np.zeros(self.node_id_limit, np.int64)
        np.maximum.at(latest, enter, score[before].max(0, initial=0))
        np.maximum.at(latest, self.node, latest[enter])
        return np.concatenate([[NO_POSITION], at])[latest[self.node]]

    # ------------------------------------------------------------ costs

    def get_cost_table(self, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
        """Return a table of costs, and the index of each instruction's cost in it.

        Args:
            costs: The costs.

        Returns:
            The table, shape (k,), and the indices, shape (n,).

        Raises:
            UsageError: `costs` is not a `Costs`.
        """
        require_type(costs, "costs", Costs, "Costs(F=1, B=2)")
        return costs.per_instruction(self.index)

    # ------------------------------------------------------------ as nodes and edges

    @cached_property
    def _group_layout(self) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.bool_]]:
        """First member and size of each instruction's group, and a mask of grouped transfers."""
        begins = np.flatnonzero(~self.index.joined)
        number = np.cumsum(~self.index.joined) - 1
        first, size = begins[number], np.bincount(number, minlength=1)[number]
        if self.rules.has_batch_queues:
            return first, size, is_batched(self.index)
        return first, size, (size > 1) & np.isin(self.index.op[first], TRANSFER_OPS)

    @cached_property
    def collective_groups(self) -> list[Positions]:
        """The positions of the members of each collective.

        All instructions of one opcode and update are one collective, with two exceptions. For a
        collective of stage replicas, each stage has a separate collective. Ranks that share no tied
        weight have separate collectives (`number_tied_groups`).
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
        """The node of each instruction, shape (n,): the position of its first member.

        The node of a message has the position of its send.
        """
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
            node[cell] = first[cell]  # joined computes are one node
        return node

    @cached_property
    def entry_exit_nodes(self) -> Positions:
        """The nodes at which each instruction starts and is complete, shape (2, n)."""
        if not self.index.has_joined:
            return np.broadcast_to(self.node, (2, len(self)))
        gates = np.stack([self.node, self.node])
        first, _, grouped = self._group_layout
        which = np.unique(first[grouped], return_inverse=True)[1]
        gates[:, grouped] = len(self) + 2 * which + [[0], [1]]
        return gates

    @cached_property
    def node_id_limit(self) -> int:
        """A number above all node numbers and positions. Some numbers below it are not nodes."""
        return (
            len(self)
            if not self.index.has_joined
            else max(len(self), int(self.entry_exit_nodes.max(initial=-1)) + 1)
        )

    @property
    def node_mask(self) -> NDArray[np.bool_]:
        """A mask of the numbers that are nodes, shape (node_id_limit,)."""
        there = np.zeros(self.node_id_limit, bool)
        there[: len(self)] = self.node == np.arange(len(self), dtype=np.int32)
        if self.index.has_joined:
            there[self.entry_exit_nodes] = True
        return there

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Yield the edges between nodes as arrays of sources and targets, one kind at a time.

        The same edge can be yielded twice.
        """
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
        """Yield the nodes in a random legal order, and stop early at a cycle.

        Args:
            seed: Seed of the random order.
        """
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
