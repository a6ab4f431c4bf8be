"""Shared: the transport of processes on one machine, through memory that they share.

What a rank receives lives in memory that its neighbours see: a send is one copy into the slot
from which the receiver computes, a count, and a byte on a socket for a receiver that sleeps.  No
thread stands between the two, as Gloo's do, which compete with the ranks where every core computes.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

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
from schedir.transports.transport import Done, Place, Rooms, Work, own_part
from schedir.transports.ways import Arrival, Incoming, Memory, Outgoing

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
        self.memory: Memory | None = None  # where it receives
        self.close: Callable[[], object] = lambda: None
        self.outgoing: dict[tuple[Lane, int], Outgoing] = {}
        self.incoming: dict[tuple[Lane, int], Incoming] = {}

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
        size = Memory.size(ranks, rooms)
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
            self.memory = Memory(memory, ranks, rooms)
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
            self.incoming[lane, rank] = Incoming(rank, own, at, connections[rank])
        indexes = [*map(Index.of, programs)]
        theirs_of = {rank: passed(connections[rank], rank) for rank in sorted(neighbours)}
        for rank in {rank for _, rank in targets}:
            theirs = Memory(theirs_of[rank], ranks, rooms[rank])
            inboxes = [_inbox(index, rank, self.rank) for index in indexes]
            for lane in [lane for lane, target in targets if target == rank]:
                steps = [
                    [(theirs.slots[place], cut) for place, cut in inbox[lane]] for inbox in inboxes
                ]
                at = theirs.count(self.rank, lane)
                way = Outgoing(rank, theirs, at, connections[rank], steps, self._room)
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
        return Arrival(way, way.asked)

    def leave(self) -> None:
        """As Processes.leave."""
        self.close()

    def step_ended(self) -> None:
        """As Transport.step_ended: the neighbours may write again."""
        self.ended += 1
        if self.memory is not None:
            self.memory.head[0] = self.ended


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
