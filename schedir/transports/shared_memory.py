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

from schedir.analysis.memory.buffer_slots import assign
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import RECEIVES, ROWS, SPLIT_CHANGES, Lane, Value, changes
from schedir.ir.program import Program
from schedir.transports.gloo import ProcessTransport
from schedir.transports.json_collectives import gather
from schedir.transports.p2p_groups import directed_edges
from schedir.transports.transport import (
    CompletedWork,
    PeerLate,
    PeerLeft,
    Place,
    Rooms,
    Work,
    own_part,
)

# ---------------------------------------------------------------- rings of shared memory

# The memory that two processes share, and how messages are written, counted and awaited in it.


LINE: Final = 64  # bytes of a cache line, on which slots begin


class SharedSegment:
    """Where a rank receives: a head of 64-bit numbers, then slots.

    The head says how many steps the rank has ended, then of each lane of each rank how many
    messages came.  Each number has one writer.
    """

    def __init__(self, descriptor: int, ranks: int, rooms: Rooms) -> None:
        memory = mmap.mmap(descriptor, 0)
        self.head = memoryview(memory).cast("q")
        self.slots: dict[Place, Tensor] = {}
        at = _lines(self.count(ranks, 0) * 8)
        for kind, sizes in rooms.items():
            for number, size in enumerate(sizes):
                slot = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)
                self.slots[kind, number], at = slot, at + _lines(size)

    @staticmethod
    def count(rank: int, lane: int) -> int:
        """Where in the head the messages of a lane of a rank are counted."""
        return 1 + rank * len(Lane) + lane

    @classmethod
    def size(cls, ranks: int, rooms: Rooms) -> int:
        """In bytes."""
        return sum(map(_lines, [cls.count(ranks, 0) * 8, *chain(*rooms.values())]))


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE


class OutgoingMessages:
    """The messages of one lane to one rank, which go into slots in the order of a step: for each
    program its own, with whether a part alone goes there.

    Where in these, the messages of the first step of a program say, as `room` has it.
    """

    def __init__(
        self,
        rank: int,
        memory: SharedSegment,
        at: int,
        connection: socket.socket,
        steps: Sequence[Sequence[tuple[Tensor, bool]]],
        room: Callable[[Tensor, bool, Tensor], Tensor],
    ) -> None:
        self.rank, self.head, self.at = rank, memory.head, at
        self.connection, self.steps, self.room = connection, steps, room
        self.places: list[list[Tensor]] = [[] for _ in steps]
        self.sent = 0
        self.begin(0)

    def begin(self, program: int) -> None:
        """A step begins."""
        self.slots, self.parts, self.before = self.steps[program], self.places[program], self.sent

    def send(self, tensor: Tensor, steps: int) -> None:
        """Write it, count it, and wake the receiver.  `steps` came before this one."""
        if (number := self.sent - self.before) == len(self.parts):
            self.parts.append(self.room(*self.slots[number], tensor))
        self.parts[number].copy_(tensor)
        self.sent += 1
        self.head[self.at] = self.sent
        try:
            self.connection.send(b"\0", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # full of bytes that will wake it
        except OSError as error:
            if self.head[0] <= steps:  # else it has seen the count, ended the step, and left
                raise _peer_left(self.rank) from error

    def wait(self, steps: int, seconds: float) -> None:
        """Return when the receiver has ended so many steps: it has left all that it received."""
        over = monotonic() + seconds
        while self.head[0] < steps:
            if monotonic() > over:
                raise PeerLate(f"rank {self.rank} has not ended its step in {seconds:g} s")
            sleep(1e-4)
            # Its bytes may be there for another lane; without any, this sees it leave.
            _take(self.connection, self.rank, socket.MSG_DONTWAIT)


class IncomingMessages:
    """The messages of one lane from one rank."""

    def __init__(
        self, rank: int, memory: SharedSegment, at: int, connection: socket.socket
    ) -> None:
        self.rank, self.head, self.at, self.connection = rank, memory.head, at, connection
        self.asked = 0

    def wait(self, number: int) -> None:
        """Return when so many have come."""
        while self.head[self.at] < number:
            if not _take(self.connection, self.rank):
                raise PeerLate(f"nothing has come from rank {self.rank} in time")


class MessageArrival(NamedTuple):
    """Work that ends when a message is there."""

    way: IncomingMessages
    number: int

    def wait(self) -> None:
        self.way.wait(self.number)


def _take(connection: socket.socket, rank: int, flags: int = 0) -> bool:
    """Read the bytes that wake this rank, or sleep until one comes; return whether one came."""
    try:
        if connection.recv(4096, flags):
            return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise _peer_left(rank) from error
    raise _peer_left(rank)


def _peer_left(rank: int) -> PeerLeft:
    return PeerLeft(f"rank {rank} has left")


# ---------------------------------------------------------------- connections

# Sockets between processes of one machine, over which they pass file descriptors of memory.  Their
# names are in no folder, so nothing of them is left, however a process ends.


def listen(listener: socket.socket, most: int) -> str:
    """Let a socket listen; returns its name, which is in no folder, and goes with the process."""
    name = f"\0schedir-{os.getpid()}-{os.urandom(8).hex()}"
    listener.bind(name)
    listener.listen(most)
    return name


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user: anybody may know such a name."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1]) == os.getuid()


def passed(connection: socket.socket, rank: int) -> int:
    """The memory that a neighbour has passed."""
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except BlockingIOError as error:
        raise PeerLate(f"rank {rank} has not passed its memory in time") from error
    if not descriptors:
        raise PeerLeft(f"rank {rank} has left")
    return descriptors[0]


def connect(
    listener: socket.socket, names: list[str], own: int, neighbours: Iterable[int], seconds: float
) -> dict[int, socket.socket]:
    """A connection to each neighbour: all listen, and the lower rank calls.

    Raises OSError, of which PeerLate is one where a neighbour does not call for so many seconds.
    """
    with ExitStack() as made:
        connections = {}
        listener.settimeout(seconds)
        for rank in neighbours:
            if rank > own:
                connections[rank] = made.enter_context(socket.socket(socket.AF_UNIX))
                connections[rank].connect(names[rank])
                if not _is_ours(connections[rank]):
                    raise OSError("its socket is somebody else's")
                connections[rank].sendall(struct.pack("q", own))
                _be_patient(connections[rank], seconds)
        waiting = {rank for rank in neighbours if rank < own}
        while waiting:
            try:
                caller = made.enter_context(listener.accept()[0])
                if not _is_ours(caller):
                    caller.close()
                    continue
                _be_patient(caller, seconds)
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


def _be_patient(connection: socket.socket, seconds: float) -> None:
    """Let who receives wait for so many seconds; by the kernel: Python's own timeout would ask it
    twice for each message."""
    patience = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


def close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


# ---------------------------------------------------------------- the transport


ORDERED: Final = ("x86_64",)  # others may show a count before what it counts
# Where files are memory; or else on a disk, of which memory is a copy.
PLACES: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
SPACE = "/proc/self/ns/net"  # what sockets without a file see of each other
# What a receive takes in, and who makes it whole where it comes in parts.
RECEIVED: Final = {
    op: (kind, [one for one in changes(kind) if one in SPLIT_CHANGES])
    for op in RECEIVES
    for kind in ROWS[op].gives
}
_DONE: Final = CompletedWork()


def can_share(group: dist.ProcessGroup | None = None) -> bool:
    """Whether all processes, or those of a group, see one memory, of a Linux that shows stores in
    order; all must ask."""
    everyone = gather(_sight(), group)
    return everyone[0] is not None and all(one == everyone[0] for one in everyone)


def _sight() -> object:
    """What processes that can pass memory to each other have in common; None where that cannot be.

    It is one kernel and one space of names for sockets.  Not the name of the host: machines may
    share one, and containers of one machine may too.
    """
    if sys.platform != "linux" or platform.machine() not in ORDERED:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink(SPACE)
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
    >>> from schedir.transports.shared_memory import can_share
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> program = schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(ranks=1, microbatches=4))
    >>> transport = SharedMemoryTransport(program) if can_share() else GlooTransport(program)
    >>> transport.progress_model
    'per_edge'
    >>> distributed.destroy_process_group()
    """

    progress_model: ProgressModel = "per_edge"

    @classmethod
    def fits(cls, program: Program, group: dist.ProcessGroup | None = None) -> bool:
        """Whether no slots are shared, and all processes see one memory; all must ask."""
        return not program.shares_slots and can_share(group)

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str = "cpu",
        message: int = 0,
        group: dist.ProcessGroup | None = None,
        more: Sequence[Program] = (),
    ) -> None:
        super().__init__(program, timeout, device=device, group=group, more=more)
        self.expect(self.programs)
        if not can_share(group):
            raise ModelError(
                "memory is shared by processes of one machine, a Linux on x86-64 as yet",
                program=program.name,
                hint='transport = "gloo"',
            )
        own = self.patience
        self.seconds = default_pg_timeout.total_seconds() if own is None else own
        self.ended = 0  # steps of this rank
        self.memory: SharedSegment | None = None  # where it receives
        self.close: Callable[[], object] = lambda: None
        self.outgoing: dict[tuple[Lane, int], OutgoingMessages] = {}
        self.incoming: dict[tuple[Lane, int], IncomingMessages] = {}

    def lacking(self, program: Program) -> str:
        """As Processes.lacking."""
        if program.shares_slots:
            raise ModelError(
                "messages have a slot each in shared memory, and the program shares slots",
                program=program.name,
                hint='transport = "gloo"',
            )
        return super().lacking(program)

    def buffers(
        self, rooms: Rooms, device: torch.device, programs: Sequence[Program]
    ) -> dict[Place, Tensor]:
        """As Transport.buffers, where the neighbours see them; all processes must call this.

        Raises ModelError if the machine has no room.
        """
        self.expect(programs)
        self.ended = 0  # in this memory
        ranks, name, problem = self.mesh.shape[1], "", ""
        size = SharedSegment.size(ranks, rooms)
        with ExitStack() as made:
            listener = made.enter_context(socket.socket(socket.AF_UNIX))
            memory = -1
            try:
                name = listen(listener, ranks)
                memory = _make(size)
                made.callback(os.close, memory)
            except OSError as error:
                problem = f"{error.strerror or error}, for {size} bytes"
            members = dist.get_process_group_ranks(self.within or dist.group.WORLD)
            own = name, problem, {kind: [*sizes] for kind, sizes in rooms.items()}
            everyone: list[tuple[str, str, Rooms]] = gather(own, self.within, [Value])
            told = dict(zip(members, everyone, strict=True))
            for process, (_, why, _) in told.items():
                if why:
                    raise ModelError(
                        f"process {process} cannot share what it receives: {why}",
                        program=self.name,
                        hint='transport = "gloo"',
                    )
            peers = [told[int(p)] for p in self.mesh[self.dp_rank, :, self.tp_rank]]
            self.memory = SharedSegment(memory, ranks, rooms)
            try:
                names, rooms_of = [n for n, *_ in peers], [r for *_, r in peers]
                self._meet(listener, memory, names, rooms_of, programs)
            except OSError as error:
                raise ModelError(
                    f"rank {self.rank} does not reach a neighbour: {error}",
                    program=self.name,
                    hint='transport = "gloo"',
                ) from error
        return self.memory.slots

    def _meet(
        self,
        listener: socket.socket,
        memory: int,
        names: list[str],
        rooms: list[Rooms],
        programs: Sequence[Program],
    ) -> None:
        """Connect to the ranks with which this one exchanges messages, and map their memory."""
        own, ranks = self.memory, len(names)
        assert own is not None
        edges = directed_edges(*programs)
        sources = [(lane, source) for lane, source, target in edges if target == self.rank]
        targets = [(lane, target) for lane, source, target in edges if source == self.rank]
        neighbours = {rank for _, rank in (*sources, *targets)}
        connections = connect(listener, names, self.rank, neighbours, self.seconds)
        for connection in connections.values():
            socket.send_fds(connection, [b"\1"], [memory])
        for lane, rank in sources:
            at = own.count(rank, lane)
            self.incoming[lane, rank] = IncomingMessages(rank, own, at, connections[rank])
        indexes = [*map(InstructionIndex.of, programs)]
        theirs_of = {rank: passed(connections[rank], rank) for rank in sorted(neighbours)}
        for rank in {rank for _, rank in targets}:
            theirs = SharedSegment(theirs_of[rank], ranks, rooms[rank])
            inboxes = [_inbox(index, rank, self.rank) for index in indexes]
            for lane in [lane for lane, target in targets if target == rank]:
                steps = [
                    [(theirs.slots[place], cut) for place, cut in inbox[lane]] for inbox in inboxes
                ]
                at = theirs.count(self.rank, lane)
                way = OutgoingMessages(rank, theirs, at, connections[rank], steps, self._room)
                self.outgoing[lane, rank] = way
        for descriptor in theirs_of.values():
            os.close(descriptor)
        self.close = weakref.finalize(self, close, [*connections.values()])

    def _room(self, slot: Tensor, cut: bool, tensor: Tensor) -> Tensor:
        """Where in a slot, which may be larger, a message goes, or the part of one that is cut."""
        size = tensor.nbytes
        place = own_part(self, slot[: size * self.tp]) if cut else slot[:size]
        return place.view(tensor.dtype).view(tensor.shape)

    def step_begins(self, program: int) -> None:
        """As Transport.step_begins: its messages have an order of their own."""
        for way in self.outgoing.values():
            way.begin(program)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Write into the receiver's memory."""
        way = self.outgoing[lane, peer]
        if way.head[0] < self.ended:
            way.wait(self.ended, self.seconds)
        way.send(tensor, self.ended)
        return _DONE

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Expect a message where `buffers` has made room for it: `tensor` is there."""
        way = self.incoming[lane, peer]
        way.asked += 1
        return MessageArrival(way, way.asked)

    def leave(self) -> None:
        """As Processes.leave."""
        self.close()

    def step_ended(self) -> None:
        """As Transport.step_ended: the neighbours may write again."""
        self.ended += 1
        if self.memory is not None:
            self.memory.head[0] = self.ended


def _inbox(index: InstructionIndex, rank: int, sender: int) -> dict[Lane, list[tuple[Place, bool]]]:
    """What a rank receives of another in a step, by lane: its slot, and whether a part alone."""
    program = index.program
    stream, assigned = program.streams[rank], assign(program, rank)
    found: dict[Lane, list[tuple[Place, bool]]] = defaultdict(list)
    there = {tuple(i) for i in stream}
    for i in stream:
        if i.op in RECEIVED and program.peer(i) == sender:
            (op, stage, mb), (kind, gathers) = i, RECEIVED[i.op]
            (number,) = assigned[kind, stage, mb].values()
            place = kind, number
            cut = any((gather, stage, mb) in there for gather in gathers)
            found[ROWS[op].lane].append((place, cut))
    return found


def _make(size: int) -> int:
    """A file without a name of so many bytes, which are there.  Raises OSError."""
    for place in PLACES:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return os.dup(file.fileno())
        except OSError:
            if place == PLACES[-1]:
                raise
    raise AssertionError
