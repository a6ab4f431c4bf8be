"""Neighbours: connections between processes of one machine, by which they pass memory.

Their names are in no folder: whatever ends a process, nothing is left of them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack

from schedir.transports.transport import PeerLate, PeerLeft


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
