"""Neighbours: connections between processes of one machine, by which they pass memory.

Their names are in no folder: whatever ends a process, nothing is left of them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable

from schedir.transports.transport import PeerLeft


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
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise PeerLeft(f"rank {rank} has left")
    return descriptors[0]


def connect(
    listener: socket.socket, names: list[str], own: int, neighbours: Iterable[int], seconds: float
) -> dict[int, socket.socket]:
    """A connection to each neighbour: all listen, and the lower rank calls."""
    connections = {}
    listener.settimeout(seconds)
    for rank in neighbours:
        if rank > own:
            connections[rank] = socket.socket(socket.AF_UNIX)
            connections[rank].connect(names[rank])
            if not _is_ours(connections[rank]):
                raise OSError("its socket is somebody else's")
            connections[rank].sendall(struct.pack("q", own))
    waiting = {rank for rank in neighbours if rank < own}
    while waiting:
        caller, _ = listener.accept()
        if not _is_ours(caller):
            caller.close()
            continue
        rank = struct.unpack("q", caller.recv(8, socket.MSG_WAITALL))[0]
        connections[rank] = caller
        waiting.remove(rank)
    # By the kernel: Python's own timeout would ask it twice for each message.
    patience = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for connection in connections.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    return connections


def close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
