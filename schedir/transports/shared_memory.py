"""Shared: the transport between processes of one machine through shared memory.

What a rank receives lives in memory that its neighbours see: a send is one copy into the slot
from which the receiver computes, a count, and a byte on a socket for a receiver that sleeps.  No
thread stands between the two, as Gloo's do, which compete with the ranks where every core computes.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import struct
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from schedir.analysis.memory.buffer_slots import assign_slots
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    RECV_OPS,
    TP_SPLIT_OPS,
    Lane,
    Value,
    find_modifiers,
)
from schedir.ir.program import Program
from schedir.transports.gloo import ProcessTransport
from schedir.transports.json_collectives import gather
from schedir.transports.p2p_groups import directed_edges
from schedir.transports.transport import (
    BufferSizes,
    CompletedWork,
    PeerLate,
    PeerLeft,
    SlotKey,
    Work,
    view_tp_shard,
)

# ---------------------------------------------------------------- rings of shared memory

# The memory that two processes share, and how messages are written, counted and awaited in it.


CACHE_LINE_BYTES: Final = 64  # bytes of a cache line, on which slots begin


class SharedSegment:
    """Where a rank receives: a head of 64-bit numbers, then slots.

    The head says how many steps the rank has ended, then of each lane of each rank how many
    messages came.  Each number has one writer.
    """

    def __init__(self, file_descriptor: int, ranks: int, buffer_sizes: BufferSizes) -> None:
        memory = mmap.mmap(file_descriptor, 0)
        self.counters = memoryview(memory).cast("q")
        self.slots: dict[SlotKey, Tensor] = {}
        at = _round_up_to_line(self.get_counter_index(ranks, 0) * 8)
        for kind, sizes in buffer_sizes.items():
            for number, size in enumerate(sizes):
                slot = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)
                self.slots[kind, number], at = slot, at + _round_up_to_line(size)

    @staticmethod
    def get_counter_index(rank: int, lane: int) -> int:
        """Where in the head the messages of a lane of a rank are counted."""
        return 1 + rank * len(Lane) + lane

    @classmethod
    def compute_size(cls, ranks: int, buffer_sizes: BufferSizes) -> int:
        """In bytes."""
        return sum(
            map(
                _round_up_to_line,
                [cls.get_counter_index(ranks, 0) * 8, *chain(*buffer_sizes.values())],
            )
        )


def _round_up_to_line(size: int) -> int:
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


class OutgoingMessages:
    """The messages of one lane to one rank, which go into slots in the order of a step: for each
    program its own, with whether a part alone goes there.

    Where in these, the messages of the first step of a program say, as `place_in_slot` has it.
    """

    def __init__(
        self,
        rank: int,
        segment: SharedSegment,
        counter_index: int,
        connection: socket.socket,
        slots_per_program: Sequence[Sequence[tuple[Tensor, bool]]],
        place_in_slot: Callable[[Tensor, bool, Tensor], Tensor],
    ) -> None:
        self.rank, self.counters, self.counter_index = rank, segment.counters, counter_index
        self.connection, self.slots_per_program, self.place_in_slot = (
            connection,
            slots_per_program,
            place_in_slot,
        )
        self.views_per_program: list[list[Tensor]] = [[] for _ in slots_per_program]
        self.sent_count = 0
        self.begin_step(0)

    def begin_step(self, program: int) -> None:
        """A step begins."""
        self.slots, self.views, self.sent_before_step = (
            self.slots_per_program[program],
            self.views_per_program[program],
            self.sent_count,
        )

    def send(self, tensor: Tensor, ended_steps: int) -> None:
        """Write it, count it, and wake the receiver.  `ended_steps` came before this one."""
        if (number := self.sent_count - self.sent_before_step) == len(self.views):
            self.views.append(self.place_in_slot(*self.slots[number], tensor))
        self.views[number].copy_(tensor)
        self.sent_count += 1
        self.counters[self.counter_index] = self.sent_count
        try:
            self.connection.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # full of bytes that will wake it
        except OSError as error:
            if (
                self.counters[0] <= ended_steps
            ):  # else it has seen the count, ended the step, and left
                raise _make_peer_left_error(self.rank) from error

    def wait_for_steps(self, ended_steps: int, timeout: float) -> None:
        """Return when the receiver has ended so many steps: it has left all that it received."""
        over = monotonic() + timeout
        while self.counters[0] < ended_steps:
            if monotonic() > over:
                raise PeerLate(f"rank {self.rank} has not ended its step in {timeout:g} s")
            sleep(1e-4)
            # Its bytes may be there for another lane; without any, this sees it leave.
            _receive_wakeup(self.connection, self.rank, socket.MSG_DONTWAIT)


class IncomingMessages:
    """The messages of one lane from one rank."""

    def __init__(
        self, rank: int, segment: SharedSegment, counter_index: int, connection: socket.socket
    ) -> None:
        self.rank, self.counters, self.counter_index, self.connection = (
            rank,
            segment.counters,
            counter_index,
            connection,
        )
        self.requested_count = 0

    def wait_for_count(self, target_count: int) -> None:
        """Return when so many have come."""
        while self.counters[self.counter_index] < target_count:
            if not _receive_wakeup(self.connection, self.rank):
                raise PeerLate(f"nothing has come from rank {self.rank} in time")


class MessageArrival(NamedTuple):
    """Work that ends when a message is there."""

    messages: IncomingMessages
    target_count: int

    def wait(self) -> None:
        self.messages.wait_for_count(self.target_count)


def _receive_wakeup(connection: socket.socket, rank: int, flags: int = 0) -> bool:
    """Read the bytes that wake this rank, or sleep until one comes; return whether one came."""
    try:
        if connection.recv(4096, flags):
            return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise _make_peer_left_error(rank) from error
    raise _make_peer_left_error(rank)


def _make_peer_left_error(rank: int) -> PeerLeft:
    return PeerLeft(f"rank {rank} has left")


# ---------------------------------------------------------------- connections

# Sockets between processes of one machine, over which they pass file descriptors of memory.  Their
# names are in no folder, so nothing of them is left, however a process ends.


def start_listening(listener: socket.socket, backlog: int) -> str:
    """Let a socket listen; returns its name, which is in no folder, and goes with the process."""
    name = f"\0schedir-{os.getpid()}-{os.urandom(8).hex()}"
    listener.bind(name)
    listener.listen(backlog)
    return name


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user: anybody may know such a name."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1]) == os.getuid()


def receive_memory(connection: socket.socket, rank: int) -> int:
    """The memory that a neighbour has passed."""
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except BlockingIOError as error:
        raise PeerLate(f"rank {rank} has not passed its memory in time") from error
    if not descriptors:
        raise PeerLeft(f"rank {rank} has left")
    return descriptors[0]


def connect_neighbours(
    listener: socket.socket,
    socket_names: list[str],
    this_rank: int,
    neighbours: Iterable[int],
    timeout: float,
) -> dict[int, socket.socket]:
    """A connection to each neighbour: all listen, and the lower rank calls.

    Raises OSError, of which PeerLate is one where a neighbour does not call for so many seconds.
    """
    with ExitStack() as made:
        connections = {}
        listener.settimeout(timeout)
        for rank in neighbours:
            if rank > this_rank:
                connections[rank] = made.enter_context(socket.socket(socket.AF_UNIX))
                connections[rank].connect(socket_names[rank])
                if not _is_ours(connections[rank]):
                    raise OSError("its socket is somebody else's")
                connections[rank].sendall(struct.pack("q", this_rank))
                _set_receive_timeout(connections[rank], timeout)
        waiting = {rank for rank in neighbours if rank < this_rank}
        while waiting:
            try:
                caller = made.enter_context(listener.accept()[0])
                if not _is_ours(caller):
                    caller.close()
                    continue
                _set_receive_timeout(caller, timeout)
                told = caller.recv(8, socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError) as error:
                raise PeerLate(f"rank {min(waiting)} has not called in time") from error
            if len(told) < 8:
                raise PeerLeft("a neighbour has left as it called")
            rank = struct.unpack("q", told)[0]
            connections[rank] = caller
            waiting.remove(rank)
        made.pop_all()
    return connections


def _set_receive_timeout(connection: socket.socket, timeout: float) -> None:
    """Let who receives wait for so many seconds; by the kernel: Python's own timeout would ask it
    twice for each message."""
    patience = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


def close_connections(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


# ---------------------------------------------------------------- the transport


STORE_ORDERED_MACHINES: Final = ("x86_64",)  # others may show a count before what it counts
# Where files are memory; or else on a disk, of which memory is a copy.
MEMORY_DIRECTORIES: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
NETWORK_NAMESPACE = "/proc/self/ns/net"  # what sockets without a file see of each other
# What a receive takes in, and who makes it whole where it comes in parts.
RECEIVED_VALUES: Final = {
    op: (kind, [one for one in find_modifiers(kind) if one in TP_SPLIT_OPS])
    for op in RECV_OPS
    for kind in INSTRUCTIONS[op].gives
}
_COMPLETED: Final = CompletedWork()


def can_share_memory(group: dist.ProcessGroup | None = None) -> bool:
    """Whether all processes, or those of a group, see one memory, of a Linux that shows stores in
    order; all must ask."""
    everyone = gather(_identify_memory_domain(), group)
    return everyone[0] is not None and all(one == everyone[0] for one in everyone)


def _identify_memory_domain() -> object:
    """What processes that can pass memory to each other have in common; None where that cannot be.

    It is one kernel and one space of names for sockets.  Not the name of the host: machines may
    share one, and containers of one machine may too.
    """
    if sys.platform != "linux" or platform.machine() not in STORE_ORDERED_MACHINES:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink(NETWORK_NAMESPACE)
    except OSError:
        return None


class SharedMemoryTransport(ProcessTransport):
    """Processes of one machine that write into each other's memory.  Its progress model is
    `per_edge`.

    Every message of a step has a slot of its own, so a send waits for nothing but the receiver's
    end of the step before, which depends on nothing that is sent in this one.  Collectives go
    over Gloo.

    Raises ModelError for a program that shares slots, for processes that cannot share memory, and
    as Processes.

    >>> import schedir
    >>> from torch import distributed
    >>> from schedir.runtime import GlooTransport, SharedMemoryTransport
    >>> from schedir.transports.shared_memory import can_share_memory
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> program = schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(ranks=1, microbatches=4))
    >>> transport = SharedMemoryTransport(program) if can_share_memory() else GlooTransport(program)
    >>> transport.progress_model
    'per_edge'
    >>> distributed.destroy_process_group()
    """

    progress_model: ProgressModel = "per_edge"

    @classmethod
    def supports(cls, program: Program, group: dist.ProcessGroup | None = None) -> bool:
        """Whether no slots are shared, and all processes see one memory; all must ask."""
        return not program.shares_slots and can_share_memory(group)

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str = "cpu",
        max_message_bytes: int = 0,
        group: dist.ProcessGroup | None = None,
        extra_programs: Sequence[Program] = (),
    ) -> None:
        super().__init__(
            program, timeout, device=device, group=group, extra_programs=extra_programs
        )
        self.require_supported(self.programs)
        if not can_share_memory(group):
            raise ModelError(
                "memory is shared by processes of one machine, a Linux on x86-64 as yet",
                program=program.name,
                hint='transport = "gloo"',
            )
        own = self.timeout
        self.wait_timeout = default_pg_timeout.total_seconds() if own is None else own
        self.ended_steps = 0  # steps of this rank
        self.segment: SharedSegment | None = None  # where it receives
        self.close_connections: Callable[[], object] = lambda: None
        self.outgoing: dict[tuple[Lane, int], OutgoingMessages] = {}
        self.incoming: dict[tuple[Lane, int], IncomingMessages] = {}

    def describe_missing_channels(self, program: Program) -> str:
        """As Processes.lacking."""
        if program.shares_slots:
            raise ModelError(
                "messages have a slot each in shared memory, and the program shares slots",
                program=program.name,
                hint='transport = "gloo"',
            )
        return super().describe_missing_channels(program)

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """As Transport.buffers, where the neighbours see them; all processes must call this.

        Raises ModelError if the machine has no room.
        """
        self.require_supported(programs)
        self.ended_steps = 0  # in this memory
        ranks, name, problem = self.mesh.shape[1], "", ""
        size = SharedSegment.compute_size(ranks, buffer_sizes)
        with ExitStack() as made:
            listener = made.enter_context(socket.socket(socket.AF_UNIX))
            memory = -1
            try:
                name = start_listening(listener, ranks)
                memory = _create_memory_file(size)
                made.callback(os.close, memory)
            except OSError as error:
                problem = f"{error.strerror or error}, for {size} bytes"
            members = dist.get_process_group_ranks(self.parent_group or dist.group.WORLD)
            own = name, problem, {kind: [*sizes] for kind, sizes in buffer_sizes.items()}
            everyone: list[tuple[str, str, BufferSizes]] = gather(own, self.parent_group, [Value])
            told = dict(zip(members, everyone, strict=True))
            for process, (_, why, _) in told.items():
                if why:
                    raise ModelError(
                        f"process {process} cannot share what it receives: {why}",
                        program=self.name,
                        hint='transport = "gloo"',
                    )
            peers = [told[int(p)] for p in self.mesh[self.dp_rank, :, self.tp_rank]]
            self.segment = SharedSegment(memory, ranks, buffer_sizes)
            try:
                names, rooms_of = [n for n, *_ in peers], [r for *_, r in peers]
                self._connect_and_map(listener, memory, names, rooms_of, programs)
            except OSError as error:
                raise ModelError(
                    f"rank {self.rank} does not reach a neighbour: {error}",
                    program=self.name,
                    hint='transport = "gloo"',
                ) from error
        return self.segment.slots

    def _connect_and_map(
        self,
        listener: socket.socket,
        file_descriptor: int,
        socket_names: list[str],
        buffer_sizes_of_peers: list[BufferSizes],
        programs: Sequence[Program],
    ) -> None:
        """Connect to the ranks with which this one exchanges messages, and map their memory."""
        own, ranks = self.segment, len(socket_names)
        assert own is not None
        edges = directed_edges(*programs)
        sources = [(lane, source) for lane, source, target in edges if target == self.rank]
        targets = [(lane, target) for lane, source, target in edges if source == self.rank]
        neighbours = {rank for _, rank in (*sources, *targets)}
        connections = connect_neighbours(
            listener, socket_names, self.rank, neighbours, self.wait_timeout
        )
        for connection in connections.values():
            socket.send_fds(connection, [b"\1"], [file_descriptor])
        for lane, rank in sources:
            at = own.get_counter_index(rank, lane)
            self.incoming[lane, rank] = IncomingMessages(rank, own, at, connections[rank])
        indexes = [*map(InstructionIndex.from_program, programs)]
        theirs_of = {rank: receive_memory(connections[rank], rank) for rank in sorted(neighbours)}
        for rank in {rank for _, rank in targets}:
            theirs = SharedSegment(theirs_of[rank], ranks, buffer_sizes_of_peers[rank])
            inboxes = [_list_received_slots(index, rank, self.rank) for index in indexes]
            for lane in [lane for lane, target in targets if target == rank]:
                steps = [
                    [(theirs.slots[place], cut) for place, cut in inbox[lane]] for inbox in inboxes
                ]
                at = theirs.get_counter_index(self.rank, lane)
                way = OutgoingMessages(
                    rank, theirs, at, connections[rank], steps, self._place_in_slot
                )
                self.outgoing[lane, rank] = way
        for descriptor in theirs_of.values():
            os.close(descriptor)
        self.close_connections = weakref.finalize(self, close_connections, [*connections.values()])

    def _place_in_slot(self, slot: Tensor, is_shard: bool, tensor: Tensor) -> Tensor:
        """Where in a slot, which may be larger, a message goes, or the part of one that is cut."""
        size = tensor.nbytes
        place = view_tp_shard(self, slot[: size * self.tp]) if is_shard else slot[:size]
        return place.view(tensor.dtype).view(tensor.shape)

    def on_step_begin(self, program: int) -> None:
        """As Transport.step_begins: its messages have an order of their own."""
        for way in self.outgoing.values():
            way.begin_step(program)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Write into the receiver's memory."""
        way = self.outgoing[lane, peer]
        if way.counters[0] < self.ended_steps:
            way.wait_for_steps(self.ended_steps, self.wait_timeout)
        way.send(tensor, self.ended_steps)
        return _COMPLETED

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Expect a message where `allocate_buffers` has made room for it: `tensor` is there."""
        way = self.incoming[lane, peer]
        way.requested_count += 1
        return MessageArrival(way, way.requested_count)

    def disconnect(self) -> None:
        """As Processes.leave."""
        self.close_connections()

    def on_step_end(self) -> None:
        """As Transport.step_ended: the neighbours may write again."""
        self.ended_steps += 1
        if self.segment is not None:
            self.segment.counters[0] = self.ended_steps


def _list_received_slots(
    index: InstructionIndex, rank: int, sender: int
) -> dict[Lane, list[tuple[SlotKey, bool]]]:
    """What a rank receives of another in a step, by lane: its slot, and whether a part alone."""
    program = index.program
    stream, assigned = program.streams[rank], assign_slots(program, rank)
    found: dict[Lane, list[tuple[SlotKey, bool]]] = defaultdict(list)
    there = {tuple(i) for i in stream}
    for i in stream:
        if i.op in RECEIVED_VALUES and program.peer_rank(i) == sender:
            (op, stage, mb), (kind, gathers) = i, RECEIVED_VALUES[i.op]
            (number,) = assigned[kind, stage, mb].values()
            place = kind, number
            cut = any((gather, stage, mb) in there for gather in gathers)
            found[INSTRUCTIONS[op].lane].append((place, cut))
    return found


def _create_memory_file(size: int) -> int:
    """A file without a name of so many bytes, which are there.  Raises OSError."""
    for place in MEMORY_DIRECTORIES:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return os.dup(file.fileno())
        except OSError:
            if place == MEMORY_DIRECTORIES[-1]:
                raise
    raise AssertionError
