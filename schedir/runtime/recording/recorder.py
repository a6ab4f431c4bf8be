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
from schedir.ir.isa.instructions import RECV_OPS, SEND_OPS, Lane
from schedir.ir.program import Program
from schedir.transports.collectives import CollectiveName, GroupKey
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work

FloatArray = NDArray[np.float64]

ANCHOR_ROUNDS: Final = 16
EVENT_RESOLUTION: Final = 0.5e-6  # s, of an event's clock: CUDA Runtime API, cudaEventElapsedTime


class InstructionTimes(NamedTuple):
    """Seconds of this process's clock at which each instruction of a rank began and ended."""

    start: FloatArray
    end: FloatArray


class Timestamps(ABC):
    """When the instructions of one rank begin and end.

    `current_index` is the index in the Stream of the instruction that runs, if it is recorded.
    `is_complete` says that all of a step was.
    """

    def __init__(self) -> None:
        self.current_index: int | None = None
        self.is_complete = False
        self.ends_on_lane: set[int] = set()  # what ends where its lane says, and not with the call

    @abstractmethod
    def begin_instruction(self, k: int) -> None:
        """Note that an instruction has what it waits for."""

    @abstractmethod
    def end_instruction(self, k: int) -> None:
        """Note that an instruction has run.  What it has started may end later: see
        `follow_work`."""

    @abstractmethod
    def follow_work(self, work: Work) -> Work:
        """Note when what the instruction starts ends; returns what to wait for instead."""

    @contextmanager
    def attribute_to(self, k: int) -> Iterator[None]:
        """Within this, what is started counts as instruction k's, at whose turn it may be over."""
        at, self.current_index = self.current_index, None if self.current_index is None else k
        try:
            yield
        finally:
            self.current_index = at

    @abstractmethod
    def on_issued(self) -> None:
        """What is followed has been issued: of a group, all at once."""

    def make_lane_observer(self) -> LaneTimestamps | None:
        """Who is told, on a lane of the rank's own, when what the instruction has there begins and
        ends; None if it is not recorded."""
        return None if self.current_index is None else LaneTimestamps(self, self.current_index)

    @abstractmethod
    def note_on_lane(self, k: int, is_end: bool) -> None:
        """Note that what an instruction has on a lane of the rank's own begins, or ends."""

    def end_step(self) -> None:
        """End a step."""
        self.is_complete = True


class LaneTimestamps:
    """The stamps of one instruction, for the thread or the stream that runs it."""

    def __init__(self, timestamps: Timestamps, k: int) -> None:
        timestamps.ends_on_lane.add(k)
        self.timestamps, self.k = timestamps, k

    def on_begin(self) -> None:
        """Note that it begins, here and now."""
        self.timestamps.note_on_lane(self.k, is_end=False)

    def on_end(self) -> None:
        """Note that it ends."""
        self.timestamps.note_on_lane(self.k, is_end=True)


class HostTimestamps(Timestamps):
    """By the host's clock."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.start_times, self.end_times = [0.0] * count, [0.0] * count

    def note_on_lane(self, k: int, is_end: bool) -> None:
        """As Stamps.note."""
        (self.end_times if is_end else self.start_times)[k] = perf_counter()

    def begin_instruction(self, k: int) -> None:
        """As Stamps.begins."""
        self.current_index = k
        self.start_times[k] = perf_counter()

    def end_instruction(self, k: int) -> None:
        """As Stamps.ends."""
        self.current_index = None
        if k not in self.ends_on_lane:
            self.end_times[k] = perf_counter()

    def follow_work(self, work: Work) -> Work:
        """As Stamps.follow."""
        k = self.current_index
        return (
            work if k is None or isinstance(work, CompletedWork) else _ObservedWork(self, k, work)
        )

    def on_issued(self) -> None:
        """Nothing: who waits will see."""


class _ObservedWork:
    """Work whose end is when somebody who waited saw it: on a CPU nobody else can tell."""

    def __init__(self, timestamps: HostTimestamps, k: int, work: Work) -> None:
        self.timestamps, self.k, self.work = timestamps, k, work

    def wait(self) -> None:
        self.work.wait()
        # Not `ends`: whoever waits may be an instruction that is recorded, too, and goes on.
        self.timestamps.end_times[self.k] = perf_counter()


@runtime_checkable
class TransportTimestamps(Protocol):
    """Work on a lane that is the transport's own: it can record there, too."""

    def record_end(self, event: torch.cuda.Event) -> None:
        """Record an event where the work ends, now or when it is issued."""


class EventTimestamps(Timestamps):
    """The same by events on the streams of a GPU, which nobody waits for inside a step.

    All events are made here.

    A message that cannot be `record_end`ed, as NCCL's, is awaited by a stream that does nothing
    else, one for each queue in which the rank receives, and recorded there.  That costs the host
    some microseconds a message, and the GPU a wait and an event beside the lane.
    """

    def __init__(
        self, program: Program, rank: int, progress_model: ProgressModel, device: torch.device
    ) -> None:
        super().__init__()
        self.device, stream = device, torch.cuda.current_stream(device)
        self.start_events, self.end_events = (
            [torch.cuda.Event(enable_timing=True) for _ in program.streams[rank]] for _ in range(2)
        )
        self.join_event = torch.cuda.Event()
        for event in (*self.start_events, *self.end_events, self.join_event):
            event.record(stream)  # made at first use
        own = program.streams[rank]
        queue = Graph.from_program(program, progress_model).queue[
            slice(*program.offsets[rank : rank + 2].tolist())
        ]
        self.queue_by_instruction, self.group_by_instruction = (
            queue.tolist(),
            np.cumsum(~own.joined).tolist(),
        )
        # What may end later than it is issued, on whatever lane; of sends their receivers know it.
        self.lane_instructions = np.flatnonzero(~np.isin(own.op, SEND_OPS)).tolist()
        queues = sorted(
            {
                self.queue_by_instruction[k]
                for k in np.flatnonzero(np.isin(own.op, RECV_OPS)).tolist()
            }
        )
        self.side_streams = {q: torch.cuda.Stream(device) for q in queues}
        self.pending_works: list[tuple[int, Work]] = []  # not issued yet
        self.active_queues: set[int] = set()  # queues whose stream of `side_streams` is in use

    def note_on_lane(self, k: int, is_end: bool) -> None:
        """As Stamps.note, on the current stream."""
        (self.end_events if is_end else self.start_events)[k].record()

    def begin_instruction(self, k: int) -> None:
        """As Stamps.begins, on the current stream."""
        self.current_index = k
        self.start_events[k].record()

    def end_instruction(self, k: int) -> None:
        """As Stamps.ends, on the current stream."""
        self.current_index = None
        if k not in self.ends_on_lane:
            self.end_events[k].record()

    def follow_work(self, work: Work) -> Work:
        """As Stamps.follow, on the work's own lane or beside it."""
        if self.current_index is not None and isinstance(
            work, CompletedWork
        ):  # where the current stream is
            self.ends_on_lane.discard(self.current_index)
        elif self.current_index is not None:
            self.ends_on_lane.add(self.current_index)
            self.pending_works.append((self.current_index, work))
        return work

    def on_issued(self) -> None:
        """As Stamps.issued: from here on the end of what is followed can be recorded."""
        for k, work in self.pending_works:
            if isinstance(work, TransportTimestamps):
                work.record_end(self.end_events[k])
            else:
                self.active_queues.add(self.queue_by_instruction[k])
                with torch.cuda.stream(self.side_streams[self.queue_by_instruction[k]]):
                    work.wait()
                    self.end_events[k].record()
        self.pending_works.clear()

    def end_step(self) -> None:
        """End a step: the current stream waits for the streams beside it."""
        for queue in self.active_queues:
            self.join_event.record(self.side_streams[queue])
            torch.cuda.current_stream().wait_event(self.join_event)
        self.active_queues.clear()
        super().end_step()

    def read(self, anchor: torch.cuda.Event, anchor_time: float) -> InstructionTimes:
        """Times of the last step, by those of an event that came after it."""
        began, ended = (
            anchor_time - np.array([event.elapsed_time(anchor) for event in events]) / 1e3
            for events in (self.start_events, self.end_events)
        )
        # What is in a queue is not under way before that is free; a group is so together.
        free: dict[int, float] = {}
        before: dict[int, tuple[int, float]] = {}  # the last group, and when all of it has ended
        for k in self.lane_instructions:
            queue, group, last = (
                self.queue_by_instruction[k],
                *before.get(self.queue_by_instruction[k], (0, -np.inf)),
            )
            if group != self.group_by_instruction[k]:
                free[queue] = last
            began[k] = max(began[k], free[queue])
            ended[k] = max(began[k], ended[k])  # what was started for it early may be over
            before[queue] = self.group_by_instruction[k], max(last, float(ended[k]))
        return InstructionTimes(began, ended)


def make_timestamps(
    program: Program, rank: int, progress_model: ProgressModel, device: torch.device
) -> Timestamps:
    """The stamps of a rank whose stages are on a device."""
    if device.type == "cuda":
        return EventTimestamps(program, rank, progress_model, device)
    return HostTimestamps(len(program.streams[rank]))


class RecordedTransport(TransportWrapper):
    """A transport whose messages and collectives are followed to their end."""

    def __init__(self, inner: Transport, timestamps: Timestamps) -> None:
        super().__init__(inner)
        self.timestamps, self.send = timestamps, inner.send
        self.is_in_group = False  # within a group

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """As Transport.recv."""
        return self._follow(self.inner.recv(tensor, peer, lane))

    def start_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """As Transport.collective."""
        return self._follow(self.inner.start_collective(kind, group, output_tensor, input_tensor))

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """As Transport.aside: an instruction that goes there begins there."""
        with self.inner.side_stream():
            if self.timestamps.current_index is not None:
                self.timestamps.begin_instruction(self.timestamps.current_index)
            yield

    def _follow(self, work: Work) -> Work:
        work = self.timestamps.follow_work(work)
        if not self.is_in_group:
            self.timestamps.on_issued()
        return work

    def start_group(self) -> None:
        """As Transport.start_group."""
        self.inner.start_group()
        self.is_in_group = True

    def end_group(self) -> None:
        """As Transport.end_group."""
        self.inner.end_group()
        self.is_in_group = False
        self.timestamps.on_issued()


def read_step_times(
    timestamps: Sequence[Timestamps | None],
) -> tuple[list[InstructionTimes], float]:
    """What ranks of this process have noted of their last step, and how wrong it may be.

    In seconds of `perf_counter`.  What is wrong is so for all of them alike: it does not come
    between ranks of one GPU, and by the host's clock there is nothing.  On a GPU this waits for
    all that runs there.

    Raises ModelError for a rank that has recorded no step.
    """
    error, found, anchor = 0.0, [], None
    for stamps in timestamps:
        if stamps is None or not stamps.is_complete:
            raise ModelError("no step has been recorded", hint="record_timestamps=True, and a step")
        if isinstance(stamps, EventTimestamps):
            anchor = anchor or _record_anchor(stamps.device)
            event, at, error = anchor
            found.append(stamps.read(event, at))
        elif isinstance(stamps, HostTimestamps):
            found.append(InstructionTimes(np.array(stamps.start_times), np.array(stamps.end_times)))
    return found, error


def _record_anchor(device: torch.device) -> tuple[torch.cuda.Event, float, float]:
    """An event, when it was by the host's clock, and how wrong that may be.

    The GPU has nothing else to do, and passes it somewhere between when the host issues it and
    when the host sees that it is over.  Of some rounds the shortest says most.
    """
    best = None
    torch.cuda.synchronize(device)
    for _ in range(ANCHOR_ROUNDS):
        event = torch.cuda.Event(enable_timing=True)
        issued = perf_counter()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        seen = perf_counter()
        error = (seen - issued) / 2 + EVENT_RESOLUTION
        if best is None or error < best[2]:
            best = event, (issued + seen) / 2, error
    assert best is not None
    return best
