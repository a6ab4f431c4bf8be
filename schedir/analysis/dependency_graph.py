"""The dependency graph of a program: the instructions that each instruction waits for.

A program finishes under a progress model if and only if this graph has no cycle. The length of the
longest path is the predicted time, and any topological order is a legal execution. `check`,
`simulate`, the lowering and the in-process executor all use this graph.

An instruction waits for these kinds of predecessors:

- `needs`: the instructions that produce its values (`ir/dataflow.py`).
- `slot_reuses`: the instruction that frees the slot that this instruction fills, if slots are
  shared.
- `queue_predecessor`: the previous instruction in its queue.
- `host_waits`: the instructions that a blocking host has waited for.
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

    The graph of a draft has no messages. In such a graph, each value that passes between ranks
    takes the time `Costs.send`, and uses no queue.

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
        """Return the dependency graph of a program, which the program caches.

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
        """Kind of value -> instructions that fill a slot again, and those that free the slot."""
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
        extra_rows = []
        for fill, free in self.all_slot_reuses:
            extra_rows.append(np.full((1, len(self)), NO_POSITION, np.int32))
            extra_rows[-1][0, fill] = free
        extra_rows += [self.host_waits] if self.blocking_hosts else []
        return np.concatenate([self.needs, *extra_rows]) if extra_rows else self.needs

    @cached_property
    def host_waits(self) -> NDArray[np.int32]:
        """Positions of the instructions that a blocking host has waited for, shape (k, n).

        Before a host issues instruction i, it has waited for the instructions of column i.
        `find_host_waits` describes the k rows.
        """
        return find_host_waits(self.program, self.entry_exit_nodes[0], self.host_device_sync)

    @cached_property
    def partner(self) -> Positions:
        """The position of the other end of each transfer, shape (n,); -1 where there is none."""
        partner = np.full(len(self), NO_POSITION, np.int32)
        for op in SEND_OPS:
            if (sends := self.index.positions.get(op)) is None:
                continue
            row = INSTRUCTIONS[op]
            assert row.partner is not None and row.peer is not None
            receives = self.index.find_positions(
                row.partner, self.index.find_neighbor_keys(row.peer, sends)
            )
            has_receive = receives != NO_POSITION
            sends, receives = sends[has_receive], receives[has_receive]
            partner[sends], partner[receives] = receives, sends
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
        sends = self.index.find_all_positions(SEND_OPS)
        sends = sends[self.partner[sends] != NO_POSITION]
        is_small = (
            compute_message_sizes(self.program, self.eager_messages.sizes, sends)
            <= self.eager_messages.max_bytes
        )
        return np.asarray(sends[is_small])

    @cached_property
    def queue(self) -> NDArray[np.unsignedinteger]:
        """The number of the in-order queue of each instruction, shape (n,)."""
        return assign_queues(self.index, self.rules)

    @cached_property
    def queue_predecessor(self) -> Positions:
        """Position of the previous instruction in the same queue, shape (n,); -1 for the first."""
        order = np.argsort(self.queue, kind="stable").astype(np.int32)
        queue = self.queue[order]
        predecessor = np.full(len(order), NO_POSITION, np.int32)
        predecessor[order[1:]] = np.where(
            queue[1:] == queue[:-1], order[:-1], np.int32(NO_POSITION)
        )
        return predecessor

    def find_last_predecessors(self, end_times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return, for each instruction, the predecessor that ends last.

        The predecessors of its partner and of the members of its group are included. If several
        predecessors end at the same time, the result is the one with the lowest position.

        Args:
            end_times: The end of each instruction, shape (n,).

        Returns:
            Positions of shape (n,); -1 for an instruction without predecessors.
        """
        predecessors = np.concatenate([self.local_waits, self.queue_predecessor[None]])
        entry_node = self.entry_exit_nodes[0]
        # Members of a node or group do not wait for each other.
        for number in (self.node, entry_node):
            predecessors = np.where(number[predecessors] == number, NO_POSITION, predecessors)
        order = np.lexsort((-np.arange(len(self)), end_times))
        score = np.zeros(len(self) + 1, np.int64)  # index -1, no predecessor, has score 0
        score[order] = np.arange(1, len(self) + 1)
        latest = np.zeros(self.node_id_limit, np.int64)
        np.maximum.at(latest, entry_node, score[predecessors].max(0, initial=0))
        np.maximum.at(latest, self.node, latest[entry_node])
        return np.concatenate([[NO_POSITION], order])[latest[self.node]]

    # ------------------------------------------------------------ costs

    def get_cost_table(self, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
        """Return a table of costs, and the index of each instruction's cost in this table.

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
        group_starts = np.flatnonzero(~self.index.joined)
        group_number = np.cumsum(~self.index.joined) - 1
        first_member = group_starts[group_number]
        size = np.bincount(group_number, minlength=1)[group_number]
        if self.rules.has_batch_queues:
            return first_member, size, is_batched(self.index)
        return first_member, size, (size > 1) & np.isin(self.index.op[first_member], TRANSFER_OPS)

    @cached_property
    def collective_groups(self) -> list[Positions]:
        """The positions of the members of each collective.

        All instructions of one opcode and update are one collective, with two exceptions. For a
        collective of stage replicas, each stage has a separate collective. Ranks that share no tied
        weight have separate collectives (`number_tied_groups`).
        """
        collectives: list[Positions] = []
        shape = self.program.shape
        for op in COLLECTIVE_OPS:
            if (positions := self.index.positions.get(op)) is None:
                continue
            numbers, group_kind = self.index.mb[positions].astype(np.intp), INSTRUCTIONS[op].group
            if group_kind == "stage_replicas":
                numbers = numbers * shape.stages + self.index.stage[positions]
            elif group_kind == "tied_weights":
                tied_group = np.array(number_tied_groups(self.program.trained_ties, shape))
                numbers = numbers * shape.ranks + tied_group[self.index.rank[positions]]
            collectives += [positions[numbers == number] for number in np.unique(numbers)]
        return collectives

    @cached_property
    def node(self) -> Positions:
        """The node of each instruction, shape (n,): the position of its first member.

        The node of a message has the position of its send.
        """
        node = np.arange(len(self), dtype=np.int32)
        receives = self.index.find_all_positions(RECV_OPS)
        receives = receives[self.partner[receives] != NO_POSITION]
        node[receives] = self.partner[receives]
        eager_receives = self.partner[self.eager_sends]
        node[eager_receives] = eager_receives
        for members in self.collective_groups:
            node[members] = members[0]
        if self.index.has_joined:
            first_member, _, _ = self._group_layout
            is_joined = self.index.joined & ~self.index.is_op(TRANSFER_OPS)
            node[is_joined] = first_member[is_joined]  # joined computes are one node
        return node

    @cached_property
    def entry_exit_nodes(self) -> Positions:
        """The nodes at which each instruction starts and is complete, shape (2, n)."""
        if not self.index.has_joined:
            return np.broadcast_to(self.node, (2, len(self)))
        nodes = np.stack([self.node, self.node])
        first_member, _, is_grouped = self._group_layout
        group_number = np.unique(first_member[is_grouped], return_inverse=True)[1]
        nodes[:, is_grouped] = len(self) + 2 * group_number + [[0], [1]]
        return nodes

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
        is_node = np.zeros(self.node_id_limit, bool)
        is_node[: len(self)] = self.node == np.arange(len(self), dtype=np.int32)
        if self.index.has_joined:
            is_node[self.entry_exit_nodes] = True
        return is_node

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Yield the edges between nodes as arrays of sources and targets, one kind at a time.

        The same edge can be yielded twice.
        """
        entry_node, exit_node = self.entry_exit_nodes
        after = np.flatnonzero(self.queue_predecessor != NO_POSITION)
        before = self.queue_predecessor[after]
        if self.index.has_joined:
            # Members of one group follow each other in their queue without an edge.
            has_edge = (entry_node[before] != entry_node[after]) | ~self.index.joined[after]
            before, after = before[has_edge], after[has_edge]
        yield exit_node[before], entry_node[after]
        del before, after
        for giver in self.needs:
            needer = np.flatnonzero(giver != NO_POSITION)
            yield exit_node[giver[needer]], entry_node[needer]
        for fill, free in self.all_slot_reuses:
            yield exit_node[free], entry_node[fill]
        if self.blocking_hosts:
            for before in self.host_waits:
                waiters = np.flatnonzero(before != NO_POSITION)
                yield exit_node[before[waiters]], entry_node[waiters]
        if len(eager_sends := self.eager_sends):
            yield eager_sends, self.partner[eager_sends]
        if len(mismatched_sends := self.mismatched_sends):
            yield mismatched_sends, mismatched_sends
        if self.index.has_joined:
            grouped = np.flatnonzero(entry_node != self.node)
            yield entry_node[grouped], self.node[grouped]
            yield self.node[grouped], exit_node[grouped]

    def random_topological_order(self, seed: int) -> Iterator[int]:
        """Yield the nodes in a random legal order, and stop early at a cycle.

        Args:
            seed: Seed of the random order.
        """
        rng = random.Random(seed)
        successors: list[list[int]] = [[] for _ in range(self.node_id_limit)]
        pending_counts = [0] * self.node_id_limit
        for source, target in self.edges():
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                successors[a].append(b)
                pending_counts[b] += 1
        nodes = {*self.node.tolist(), *self.entry_exit_nodes.reshape(-1).tolist()}
        ready = sorted(node for node in nodes if not pending_counts[node])
        while ready:
            index = rng.randrange(len(ready))
            ready[index], ready[-1] = ready[-1], ready[index]
            node = ready.pop()
            yield node
            for b in successors[node]:
                pending_counts[b] -= 1
                if not pending_counts[b]:
                    ready.append(b)
