"""Shared: the transport of processes on one machine, through memory that they share.

What a rank receives lives in memory that its neighbours see: a send is one copy into the slot
from which the receiver computes, a count, and a byte on a socket for a receiver that sleeps.  No
thread stands between the two, as Gloo's do, which compete with the ranks where every core computes.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from schedir.analysis.models import Model
from schedir.analysis.slots import assign
from schedir.errors import ModelError
from schedir.ir.index import Index
from schedir.ir.ops import GATHERS, RECEIVES, ROWS, Lane, Token
from schedir.ir.program import Program
from schedir.transports.edges import directed_edges
from schedir.transports.neighbours import close, connect, listen, passed
from schedir.transports.plain import gather
from schedir.transports.processes import Processes
from schedir.transports.transport import Done, PeerLate, PeerLeft, Place, Rooms, Work, own_part

LINE: Final = 64  # bytes of a cache line, on which slots begin
ORDERED: Final = ("x86_64",)  # others may show a count before what it counts
# Where files are memory; or else on a disk, of which memory is a copy.
PLACES: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())
SPACE = "/proc/self/ns/net"  # what sockets without a file see of each other
# What a receive takes in, and what makes it whole where it was scattered.
_GATHERS: Final = {ROWS[op].gives[0]: op for op in GATHERS}
RECEIVED: Final = {op: (ROWS[op].gives[0], _GATHERS.get(ROWS[op].gives[0])) for op in RECEIVES}
_DONE: Final = Done()


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


class Shared(Processes):
    """Processes of one machine that write into each other's memory.  Its progress model is `edge`.

    Every message of a step has a slot of its own, so a send waits for nothing but the receiver's
    end of the step before, which depends on nothing that is sent in this one.  Collectives go
    over Gloo.

    Raises ModelError for a program that shares slots, for processes that cannot share memory, and
    as Processes.

    >>> import schedir
    >>> from torch import distributed
    >>> from schedir.runtime import Gloo, Shared
    >>> from schedir.transports.shared import can_share
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> program = schedir.compile(schedir.schedules.gpipe, schedir.Plan(ranks=1, microbatches=4))
    >>> transport = Shared(program) if can_share() else Gloo(program)
    >>> transport.model
    'edge'
    >>> distributed.destroy_process_group()
    """

    model: Model = "edge"

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
    ) -> None:
        super().__init__(program, timeout, device=device, group=group)
        if program.shares_slots:
            raise ModelError(
                "messages have a slot each in shared memory, and the program shares slots",
                program=program.name,
                hint='transport = "gloo"',
            )
        if not can_share(group):
            raise ModelError(
                "memory is shared by processes of one machine, a Linux on x86-64 as yet",
                program=program.name,
                hint='transport = "gloo"',
            )
        self.program = program
        self.seconds = default_pg_timeout.total_seconds() if timeout is None else timeout
        self.ended = 0  # steps of this rank
        self.memory: _Memory | None = None  # where it receives
        self.close: Callable[[], object] = lambda: None
        self.outgoing: dict[tuple[Lane, int], _Outgoing] = {}
        self.incoming: dict[tuple[Lane, int], _Incoming] = {}

    def buffers(self, rooms: Rooms, device: torch.device) -> dict[Place, Tensor]:
        """As Transport.buffers, where the neighbours see them; all processes must call this.

        Raises ModelError if the machine has no room.
        """
        self.ended = 0  # in this memory
        ranks, name, problem = self.program.plan.ranks, "", ""
        size = _Memory.size(ranks, rooms)
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
            everyone: list[tuple[str, str, Rooms]] = gather(own, self.within, [Token])
            told = dict(zip(members, everyone, strict=True))
            for process, (_, why, _) in told.items():
                if why:
                    raise ModelError(
                        f"process {process} cannot share what it receives: {why}",
                        program=self.name,
                        hint='transport = "gloo"',
                    )
            peers = [told[int(p)] for p in self.mesh[self.dp_rank, :, self.tp_rank]]
            self.memory = _Memory(memory, ranks, rooms)
            try:
                self._meet(listener, memory, [n for n, *_ in peers], [r for *_, r in peers])
            except OSError as error:
                raise ModelError(
                    f"rank {self.rank} does not reach a neighbour: {error}",
                    program=self.name,
                    hint='transport = "gloo"',
                ) from error
        return self.memory.slots

    def _meet(
        self, listener: socket.socket, memory: int, names: list[str], rooms: list[Rooms]
    ) -> None:
        """Connect to the ranks with which this one exchanges messages, and map their memory."""
        own, ranks = self.memory, self.program.plan.ranks
        assert own is not None
        edges = directed_edges(self.program)
        sources = [(lane, source) for lane, source, target in edges if target == self.rank]
        targets = [(lane, target) for lane, source, target in edges if source == self.rank]
        neighbours = {rank for _, rank in (*sources, *targets)}
        connections = connect(listener, names, self.rank, neighbours, self.seconds)
        for connection in connections.values():
            socket.send_fds(connection, [b"\1"], [memory])
        for lane, rank in sources:
            at = own.count(rank, lane)
            self.incoming[lane, rank] = _Incoming(rank, own, at, connections[rank])
        index = Index.of(self.program)
        theirs_of = {rank: passed(connections[rank], rank) for rank in sorted(neighbours)}
        for rank in {rank for _, rank in targets}:
            theirs = _Memory(theirs_of[rank], ranks, rooms[rank])
            for lane, messages in _inbox(index, rank, self.rank).items():
                parts = [
                    own_part(self, theirs.slots[place]) if cut else theirs.slots[place]
                    for place, cut in messages
                ]
                at = theirs.count(self.rank, lane)
                self.outgoing[lane, rank] = _Outgoing(rank, theirs, at, connections[rank], parts)
        for descriptor in theirs_of.values():
            os.close(descriptor)
        self.close = weakref.finalize(self, close, [*connections.values()])

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
        return _Arrival(way, way.asked)

    def leave(self) -> None:
        """As Processes.leave."""
        self.close()

    def step_ended(self) -> None:
        """As Transport.step_ended: the neighbours may write again."""
        self.ended += 1
        if self.memory is not None:
            self.memory.head[0] = self.ended


class _Memory:
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


class _Outgoing:
    """The messages of one lane to one rank, which go into `rooms` in the order of a step.

    What these are of, bytes at first, the messages of the first step say.
    """

    def __init__(
        self, rank: int, memory: _Memory, at: int, connection: socket.socket, rooms: list[Tensor]
    ) -> None:
        self.rank, self.head, self.at = rank, memory.head, at
        self.connection, self.rooms = connection, rooms
        self.parts: list[Tensor] = []
        self.sent = 0

    def send(self, tensor: Tensor, steps: int) -> None:
        """Write it, count it, and wake the receiver.  `steps` came before this one."""
        if self.sent < len(self.rooms):
            self.parts.append(self.rooms[self.sent].view(tensor.dtype).view(tensor.shape))
        self.parts[self.sent % len(self.rooms)].copy_(tensor)
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


class _Incoming:
    """The messages of one lane from one rank."""

    def __init__(self, rank: int, memory: _Memory, at: int, connection: socket.socket) -> None:
        self.rank, self.head, self.at, self.connection = rank, memory.head, at, connection
        self.asked = 0

    def wait(self, number: int) -> None:
        """Return when so many have come."""
        while self.head[self.at] < number:
            if not _take(self.connection, self.rank):
                raise PeerLate(f"nothing has come from rank {self.rank} in time")


class _Arrival(NamedTuple):
    """Work that ends when a message is there."""

    way: _Incoming
    number: int

    def wait(self) -> None:
        self.way.wait(self.number)


def _take(connection: socket.socket, rank: int, flags: int = 0) -> bool:
    """Take the bytes that woke this rank, or sleep until one comes; whether one came in time."""
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


def _inbox(index: Index, rank: int, sender: int) -> dict[Lane, list[tuple[Place, bool]]]:
    """What a rank receives of another in a step, by lane: its slot, and whether a part alone."""
    program = index.program
    stream, assigned = program.streams[rank], assign(program, rank)
    found: dict[Lane, list[tuple[Place, bool]]] = defaultdict(list)
    there = {tuple(i) for i in stream}
    for i in stream:
        if i.op in RECEIVED and program.peer(i) == sender:
            (op, stage, mb), (kind, gather) = i, RECEIVED[i.op]
            (number,) = assigned[kind, stage, mb].values()
            place = kind, number
            found[ROWS[op].lane].append((place, (gather, stage, mb) in there))
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
