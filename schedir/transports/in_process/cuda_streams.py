"""Virtual ranks of one process on one GPU, each with its own CUDA streams.

The lanes of a virtual rank are CUDA streams. Events order these streams in the same way as between
GPUs. So the same operations overlap as between GPUs. The host never waits.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import (
    Collective,
    CollectiveMember,
    GroupKey,
    run_collective,
)
from schedir.transports.in_process.virtual_rank import VirtualRankHub, VirtualRankTransport
from schedir.transports.transport import Work


class StreamPoint:
    """A point on a CUDA stream. A wait for the point blocks the current stream, but not the host.

    Args:
        stream: The stream on which the constructor records the point. By default, a later call of
            `record` records the point.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event = torch.cuda.Event()
        self.stream: torch.cuda.Stream | None = None  # None until the point is recorded
        self.mark_events: list[torch.cuda.Event] = []
        if stream is not None:
            self.record(stream)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record the point on a stream, after the work that the host has issued to this stream.

        Args:
            stream: The stream.
        """
        for mark in self.mark_events:
            mark.record(stream)
        self.event.record(stream)
        self.stream = stream

    def record_end(self, event: torch.cuda.Event) -> None:
        """See `TransportTimestamps.record_end`.

        Call this method before `wait`, so that a waiting stream continues after the event.

        Args:
            event: The event, which is recorded at this point.
        """
        self.mark_events.append(event)
        if self.stream is not None:
            self.record(self.stream)

    def is_completed(self) -> bool:
        """Return whether the GPU has reached the point, without a wait."""
        return self.stream is not None and self.event.query()

    def wait(self) -> None:
        """Make the current stream wait for the point. The point must already be recorded."""
        # CUDA ignores a wait for an event that was never recorded.
        assert self.stream is not None, "both sides are issued before either waits"
        torch.cuda.current_stream().wait_event(self.event)


class _MessageSide(NamedTuple):
    """A send or a receive that waits for the other side of its message.

    Attributes:
        tensor: The tensor to send or to receive into.
        ready_point: The point from which the tensor may be used.
        end_point: The point at which the message ends. It is recorded after the copy.
        lane_stream: The stream of the directed edge.
    """

    tensor: Tensor
    ready_point: StreamPoint
    end_point: StreamPoint
    lane_stream: torch.cuda.Stream


@dataclass(eq=False)
class _StreamPart(CollectiveMember):
    """The call of a collective by a virtual rank.

    Attributes:
        ready_point: The point from which the tensors of the call may be used.
        end_point: The point at which the result is complete.
    """

    ready_point: StreamPoint
    end_point: StreamPoint


class StreamHub(VirtualRankHub[_MessageSide, _StreamPart]):
    """The state that virtual ranks share, with the CUDA stream of each directed edge."""

    def __init__(self) -> None:
        super().__init__()
        self.lane_streams: dict[tuple[Lane, int, int], torch.cuda.Stream] = defaultdict(
            lambda: torch.cuda.Stream(priority=-1)
        )


class StreamMailbox(VirtualRankTransport[StreamHub]):
    """The transport of a virtual rank on a GPU.

    A message is a copy on the stream of its directed edge.

    Args:
        hub: The state that all virtual ranks share.
        rank: The rank.
        group_members: The ranks of each group that contains this rank.
        progress_model: The value of the attribute `progress_model`.
    """

    def __init__(
        self,
        hub: StreamHub,
        rank: int,
        group_members: dict[GroupKey, list[int]],
        progress_model: ProgressModel,
    ) -> None:
        super().__init__(hub, rank, group_members, progress_model)
        self.compute_stream: Any = torch.cuda.Stream()
        self.collective_stream: Any = torch.cuda.Stream(priority=-1)

    def use_compute_stream(self) -> AbstractContextManager[object]:
        """Return a context in which computation uses the stream of this rank."""
        return torch.cuda.stream(self.compute_stream)

    def wait_for_caller(self) -> None:
        """Make the rank's stream wait for the work that was issued to the current stream."""
        self.compute_stream.wait_stream(torch.cuda.current_stream())

    def make_caller_wait(self) -> None:
        """Make the current stream wait for the work that was issued to the rank's stream."""
        torch.cuda.current_stream().wait_stream(self.compute_stream)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`. The Work ends when the receiver has a copy."""
        key = lane, self.rank, peer
        stream = self.hub.lane_streams[key]
        side = _MessageSide(tensor, _record_current_point(), StreamPoint(), stream)
        if not self.hub.awaited_messages[key]:
            self.hub.sent_messages[key].append(side)
            return side.end_point
        return _copy_message(side, self.hub.awaited_messages[key].popleft())

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`. The copy begins when both tensors are ready."""
        key = lane, peer, self.rank
        stream = self.hub.lane_streams[key]
        side = _MessageSide(tensor, _record_current_point(), StreamPoint(), stream)
        if not self.hub.sent_messages[key]:
            self.hub.awaited_messages[key].append(side)
            return side.end_point
        return _copy_message(self.hub.sent_messages[key].popleft(), side)

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """See `Transport.start_collective`.

        The call of the last member runs the collective for all members.
        """
        end_point = StreamPoint()
        member = _StreamPart(kind, output_tensor, input_tensor, _record_current_point(), end_point)
        members = self.hub.call_collective(group, self.rank, self.group_members[group], member)
        if members:
            with torch.cuda.stream(self.collective_stream):
                for member in members:
                    member.ready_point.wait()
                run_collective(members)
                for member in members:
                    member.end_point.record(self.collective_stream)
        return end_point


def _record_current_point() -> StreamPoint:
    """Return a point after all work that the host has issued to the current stream."""
    return StreamPoint(torch.cuda.current_stream())


def _copy_message(source: _MessageSide, target: _MessageSide) -> StreamPoint:
    """Copy a message on the stream of its edge, and record the end points of both sides."""
    with torch.cuda.stream(target.lane_stream):
        source.ready_point.wait()
        target.ready_point.wait()
        target.tensor.copy_(source.tensor, non_blocking=True)
        source.end_point.record(target.lane_stream)
        target.end_point.record(target.lane_stream)
    return target.end_point
