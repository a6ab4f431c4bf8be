"""The transport between processes of one machine through shared memory.

A rank receives messages in slots of shared memory, which its neighbours also map. A send copies the
message into the receiver's slot, increments a counter, and writes a byte to a socket. The byte
wakes the receiver if it sleeps. Unlike Gloo, this transport has no threads that compete with the
ranks for CPU cores.
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
from schedir.errors import ModelError, format_bytes
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
from schedir.transports.json_collectives import gather
from schedir.transports.p2p_groups import directed_edges
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.transport import (
    BufferSizes,
    CompletedWork,
    PeerLeft,
    PeerTimeout,
    SlotKey,
    Work,
    view_tp_shard,
)

# ---------------------------------------------------------------- shared memory and its messages


CACHE_LINE_BYTES: Final = 64  # No two slots share a cache line.


class SharedSegment:
    """The shared memory in which a rank receives messages: counters, then slots.

    The first counter is the number of steps that the rank has ended. Each other counter is the
    number of messages that have arrived on one lane from one sender. A counter has 64 bits, and
    only one process writes it.

    Args:
        file_descriptor: The file descriptor of the memory. The constructor maps this memory.
        ranks: The number of pipeline ranks.
        buffer_sizes: The bytes of each slot, by kind of value.
    """

    def __init__(self, file_descriptor: int, ranks: int, buffer_sizes: BufferSizes) -> None:
        memory = mmap.mmap(file_descriptor, 0)
        self.counters: memoryview[int] = memoryview(memory).cast("q")
        self.slots: dict[SlotKey, Tensor] = {}
        offset = _round_up_to_line(self.get_counter_index(ranks, 0) * 8)
        for kind, sizes in buffer_sizes.items():
            for number, size in enumerate(sizes):
                slot = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
                self.slots[kind, number], offset = slot, offset + _round_up_to_line(size)

    @staticmethod
    def get_counter_index(rank: int, lane: int) -> int:
        """Return the index of the counter for the messages of a sender.

        Args:
            rank: The rank that sends.
            lane: The lane of the messages.
        """
        return 1 + rank * len(Lane) + lane

    @classmethod
    def compute_size(cls, ranks: int, buffer_sizes: BufferSizes) -> int:
        """Return the size of a segment in bytes.

        Args:
            ranks: The number of pipeline ranks.
            buffer_sizes: The bytes of each slot, by kind of value.
        """
        return sum(
            map(
                _round_up_to_line,
                [cls.get_counter_index(ranks, 0) * 8, *chain(*buffer_sizes.values())],
            )
        )


def _round_up_to_line(size: int) -> int:
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


class OutgoingMessages:
    """The messages of one lane from this rank to another rank.

    A step writes its messages into slots of the receiver. The order of the slots is fixed for each
    program. The first step of a program creates, for each message, a view of its slot with the
    dtype and shape of the message. Later steps use the same views.

    Args:
        rank: The rank that receives.
        segment: The receiver's memory.
        counter_index: The index of the counter of these messages in the segment.
        connection: The socket that wakes the receiver.
        slots_per_program: For each program, a slot and a flag for each message of a step, in the
            order of the messages. The flag is True if the message is one tensor-parallel shard of
            the slot's value.
        place_in_slot: Returns a view of a slot with the dtype and shape of a message. Its arguments
            are the slot, the flag, and the message.
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
        self.rank: int = rank
        self.counters: memoryview[int] = segment.counters
        self.counter_index: int = counter_index
        self.connection: socket.socket = connection
        self.slots_per_program: Sequence[Sequence[tuple[Tensor, bool]]] = slots_per_program
        self.place_in_slot: Callable[[Tensor, bool, Tensor], Tensor] = place_in_slot
        self.views_per_program: list[list[Tensor]] = [[] for _ in slots_per_program]
        self.sent_count: int = 0
        self.begin_step(0)

    def begin_step(self, program: int) -> None:
        """Begin a step.

        Args:
            program: The index of the step's program in `slots_per_program`.
        """
        self.slots: Sequence[tuple[Tensor, bool]] = self.slots_per_program[program]
        self.views: list[Tensor] = self.views_per_program[program]
        self.sent_before_step: int = self.sent_count

    def send(self, tensor: Tensor, ended_steps: int) -> None:
        """Write a message into the receiver's slot, count it, and wake the receiver.

        Args:
            tensor: The message.
            ended_steps: The number of steps that this rank has ended.

        Raises:
            PeerLeft: The receiver has closed its connection before the end of this step.
        """
        if (index := self.sent_count - self.sent_before_step) == len(self.views):
            self.views.append(self.place_in_slot(*self.slots[index], tensor))
        self.views[index].copy_(tensor)
        self.sent_count += 1
        self.counters[self.counter_index] = self.sent_count
        try:
            self.connection.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # The socket is full. The unread bytes in it also wake the receiver.
        except OSError as error:
            # If the receiver has ended more steps than this rank, it has received this message. A
            # receiver may exit after its last step, so its closed connection is no error.
            if self.counters[0] <= ended_steps:
                raise _make_peer_left_error(self.rank) from error

    def wait_for_steps(self, ended_steps: int, timeout: float) -> None:
        """Wait until the receiver has ended a number of steps.

        The receiver then no longer reads messages of these steps, so their slots can be reused.

        Args:
            ended_steps: The number of steps.
            timeout: The timeout in seconds.

        Raises:
            PeerTimeout: The receiver has not ended the steps within the timeout.
            PeerLeft: The process of the receiver has ended.
        """
        deadline = monotonic() + timeout
        while self.counters[0] < ended_steps:
            if monotonic() > deadline:
                raise PeerTimeout(f"rank {self.rank} has not ended its step in {timeout:g} s")
            sleep(1e-4)
            # The call raises PeerLeft if the receiver has ended. It may also read wake-up bytes for
            # messages from the receiver. No wait needs these bytes, because each wait first reads a
            # counter.
            _receive_wakeup(self.connection, self.rank, socket.MSG_DONTWAIT)


class IncomingMessages:
    """The messages of one lane from another rank to this rank.

    Args:
        rank: The rank that sends.
        segment: The memory of this rank.
        counter_index: The index of the counter of these messages in the segment.
        connection: The socket that wakes this rank. It has a receive timeout.
    """

    def __init__(
        self, rank: int, segment: SharedSegment, counter_index: int, connection: socket.socket
    ) -> None:
        self.rank: int = rank
        self.counters: memoryview[int] = segment.counters
        self.counter_index: int = counter_index
        self.connection: socket.socket = connection
        self.requested_count: int = 0

    def wait_for_count(self, target_count: int) -> None:
        """Wait until a number of messages have arrived.

        Args:
            target_count: The number of messages since the memory was allocated.

        Raises:
            PeerTimeout: No message arrived within the timeout of the socket.
            PeerLeft: The process of the sender has ended.
        """
        while self.counters[self.counter_index] < target_count:
            if not _receive_wakeup(self.connection, self.rank):
                raise PeerTimeout(f"rank {self.rank} sent nothing within the timeout")


class MessageArrival(NamedTuple):
    """The Work of a receive.

    Attributes:
        messages: The messages from the sender on this lane.
        target_count: The value of the counter of these messages after this message has arrived.
    """

    messages: IncomingMessages
    target_count: int

    def wait(self) -> None:
        """See `IncomingMessages.wait_for_count`."""
        self.messages.wait_for_count(self.target_count)


def _receive_wakeup(connection: socket.socket, rank: int, flags: int = 0) -> bool:
    """Wait for wake-up bytes and read them. Return False if no byte came within the timeout.

    With the flag MSG_DONTWAIT, return immediately. Raises PeerLeft if the peer has ended.
    """
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

# Processes of one machine connect by Unix sockets, over which they pass file descriptors of memory.
# The names of the sockets are abstract, so no file remains after a process has ended.


def start_listening(listener: socket.socket, backlog: int) -> str:
    """Bind a socket to a new abstract name, let it listen, and return the name.

    Args:
        listener: The Unix socket.
        backlog: The number of connections that may wait to be accepted.
    """
    name = f"\0schedir-{os.getpid()}-{os.urandom(8).hex()}"
    listener.bind(name)
    listener.listen(backlog)
    return name


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the peer process belongs to the same user. Any user can connect."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1]) == os.getuid()


def receive_memory(connection: socket.socket, rank: int) -> int:
    """Receive the file descriptor of a neighbour's memory.

    Args:
        connection: The socket to the neighbour, with a receive timeout.
        rank: The neighbour's rank, for errors.

    Returns:
        The file descriptor. The caller must close it.

    Raises:
        PeerTimeout: The neighbour has sent nothing within the timeout.
        PeerLeft: The process of the neighbour has ended.
    """
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except BlockingIOError as error:
        raise PeerTimeout(f"rank {rank} did not share its memory within the timeout") from error
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
    """Connect this rank to its neighbours.

    All ranks listen. The lower rank of two neighbours connects to the higher rank.

    Args:
        listener: The listening socket of this rank.
        socket_names: The names of the listening sockets, by rank.
        this_rank: The rank of this process.
        neighbours: The ranks to connect to.
        timeout: The timeout of connections and receives, in seconds.

    Returns:
        A connected socket for each neighbour. Receives on it have the timeout.

    Raises:
        PeerTimeout: A neighbour has not connected within the timeout.
        PeerLeft: The process of a neighbour ended during the connection.
        OSError: A connection fails, or a socket belongs to another user.
    """
    with ExitStack() as sockets:
        connections = {}
        listener.settimeout(timeout)
        for rank in neighbours:
            if rank > this_rank:
                connections[rank] = sockets.enter_context(socket.socket(socket.AF_UNIX))
                connections[rank].connect(socket_names[rank])
                if not _is_ours(connections[rank]):
                    raise OSError(f"the socket of rank {rank} belongs to another user")
                connections[rank].sendall(struct.pack("q", this_rank))
                _set_receive_timeout(connections[rank], timeout)
        expected_ranks = {rank for rank in neighbours if rank < this_rank}
        while expected_ranks:
            try:
                caller = sockets.enter_context(listener.accept()[0])
                if not _is_ours(caller):
                    caller.close()
                    continue
                _set_receive_timeout(caller, timeout)
                rank_bytes = caller.recv(8, socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError) as error:
                raise PeerTimeout(
                    f"rank {min(expected_ranks)} did not connect within the timeout"
                ) from error
            if len(rank_bytes) < 8:
                raise PeerLeft("the process of a neighbour ended while it connected")
            rank = struct.unpack("q", rank_bytes)[0]
            connections[rank] = caller
            expected_ranks.remove(rank)
        sockets.pop_all()
    return connections


def _set_receive_timeout(connection: socket.socket, timeout: float) -> None:
    """Set the receive timeout of a socket in the kernel.

    With `socket.settimeout`, each receive would need two system calls.
    """
    timeval = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def close_connections(connections: Iterable[socket.socket]) -> None:
    """Close sockets.

    Args:
        connections: The sockets.
    """
    for connection in connections:
        connection.close()


# ---------------------------------------------------------------- the transport


# On machines of these types, other processes see the memory writes of a process in program order.
# On other machines, a receiver might see a new counter before it sees the message.
STORE_ORDERED_MACHINES: Final = ("x86_64",)
# Files in the first directory are in memory. Files in the second directory may be on a disk, but
# the kernel caches them in memory.
MEMORY_DIRECTORIES: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
NETWORK_NAMESPACE = "/proc/self/ns/net"  # Abstract sockets connect only within one namespace.
# Opcode of a receive -> the kind of its value, and the opcodes of the instructions that gather the
# value if its message is a tensor-parallel shard.
RECEIVED_VALUES: Final = {
    op: (kind, [modifier for modifier in find_modifiers(kind) if modifier in TP_SPLIT_OPS])
    for op in RECV_OPS
    for kind in INSTRUCTIONS[op].gives
}
_COMPLETED: Final = CompletedWork()


def can_share_memory(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all processes can share memory.

    The processes must run on one Linux machine, whose type must be in `STORE_ORDERED_MACHINES`. All
    processes must call this function.

    Args:
        group: The process group. By default all processes.
    """
    domains = gather(_identify_memory_domain(), group)
    return domains[0] is not None and all(domain == domains[0] for domain in domains)


def _identify_memory_domain() -> object:
    """Return a value that is equal for processes that can pass memory to each other, or None.

    The value identifies the kernel and the network namespace. A host name is not enough: several
    machines, or containers of one machine, may have the same host name.
    """
    if sys.platform != "linux" or platform.machine() not in STORE_ORDERED_MACHINES:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink(NETWORK_NAMESPACE)
    except OSError:
        return None


class SharedMemoryTransport(ProcessTransport):
    """The transport between processes of one machine that write into each other's memory.

    Its progress model is `per_edge`. Each message of a step has a separate slot. So a send waits
    only until the receiver has ended the previous step. The receiver can end that step without
    messages of the current step. Collectives use Gloo.

    Args:
        program: The program that the transport runs.
        timeout: The timeout of the transport's groups and messages in seconds, see
            `ProcessTransport`.
        device: The device of the tensors, which must be a CPU.
        max_message_bytes: Not used.
        group: The process group that runs the program. By default all processes run it.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: A program shares slots, or the processes cannot share memory. Also see
            `ProcessTransport`.

    Example:
        >>> import schedir
        >>> from torch import distributed
        >>> from schedir.runtime import GlooTransport, SharedMemoryTransport
        >>> from schedir.transports.shared_memory import can_share_memory
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(),
        ...     rank=0, world_size=1)
        >>> program = schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(ranks=1, microbatches=4))
        >>> kind = SharedMemoryTransport if can_share_memory() else GlooTransport
        >>> transport = kind(program)
        >>> transport.progress_model
        'per_edge'
        >>> distributed.destroy_process_group()
    """

    progress_model: ProgressModel = "per_edge"

    @classmethod
    def supports(cls, program: Program, group: dist.ProcessGroup | None = None) -> bool:
        """Return whether the program shares no slots and the processes can share memory.

        All processes must call this method.

        Args:
            program: The program.
            group: The process group that runs the program. By default all processes run it.
        """
        return not program.shares_slots and can_share_memory(group)

    def open_channels(self) -> None:
        """Refuse programs and processes without shared memory. `allocate_buffers` connects them."""
        self.require_supported(self.programs)
        if not can_share_memory(self.parent_group):
            raise ModelError(
                "transport 'shared_memory' needs one machine for all processes, with Linux on "
                "x86-64",
                program=self.name,
                hint='transport = "gloo"',
            )
        self.wait_timeout: float = (
            default_pg_timeout.total_seconds() if self.timeout is None else self.timeout
        )
        self.ended_steps: int = 0  # the number of steps that this rank has ended
        self.segment: SharedSegment | None = None  # the memory for messages to this rank
        self.close_connections: Callable[[], object] = lambda: None
        self.outgoing: dict[tuple[Lane, int], OutgoingMessages] = {}
        self.incoming: dict[tuple[Lane, int], IncomingMessages] = {}

    def describe_missing_channels(self, program: Program) -> str:
        """Return a description of a group that a program needs and this transport lacks.

        Args:
            program: The program.

        Returns:
            A noun phrase for an error message, or "" if nothing is missing.

        Raises:
            ModelError: The program shares slots.
        """
        if program.shares_slots:
            raise ModelError(
                "transport 'shared_memory' needs a slot for each message, but the program shares "
                "slots",
                program=program.name,
                hint='GlooTransport(program); in a configuration, transport = "gloo"',
            )
        return super().describe_missing_channels(program)

    def allocate_buffers(
        self, buffer_sizes: BufferSizes, device: torch.device, programs: Sequence[Program]
    ) -> dict[SlotKey, Tensor]:
        """Allocate the memory into which messages are received, and share it with the neighbours.

        All processes call this method once for each executor. The method waits until all processes
        have called it.

        Args:
            buffer_sizes: The bytes of each slot, by kind (`schedir.ir.isa.instructions.Value`):
                `{Value.ACT_IN: [4096, 4096]}`.
            device: The device of the memory, which must be a CPU.
            programs: The programs that will run.

        Returns:
            A flat uint8 tensor for each slot, by kind and number: `(Value.ACT_IN, 0)`.

        Raises:
            ModelError: A process has not enough memory, or cannot connect to a neighbour. Or the
                transport was not created for one of the programs.
        """
        self.require_supported(programs)
        self.ended_steps = 0  # The counters in new memory begin at 0, too.
        ranks, name, problem = self.mesh.shape[1], "", ""
        size = SharedSegment.compute_size(ranks, buffer_sizes)
        with ExitStack() as resources:
            listener = resources.enter_context(socket.socket(socket.AF_UNIX))
            file_descriptor = -1
            try:
                name = start_listening(listener, ranks)
                file_descriptor = _create_memory_file(size)
                resources.callback(os.close, file_descriptor)
            except OSError as error:
                problem = f"{error.strerror or error}, for {format_bytes(size)}"
            members = dist.get_process_group_ranks(self.parent_group or dist.group.WORLD)
            process_values = name, problem, {kind: [*sizes] for kind, sizes in buffer_sizes.items()}
            all_values: list[tuple[str, str, BufferSizes]] = gather(
                process_values, self.parent_group, [Value]
            )
            values_by_process = dict(zip(members, all_values, strict=True))
            for process, (_, reason, _) in values_by_process.items():
                if reason:
                    raise ModelError(
                        f"process {process} cannot allocate shared memory: {reason}",
                        program=self.name,
                        hint='transport = "gloo"',
                    )
            peers = [values_by_process[int(p)] for p in self.mesh[self.dp_rank, :, self.tp_rank]]
            self.segment = SharedSegment(file_descriptor, ranks, buffer_sizes)
            try:
                names = [n for n, *_ in peers]
                sizes_of_peers = [r for *_, r in peers]
                self._connect_and_map(listener, file_descriptor, names, sizes_of_peers, programs)
            except OSError as error:
                raise ModelError(
                    f"rank {self.rank} cannot connect to a neighbour: {error}",
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
        """Connect to the ranks with which this rank exchanges messages, and map their memory."""
        segment, ranks = self.segment, len(socket_names)
        assert segment is not None
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
            counter_index = segment.get_counter_index(rank, lane)
            self.incoming[lane, rank] = IncomingMessages(
                rank, segment, counter_index, connections[rank]
            )
        indexes = [*map(InstructionIndex.from_program, programs)]
        descriptors = {rank: receive_memory(connections[rank], rank) for rank in sorted(neighbours)}
        for rank in {rank for _, rank in targets}:
            peer_segment = SharedSegment(descriptors[rank], ranks, buffer_sizes_of_peers[rank])
            inboxes = [_list_received_slots(index, rank, self.rank) for index in indexes]
            for lane in [lane for lane, target in targets if target == rank]:
                slots_per_program = [
                    [(peer_segment.slots[key], is_shard) for key, is_shard in inbox[lane]]
                    for inbox in inboxes
                ]
                counter_index = peer_segment.get_counter_index(self.rank, lane)
                messages = OutgoingMessages(
                    rank,
                    peer_segment,
                    counter_index,
                    connections[rank],
                    slots_per_program,
                    self._place_in_slot,
                )
                self.outgoing[lane, rank] = messages
        for descriptor in descriptors.values():
            os.close(descriptor)
        self.close_connections = weakref.finalize(self, close_connections, [*connections.values()])

    def _place_in_slot(self, slot: Tensor, is_shard: bool, tensor: Tensor) -> Tensor:
        """Return a view of a slot with the dtype and shape of a message.

        The slot may be larger than the message. If `is_shard`, the view is the shard of this
        tensor-parallel rank.
        """
        size = tensor.nbytes
        view = view_tp_shard(self, slot[: size * self.tp]) if is_shard else slot[:size]
        return view.view(tensor.dtype).view(tensor.shape)

    def on_step_begin(self, program: int) -> None:
        """Begin a step of a program.

        Args:
            program: The index of the program in the `programs` of `allocate_buffers`.
        """
        for messages in self.outgoing.values():
            messages.begin_step(program)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Write a message into the receiver's memory.

        This method blocks until the receiver has ended the previous step. Also see
        `Transport.send`.

        Args:
            tensor: The tensor.
            peer: The pipeline rank that receives.
            lane: The lane of the message.

        Returns:
            Completed Work.

        Raises:
            PeerTimeout: The receiver has not ended its previous step within the timeout.
            PeerLeft: The process of the receiver has ended.
        """
        messages = self.outgoing[lane, peer]
        if messages.counters[0] < self.ended_steps:
            messages.wait_for_steps(self.ended_steps, self.wait_timeout)
        messages.send(tensor, self.ended_steps)
        return _COMPLETED

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Return the Work of the next message of a sender.

        Args:
            tensor: Not used. The sender writes the message into a slot from `allocate_buffers`, and
                this tensor is a view of that slot.
            peer: The pipeline rank that sends.
            lane: The lane of the message.
        """
        messages = self.incoming[lane, peer]
        messages.requested_count += 1
        return MessageArrival(messages, messages.requested_count)

    def disconnect(self) -> None:
        """See `ProcessTransport.disconnect`."""
        self.close_connections()

    def on_step_end(self) -> None:
        """End a step. The neighbours may then overwrite the slots of messages to this rank."""
        self.ended_steps += 1
        if self.segment is not None:
            self.segment.counters[0] = self.ended_steps


def _list_received_slots(
    index: InstructionIndex, rank: int, sender: int
) -> dict[Lane, list[tuple[SlotKey, bool]]]:
    """Return, by lane, the slots of the messages that a sender sends to a rank in a step.

    The slots are in the order of the messages. Each slot has a flag. The flag is True if the slot's
    message is a tensor-parallel shard that the rank gathers.
    """
    program = index.program
    stream, slots_by_value = program.streams[rank], assign_slots(program, rank)
    slots: dict[Lane, list[tuple[SlotKey, bool]]] = defaultdict(list)
    instructions = {tuple(instr) for instr in stream}
    for instr in stream:
        if instr.op in RECEIVED_VALUES and program.peer_rank(instr) == sender:
            (op, stage, mb), (kind, gathers) = instr, RECEIVED_VALUES[instr.op]
            (number,) = slots_by_value[kind, stage, mb].values()
            key = kind, number
            is_shard = any((gather, stage, mb) in instructions for gather in gathers)
            slots[INSTRUCTIONS[op].lane].append((key, is_shard))
    return slots


def _create_memory_file(size: int) -> int:
    """Create an unnamed file of the given size with allocated memory, and return its descriptor.

    Raises OSError if no directory has enough space.
    """
    for directory in MEMORY_DIRECTORIES:
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return os.dup(file.fileno())
        except OSError:
            if directory == MEMORY_DIRECTORIES[-1]:
                raise
    raise AssertionError
