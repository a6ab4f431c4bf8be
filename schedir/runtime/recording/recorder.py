"""Record when each instruction of a rank begins and ends.

On a CPU the host reads its clock. On a GPU the host issues an instruction long before it runs. So
the host records CUDA events on the streams, and reads them after the step:

- A compute instruction begins when the host has issued it and its inputs are ready. It ends when
  the compute stream has finished it.
- A message or a reduction begins when the issuing stream has reached it and its queue is free. It
  ends when its lane has finished it. The compute stream may wait for it later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from schedir.runtime.offload.copy_lanes import LaneObserver
from schedir.runtime.program_state import WorkObserver
from schedir.transports.collectives import Collective, GroupKey
from schedir.transports.transport import CompletedWork, Transport, TransportWrapper, Work

FloatArray = NDArray[np.float64]

# The number of measurements of the GPU's clock offset. The shortest measurement is used.
ANCHOR_ROUNDS: Final = 16
# The resolution of events in seconds (CUDA Runtime API, cudaEventElapsedTime).
EVENT_RESOLUTION: Final = 0.5e-6


class InstructionTimes(NamedTuple):
    """The times of the instructions of a rank, in seconds of this process's `perf_counter`.

    Args:
        start: The start of each instruction, in the order of the stream.
        end: The end of each instruction, in the order of the stream.
    """

    start: FloatArray
    end: FloatArray


class Timestamps(WorkObserver, ABC):
    """A recorder of the times at which the instructions of a rank begin and end.

    Attributes:
        current_index: The index in the stream of the instruction that is being recorded, or None.
        is_complete: True if a full step has been recorded.
        ends_on_lane: Indices of instructions whose end is recorded on their lane, not after the
            call.
    """

    def __init__(self) -> None:
        self.current_index: int | None = None
        self.is_complete: bool = False
        self.ends_on_lane: set[int] = set()

    @abstractmethod
    def record_now(self, k: int, is_end: bool) -> None:
        """Record the present time, or the time at which the current stream will be at this point.

        Args:
            k: The index of the instruction in the stream.
            is_end: True if the instruction ends, False if it begins.
        """

    def begin_instruction(self, k: int) -> None:
        """Record that an instruction begins, after it has waited for its inputs.

        Args:
            k: The index of the instruction in the stream.
        """
        self.current_index = k
        self.record_now(k, False)

    def end_instruction(self, k: int) -> None:
        """Record that the call of an instruction has returned.

        Work that the call started may end later, see `follow_work`.

        Args:
            k: The index of the instruction in the stream.
        """
        self.current_index = None
        if k not in self.ends_on_lane:
            self.record_now(k, True)

    @abstractmethod
    def follow_work(self, work: Work) -> Work:
        """Record the end of work that the current instruction has started.

        Args:
            work: The work.

        Returns:
            The work for which the caller must wait instead of `work`.
        """

    @contextmanager
    def attribute_to(self, k: int) -> Iterator[None]:
        """Return a context. Work that starts within the context belongs to instruction `k`.

        The work may end before instruction `k` begins.

        Args:
            k: The index of the instruction in the stream.
        """
        previous = self.current_index
        self.current_index = None if previous is None else k
        try:
            yield
        finally:
            self.current_index = previous

    @abstractmethod
    def on_issued(self) -> None:
        """Record the end of all pending work, which the host has now issued.

        The host issues the work of a group of transfers at the end of the group.
        """

    def make_lane_observer(self) -> LaneObserver | None:
        """Return an observer of the current instruction's work on a lane of the rank.

        Returns:
            The observer, or None if the current instruction is not recorded.
        """
        if self.current_index is None:
            return None
        self.ends_on_lane.add(self.current_index)
        return partial(self.record_now, self.current_index)

    def end_step(self) -> None:
        """End the recording of a step."""
        self.is_complete = True


class HostTimestamps(Timestamps):
    """A recorder that reads the clock of the host.

    Args:
        count: The number of instructions of the rank.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.start_times = [0.0] * count
        self.end_times = [0.0] * count

    def record_now(self, k: int, is_end: bool) -> None:
        """See `Timestamps.record_now`."""
        (self.end_times if is_end else self.start_times)[k] = perf_counter()

    def follow_work(self, work: Work) -> Work:
        """See `Timestamps.follow_work`."""
        k = self.current_index
        return (
            work if k is None or isinstance(work, CompletedWork) else _ObservedWork(self, k, work)
        )

    def on_issued(self) -> None:
        """Do nothing: `_ObservedWork.wait` records the end of the work."""


class _ObservedWork:
    """Work that records its end when `wait` returns.

    The actual end may be earlier, but `Work` has no other method that detects it.
    """

    def __init__(self, timestamps: HostTimestamps, k: int, work: Work) -> None:
        self.timestamps = timestamps
        self.k = k
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        # Do not call `end_instruction`: it would end the current instruction, which waits for this
        # work.
        self.timestamps.end_times[self.k] = perf_counter()


@runtime_checkable
class TransportTimestamps(Protocol):
    """Work that can record an event on its lane of the transport."""

    def record_end(self, event: torch.cuda.Event) -> None:
        """Record an event at the end of the work, now or when it is issued.

        Args:
            event: The event to record.
        """


class EventTimestamps(Timestamps):
    """A recorder that records CUDA events on the streams of a GPU.

    The constructor creates all events. The host does not wait for events during a step.

    Some transports, such as NCCL, return work without `record_end`. Then a side stream waits for
    the work and records its end. There is one side stream for each queue in which the rank
    receives. For each message, a side stream costs some microseconds on the host, and a wait and an
    event on the GPU.

    Args:
        program: The program.
        rank: The pipeline rank.
        progress_model: The progress model of the transport, which defines the queues.
        device: The GPU.
    """

    def __init__(
        self, program: Program, rank: int, progress_model: ProgressModel, device: torch.device
    ) -> None:
        super().__init__()
        self.device, cuda_stream = device, torch.cuda.current_stream(device)
        self.start_events, self.end_events = (
            [torch.cuda.Event(enable_timing=True) for _ in program.streams[rank]] for _ in range(2)
        )
        self.join_event = torch.cuda.Event()
        for event in (*self.start_events, *self.end_events, self.join_event):
            event.record(cuda_stream)  # CUDA creates events at their first use
        stream = program.streams[rank]
        queue = Graph.from_program(program, progress_model).queue[
            slice(*program.offsets[rank : rank + 2].tolist())
        ]
        self.queue_by_instruction = queue.tolist()
        self.group_by_instruction = np.cumsum(~stream.joined).tolist()
        # Indices of all instructions except sends. Only receivers record the times of messages.
        self.lane_instructions = np.flatnonzero(~np.isin(stream.op, SEND_OPS)).tolist()
        queues = sorted(
            {
                self.queue_by_instruction[k]
                for k in np.flatnonzero(np.isin(stream.op, RECV_OPS)).tolist()
            }
        )
        self.side_streams = {q: torch.cuda.Stream(device) for q in queues}
        self.pending_works: list[tuple[int, Work]] = []  # works without a recorded end
        self.active_queues: set[int] = set()  # queues whose side stream this step has used

    def record_now(self, k: int, is_end: bool) -> None:
        """See `Timestamps.record_now`. The event is recorded on the current stream."""
        (self.end_events if is_end else self.start_events)[k].record()

    def follow_work(self, work: Work) -> Work:
        """See `Timestamps.follow_work`. `on_issued` records the end."""
        if self.current_index is not None and isinstance(work, CompletedWork):
            # The work ended on the current stream, so `end_instruction` records its end.
            self.ends_on_lane.discard(self.current_index)
        elif self.current_index is not None:
            self.ends_on_lane.add(self.current_index)
            self.pending_works.append((self.current_index, work))
        return work

    def on_issued(self) -> None:
        """Record the end of each pending work, on its lane or on a side stream."""
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
        """See `Timestamps.end_step`. The current stream waits for the side streams."""
        for queue in self.active_queues:
            self.join_event.record(self.side_streams[queue])
            torch.cuda.current_stream().wait_event(self.join_event)
        self.active_queues.clear()
        super().end_step()

    def read(self, anchor: torch.cuda.Event, anchor_time: float) -> InstructionTimes:
        """Return the times of the instructions of the last step.

        Args:
            anchor: An event that was recorded after the step.
            anchor_time: The time of the anchor, in seconds of `perf_counter`.
        """
        starts, ends = (
            anchor_time - np.array([event.elapsed_time(anchor) for event in events]) / 1e3
            for events in (self.start_events, self.end_events)
        )
        # Queue -> the time at which its previous group has ended. The transfers of a group run
        # concurrently, so all of them may start at this time.
        free_times: dict[int, float] = {}
        # Queue -> its last group, and the time when all members of the group have ended.
        last_groups: dict[int, tuple[int, float]] = {}
        for k in self.lane_instructions:
            queue = self.queue_by_instruction[k]
            group, last_end = last_groups.get(queue, (0, -np.inf))
            if group != self.group_by_instruction[k]:
                free_times[queue] = last_end
            starts[k] = max(starts[k], free_times[queue])
            # Work that started early may have ended before its instruction began.
            ends[k] = max(starts[k], ends[k])
            last_groups[queue] = self.group_by_instruction[k], max(last_end, float(ends[k]))
        return InstructionTimes(starts, ends)


def make_timestamps(
    program: Program, rank: int, progress_model: ProgressModel, device: torch.device
) -> Timestamps:
    """Create the recorder of a rank.

    Args:
        program: The program.
        rank: The pipeline rank.
        progress_model: The progress model of the transport.
        device: The device of the rank's stages.
    """
    if device.type == "cuda":
        return EventTimestamps(program, rank, progress_model, device)
    return HostTimestamps(len(program.streams[rank]))


class RecordedTransport(TransportWrapper):
    """A transport that records the ends of receives and collectives.

    Args:
        inner: The transport that moves the tensors.
        timestamps: The recorder of the rank.
    """

    def __init__(self, inner: Transport, timestamps: Timestamps) -> None:
        super().__init__(inner)
        self.timestamps = timestamps
        self.is_in_group = False  # True between `start_group` and `end_group`

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`."""
        return self._follow(self.inner.recv(tensor, peer, lane))

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """See `Transport.start_collective`."""
        return self._follow(self.inner.start_collective(kind, group, output_tensor, input_tensor))

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """See `Transport.side_stream`. The current instruction begins on this stream."""
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
        """See `Transport.start_group`."""
        self.inner.start_group()
        self.is_in_group = True

    def end_group(self) -> None:
        """See `Transport.end_group`."""
        self.inner.end_group()
        self.is_in_group = False
        self.timestamps.on_issued()


def read_step_times(
    timestamps: Sequence[Timestamps | None],
) -> tuple[list[InstructionTimes], float]:
    """Return the times that the ranks of this process recorded in the last step.

    On a GPU the function waits for all work on the device.

    Args:
        timestamps: The recorder of each rank, or None for a rank that does not record.

    Returns:
        The times of each rank in seconds of `perf_counter`, and their largest error in seconds. All
        ranks on a GPU have the same error. The error is 0 for the clock of the host.

    Raises:
        ModelError: A rank has recorded no step.
    """
    error, times, anchor = 0.0, [], None
    for stamps in timestamps:
        if stamps is None or not stamps.is_complete:
            raise ModelError(
                "no step has been recorded", hint="record_timestamps=True, then call step()"
            )
        if isinstance(stamps, EventTimestamps):
            anchor = anchor or _record_anchor(stamps.device)
            event, anchor_time, error = anchor
            times.append(stamps.read(event, anchor_time))
        elif isinstance(stamps, HostTimestamps):
            times.append(InstructionTimes(np.array(stamps.start_times), np.array(stamps.end_times)))
    return times, error


def _record_anchor(device: torch.device) -> tuple[torch.cuda.Event, float, float]:
    """Return an event, its time on the host's clock, and the error of that time, in seconds.

    The GPU is idle. So the GPU reaches the event between two times on the host's clock: when the
    host records the event, and when the host has waited for the event. The result is the middle of
    these two times, from the round in which they are closest.
    """
    best = None
    torch.cuda.synchronize(device)
    for _ in range(ANCHOR_ROUNDS):
        event = torch.cuda.Event(enable_timing=True)
        issue_time = perf_counter()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        sync_time = perf_counter()
        error = (sync_time - issue_time) / 2 + EVENT_RESOLUTION
        if best is None or error < best[2]:
            best = event, (issue_time + sync_time) / 2, error
    assert best is not None
    return best
