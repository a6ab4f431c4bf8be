"""Record when each instruction of a rank begins and ends.

On a CPU the host reads its clock.  On a GPU the host issues an instruction long before it runs,
so events are recorded on streams, and read when the step is over:

- what computes begins when its stream has passed all that it waits for, and not before the host
  has issued it; it ends when its stream has done it;
- a message or a reduction begins, on a rank, when its stream comes to where it is issued and its
  queue is free, and ends when it has ended on its own lane, whenever the compute stream looks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.errors import ModelError
from schedir.ir.isa.instructions import RECEIVES, SENDS, Lane
from schedir.ir.program import Program
from schedir.transports.collectives import Group, Kind
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work

Floats = NDArray[np.float64]

ROUNDS: Final = 16
TICK: Final = 0.5e-6  # s, of an event's clock: CUDA Runtime API, cudaEventElapsedTime


class InstructionTimes(NamedTuple):
    """Seconds of this process's clock at which each instruction of a rank began and ended."""

    began: Floats
    ended: Floats


class Timestamps(ABC):
    """When the instructions of one rank begin and end.

    `at` is the index in the Stream of the instruction that runs, if it is recorded.  `whole` says
    that all of a step was.
    """

    def __init__(self) -> None:
        self.at: int | None = None
        self.whole = False
        self.elsewhere: set[int] = set()  # what ends where its lane says, and not with the call

    @abstractmethod
    def begins(self, k: int) -> None:
        """Note that an instruction has what it waits for."""

    @abstractmethod
    def ends(self, k: int) -> None:
        """Note that an instruction has run.  What it has started may end later: see `follow`."""

    @abstractmethod
    def follow(self, work: Work) -> Work:
        """Note when what the instruction starts ends; returns what to wait for instead."""

    @contextmanager
    def as_of(self, k: int) -> Iterator[None]:
        """Within this, what is started counts as instruction k's, at whose turn it may be over."""
        at, self.at = self.at, None if self.at is None else k
        try:
            yield
        finally:
            self.at = at

    @abstractmethod
    def issued(self) -> None:
        """What is followed has been issued: of a group, all at once."""

    def on_lane(self) -> LaneTimestamps | None:
        """Who is told, on a lane of the rank's own, when what the instruction has there begins and
        ends; None if it is not recorded."""
        return None if self.at is None else LaneTimestamps(self, self.at)

    @abstractmethod
    def note(self, k: int, ends: bool) -> None:
        """Note that what an instruction has on a lane of the rank's own begins, or ends."""

    def close(self) -> None:
        """End a step."""
        self.whole = True


class LaneTimestamps:
    """The stamps of one instruction, for the thread or the stream that runs it."""

    def __init__(self, stamps: Timestamps, k: int) -> None:
        stamps.elsewhere.add(k)
        self.stamps, self.k = stamps, k

    def begins(self) -> None:
        """Note that it begins, here and now."""
        self.stamps.note(self.k, ends=False)

    def ends(self) -> None:
        """Note that it ends."""
        self.stamps.note(self.k, ends=True)


class HostTimestamps(Timestamps):
    """By the host's clock."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.began, self.ended = [0.0] * count, [0.0] * count

    def note(self, k: int, ends: bool) -> None:
        """As Stamps.note."""
        (self.ended if ends else self.began)[k] = perf_counter()

    def begins(self, k: int) -> None:
        """As Stamps.begins."""
        self.at = k
        self.began[k] = perf_counter()

    def ends(self, k: int) -> None:
        """As Stamps.ends."""
        self.at = None
        if k not in self.elsewhere:
            self.ended[k] = perf_counter()

    def follow(self, work: Work) -> Work:
        """As Stamps.follow."""
        k = self.at
        return (
            work if k is None or isinstance(work, CompletedWork) else _ObservedWork(self, k, work)
        )

    def issued(self) -> None:
        """Nothing: who waits will see."""


class _ObservedWork:
    """Work whose end is when somebody who waited saw it: on a CPU nobody else can tell."""

    def __init__(self, stamps: HostTimestamps, k: int, work: Work) -> None:
        self.stamps, self.k, self.work = stamps, k, work

    def wait(self) -> None:
        self.work.wait()
        # Not `ends`: whoever waits may be an instruction that is recorded, too, and goes on.
        self.stamps.ended[self.k] = perf_counter()


@runtime_checkable
class TransportTimestamps(Protocol):
    """Work on a lane that is the transport's own: it can record there, too."""

    def mark(self, event: torch.cuda.Event) -> None:
        """Record an event where the work ends, now or when it is issued."""


class EventTimestamps(Timestamps):
    """The same by events on the streams of a GPU, which nobody waits for inside a step.

    All events are made here.

    A message that cannot be `mark`ed, as NCCL's, is awaited by a stream that does nothing else, one
    for each queue in which the rank receives, and recorded there.  That costs the host some
    microseconds a message, and the GPU a wait and an event beside the lane.
    """

    def __init__(
        self, program: Program, rank: int, progress_model: ProgressModel, device: torch.device
    ) -> None:
        super().__init__()
        self.device, stream = device, torch.cuda.current_stream(device)
        self.began, self.ended = (
            [torch.cuda.Event(enable_timing=True) for _ in program.streams[rank]] for _ in range(2)
        )
        self.joined = torch.cuda.Event()
        for event in (*self.began, *self.ended, self.joined):
            event.record(stream)  # made at first use
        own = program.streams[rank]
        queue = Graph.of(program, progress_model).queue[
            slice(*program.offsets[rank : rank + 2].tolist())
        ]
        self.queue, self.group = queue.tolist(), np.cumsum(~own.joined).tolist()
        # What may end later than it is issued, on whatever lane; of sends their receivers know it.
        self.late = np.flatnonzero(~np.isin(own.op, SENDS)).tolist()
        queues = sorted({self.queue[k] for k in np.flatnonzero(np.isin(own.op, RECEIVES)).tolist()})
        self.beside = {q: torch.cuda.Stream(device) for q in queues}
        self.followed: list[tuple[int, Work]] = []  # not issued yet
        self.waiting: set[int] = set()  # queues whose stream of `beside` is in use

    def note(self, k: int, ends: bool) -> None:
        """As Stamps.note, on the current stream."""
        (self.ended if ends else self.began)[k].record()

    def begins(self, k: int) -> None:
        """As Stamps.begins, on the current stream."""
        self.at = k
        self.began[k].record()

    def ends(self, k: int) -> None:
        """As Stamps.ends, on the current stream."""
        self.at = None
        if k not in self.elsewhere:
            self.ended[k].record()

    def follow(self, work: Work) -> Work:
        """As Stamps.follow, on the work's own lane or beside it."""
        if self.at is not None and isinstance(work, CompletedWork):  # where the current stream is
            self.elsewhere.discard(self.at)
        elif self.at is not None:
            self.elsewhere.add(self.at)
            self.followed.append((self.at, work))
        return work

    def issued(self) -> None:
        """As Stamps.issued: from here on the end of what is followed can be recorded."""
        for k, work in self.followed:
            if isinstance(work, TransportTimestamps):
                work.mark(self.ended[k])
            else:
                self.waiting.add(self.queue[k])
                with torch.cuda.stream(self.beside[self.queue[k]]):
                    work.wait()
                    self.ended[k].record()
        self.followed.clear()

    def close(self) -> None:
        """End a step: the current stream waits for the streams beside it."""
        for queue in self.waiting:
            self.joined.record(self.beside[queue])
            torch.cuda.current_stream().wait_event(self.joined)
        self.waiting.clear()
        super().close()

    def read(self, anchor: torch.cuda.Event, at: float) -> InstructionTimes:
        """Times of the last step, by those of an event that came after it."""
        began, ended = (
            at - np.array([event.elapsed_time(anchor) for event in events]) / 1e3
            for events in (self.began, self.ended)
        )
        # What is in a queue is not under way before that is free; a group is so together.
        free: dict[int, float] = {}
        before: dict[int, tuple[int, float]] = {}  # the last group, and when all of it has ended
        for k in self.late:
            queue, group, last = self.queue[k], *before.get(self.queue[k], (0, -np.inf))
            if group != self.group[k]:
                free[queue] = last
            began[k] = max(began[k], free[queue])
            ended[k] = max(began[k], ended[k])  # what was started for it early may be over
            before[queue] = self.group[k], max(last, float(ended[k]))
        return InstructionTimes(began, ended)


def stamps_of(
    program: Program, rank: int, progress_model: ProgressModel, device: torch.device
) -> Timestamps:
    """The stamps of a rank whose stages are on a device."""
    if device.type == "cuda":
        return EventTimestamps(program, rank, progress_model, device)
    return HostTimestamps(len(program.streams[rank]))


class RecordedTransport(TransportWrapper):
    """A transport whose messages and collectives are followed to their end."""

    def __init__(self, inner: Transport, stamps: Timestamps) -> None:
        super().__init__(inner)
        self.stamps, self.send = stamps, inner.send
        self.open = False  # within a group

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        return self._follow(self.inner.recv(tensor, peer, lane))

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """As Transport.collective."""
        return self._follow(self.inner.collective(kind, group, out, own))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """As Transport.aside: an instruction that goes there begins there."""
        with self.inner.aside():
            if self.stamps.at is not None:
                self.stamps.begins(self.stamps.at)
            yield

    def _follow(self, work: Work) -> Work:
        work = self.stamps.follow(work)
        if not self.open:
            self.stamps.issued()
        return work

    def start_group(self) -> None:
        """As Transport.start_group."""
        self.inner.start_group()
        self.open = True

    def end_group(self) -> None:
        """As Transport.end_group."""
        self.inner.end_group()
        self.open = False
        self.stamps.issued()


def read(ranks: Sequence[Timestamps | None]) -> tuple[list[InstructionTimes], float]:
    """What ranks of this process have noted of their last step, and how wrong it may be.

    In seconds of `perf_counter`.  What is wrong is so for all of them alike: it does not come
    between ranks of one GPU, and by the host's clock there is nothing.  On a GPU this waits for
    all that runs there.

    Raises ModelError for a rank that has recorded no step.
    """
    error, found, anchor = 0.0, [], None
    for stamps in ranks:
        if stamps is None or not stamps.whole:
            raise ModelError("no step has been recorded", hint="record=True, and a step")
        if isinstance(stamps, EventTimestamps):
            anchor = anchor or _anchor(stamps.device)
            event, at, error = anchor
            found.append(stamps.read(event, at))
        elif isinstance(stamps, HostTimestamps):
            found.append(InstructionTimes(np.array(stamps.began), np.array(stamps.ended)))
    return found, error


def _anchor(device: torch.device) -> tuple[torch.cuda.Event, float, float]:
    """An event, when it was by the host's clock, and how wrong that may be.

    The GPU has nothing else to do, and passes it somewhere between when the host issues it and
    when the host sees that it is over.  Of some rounds the shortest says most.
    """
    best = None
    torch.cuda.synchronize(device)
    for _ in range(ROUNDS):
        event = torch.cuda.Event(enable_timing=True)
        issued = perf_counter()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        seen = perf_counter()
        error = (seen - issued) / 2 + TICK
        if best is None or error < best[2]:
            best = event, (issued + seen) / 2, error
    assert best is not None
    return best
