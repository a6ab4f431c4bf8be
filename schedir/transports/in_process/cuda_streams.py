"""Virtual ranks of one process on one GPU, each with its own CUDA streams.

The lanes of a virtual rank are streams, ordered by events as they would be between GPUs: what
overlaps here overlaps there.  The host never waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import (
    CollectiveMember,
    CollectiveName,
    GroupKey,
    PendingCollectives,
    run_collective,
)
from schedir.transports.transport import Work, allocate_buffers


class StreamPoint:
    """A point on a stream, perhaps not reached by the host yet; to wait is the current stream's."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event = torch.cuda.Event()
        self.stream: torch.cuda.Stream | None = None  # where it is, once the host has reached it
        self.mark_events: list[torch.cuda.Event] = []
        if stream is not None:
            self.record(stream)

    def record(self, stream: torch.cuda.Stream) -> None:
        for mark in self.mark_events:
            mark.record(stream)
        self.event.record(stream)
        self.stream = stream

    def record_end(self, event: torch.cuda.Event) -> None:
        """As Marks.mark, before anybody waits for the point: who does begins after the mark."""
        self.mark_events.append(event)
        if self.stream is not None:
            self.record(self.stream)

    def is_completed(self) -> bool:
        """Whether it is passed; nobody waits."""
        return self.stream is not None and self.event.query()

    def wait(self) -> None:
        # A wait for an event that was never recorded would be none.
        assert self.stream is not None, "the other side comes before anybody waits"
        torch.cuda.current_stream().wait_event(self.event)


class _MessageSide(NamedTuple):
    """One side of a message that came first: its tensor, from when on, and where it will end."""

    tensor: Tensor
    ready_point: StreamPoint
    end_point: StreamPoint
    lane_stream: torch.cuda.Stream


@dataclass(eq=False)
class _StreamPart(CollectiveMember):
    """A part in a collective, from when on its tensors may be used, and where the result ends."""

    ready_point: StreamPoint
    end_point: StreamPoint


class StreamHub:
    """Where virtual ranks meet: messages with one side there, and collectives half arrived."""

    def __init__(self) -> None:
        self.sent_messages: dict[tuple[Lane, int, int], deque[_MessageSide]] = defaultdict(deque)
        self.awaited_messages: dict[tuple[Lane, int, int], deque[_MessageSide]] = defaultdict(deque)
        self.lane_streams: dict[tuple[Lane, int, int], torch.cuda.Stream] = {}
        self.pending_collectives: PendingCollectives[_StreamPart] = PendingCollectives()
        self.payloads: list[Any] = []  # what is told of all ranks

    def get_lane_stream(self, lane: Lane, source: int, target: int) -> torch.cuda.Stream:
        """The queue of a directed edge."""
        key = lane, source, target
        if key not in self.lane_streams:
            self.lane_streams[key] = torch.cuda.Stream(priority=-1)
        return self.lane_streams[key]


class StreamMailbox:
    """The transport of a virtual rank on a GPU: a message is a copy on the lane of its edge."""

    tp, dp, tp_rank, dp_rank = 1, 1, 0, 0
    is_grouped, blocking_hosts, uses_static_buffers = False, False, False

    def __init__(
        self,
        hub: StreamHub,
        rank: int,
        group_members: dict[GroupKey, list[int]],
        progress_model: ProgressModel,
    ) -> None:
        self.hub, self.rank, self.group_members, self.progress_model = (
            hub,
            rank,
            group_members,
            progress_model,
        )
        self.compute_stream = torch.cuda.Stream()
        self.collective_stream = torch.cuda.Stream(priority=-1)

    allocate_buffers = staticmethod(allocate_buffers)

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: Sequence[type] = ()
    ) -> list[Any]:
        """All virtual ranks are told the same."""
        return self.hub.payloads

    def use_compute_stream(self) -> AbstractContextManager[object]:
        """Within this, what the rank computes goes to its own stream."""
        return torch.cuda.stream(self.compute_stream)

    def wait_for_caller(self) -> None:
        """Let the rank follow what the caller has issued."""
        self.compute_stream.wait_stream(torch.cuda.current_stream())

    def make_caller_wait(self) -> None:
        """Let the caller follow what the rank has issued."""
        torch.cuda.current_stream().wait_stream(self.compute_stream)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Leave the tensor for the receiver; its copy is where the send ends."""
        key = lane, self.rank, peer
        side = _MessageSide(
            tensor, _record_current_point(), StreamPoint(), self.hub.get_lane_stream(*key)
        )
        if not self.hub.awaited_messages[key]:
            self.hub.sent_messages[key].append(side)
            return side.end_point
        return _copy_message(side, self.hub.awaited_messages[key].popleft())

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Copy what is left, when it is there and the buffer is free."""
        key = lane, peer, self.rank
        side = _MessageSide(
            tensor, _record_current_point(), StreamPoint(), self.hub.get_lane_stream(*key)
        )
        if not self.hub.sent_messages[key]:
            self.hub.awaited_messages[key].append(side)
            return side.end_point
        return _copy_message(self.hub.sent_messages[key].popleft(), side)

    def on_step_begin(self, program: int) -> None:
        """Messages say themselves what they are."""

    def start_group(self) -> None:
        """Messages are delivered one by one."""

    end_group = on_step_end = start_group

    def start_collective(
        self, kind: CollectiveName, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """The last to come does it for all, in the order of ranks."""
        ended = StreamPoint()
        part = _StreamPart(kind, output_tensor, input_tensor, _record_current_point(), ended)
        came = self.hub.pending_collectives.arrive(
            group, self.rank, self.group_members[group], part
        )
        if came:
            with torch.cuda.stream(self.collective_stream):
                for part in came:
                    part.ready_point.wait()
                run_collective(came)
                for part in came:
                    part.end_point.record(self.collective_stream)
        return ended

    def side_stream(self) -> AbstractContextManager[object]:
        """Nobody waits for gathers."""
        return nullcontext()


def _record_current_point() -> StreamPoint:
    """The point that the current stream has reached."""
    return StreamPoint(torch.cuda.current_stream())


def _copy_message(source: _MessageSide, target: _MessageSide) -> StreamPoint:
    """A message, on its lane; both sides know where it ends."""
    with torch.cuda.stream(target.lane_stream):
        source.ready_point.wait()
        target.ready_point.wait()
        target.tensor.copy_(source.tensor, non_blocking=True)
        source.end_point.record(target.lane_stream)
        target.end_point.record(target.lane_stream)
    return target.end_point
