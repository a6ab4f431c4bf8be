"""Ways: memory that processes share, and how messages go into it, are counted and awaited."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Sequence
from itertools import chain
from time import monotonic, sleep
from typing import Final, NamedTuple

import torch
from torch import Tensor

from schedir.ir.ops import Lane
from schedir.transports.transport import PeerLate, PeerLeft, Place, Rooms

LINE: Final = 64  # bytes of a cache line, on which slots begin


class Memory:
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


class Outgoing:
    """The messages of one lane to one rank, which go into slots in the order of a step: for each
    program its own, with whether a part alone goes there.

    Where in these, the messages of the first step of a program say, as `room` has it.
    """

    def __init__(
        self,
        rank: int,
        memory: Memory,
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


class Incoming:
    """The messages of one lane from one rank."""

    def __init__(self, rank: int, memory: Memory, at: int, connection: socket.socket) -> None:
        self.rank, self.head, self.at, self.connection = rank, memory.head, at, connection
        self.asked = 0

    def wait(self, number: int) -> None:
        """Return when so many have come."""
        while self.head[self.at] < number:
            if not _take(self.connection, self.rank):
                raise PeerLate(f"nothing has come from rank {self.rank} in time")


class Arrival(NamedTuple):
    """Work that ends when a message is there."""

    way: Incoming
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
