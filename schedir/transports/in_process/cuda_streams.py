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
from schedir.transports.collectives import CollectiveMember, Group, Kind, PendingCollectives, meet
from schedir.transports.transport import Work, buffers


class StreamPoint:
    """A point on a stream, perhaps not reached by the host yet; to wait is the current stream's."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event = torch.cuda.Event()
        self.stream: torch.cuda.Stream | None = None  # where it is, once the host has reached it
        self.marks: list[torch.cuda.Event] = []
        if stream is not None:
            self.reach(stream)

    def reach(self, stream: torch.cuda.Stream) -> None:
        for mark in self.marks:
            mark.record(stream)
        self.event.record(stream)
        self.stream = stream

    def mark(self, event: torch.cuda.Event) -> None:
        """As Marks.mark, before anybody waits for the point: who does begins after the mark."""
        self.marks.append(event)
        if self.stream is not None:
            self.reach(self.stream)

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
    ready: StreamPoint
    ended: StreamPoint
    lane: torch.cuda.Stream


@dataclass(eq=False)
class _StreamPart(CollectiveMember):
    """A part in a collective, from when on its tensors may be used, and where the result ends."""

    ready: StreamPoint
    ended: StreamPoint


class StreamHub:
    """Where virtual ranks meet: messages with one side there, and collectives half arrived."""

    def __init__(self) -> None:
        self.sent: dict[tuple[Lane, int, int], deque[_MessageSide]] = defaultdict(deque)
        self.awaited: dict[tuple[Lane, int, int], deque[_MessageSide]] = defaultdict(deque)
        self.lanes: dict[tuple[Lane, int, int], torch.cuda.Stream] = {}
        self.meetings: PendingCollectives[_StreamPart] = PendingCollectives()
        self.told: list[Any] = []  # what is told of all ranks

    def lane(self, lane: Lane, source: int, target: int) -> torch.cuda.Stream:
        """The queue of a directed edge."""
        key = lane, source, target
        if key not in self.lanes:
            self.lanes[key] = torch.cuda.Stream(priority=-1)
        return self.lanes[key]


class StreamMailbox:
    """The transport of a virtual rank on a GPU: a message is a copy on the lane of its edge."""

    tp, dp, tp_rank, dp_rank = 1, 1, 0, 0
    grouped, blocking_hosts, static = False, False, False

    def __init__(
        self,
        hub: StreamHub,
        rank: int,
        members: dict[Group, list[int]],
        progress_model: ProgressModel,
    ) -> None:
        self.hub, self.rank, self.members, self.progress_model = hub, rank, members, progress_model
        self.compute = torch.cuda.Stream()
        self.collectives = torch.cuda.Stream(priority=-1)

    buffers = staticmethod(buffers)

    def agree(
        self, facts: Mapping[str, str], tell: object = None, kinds: Sequence[type] = ()
    ) -> list[Any]:
        """All virtual ranks are told the same."""
        return self.hub.told

    def running(self) -> AbstractContextManager[object]:
        """Within this, what the rank computes goes to its own stream."""
        return torch.cuda.stream(self.compute)

    def begin(self) -> None:
        """Let the rank follow what the caller has issued."""
        self.compute.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        """Let the caller follow what the rank has issued."""
        torch.cuda.current_stream().wait_stream(self.compute)

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Leave the tensor for the receiver; its copy is where the send ends."""
        key = lane, self.rank, peer
        side = _MessageSide(tensor, _here(), StreamPoint(), self.hub.lane(*key))
        if not self.hub.awaited[key]:
            self.hub.sent[key].append(side)
            return side.ended
        return _copy(side, self.hub.awaited[key].popleft())

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Copy what is left, when it is there and the buffer is free."""
        key = lane, peer, self.rank
        side = _MessageSide(tensor, _here(), StreamPoint(), self.hub.lane(*key))
        if not self.hub.sent[key]:
            self.hub.awaited[key].append(side)
            return side.ended
        return _copy(self.hub.sent[key].popleft(), side)

    def step_begins(self, program: int) -> None:
        """Messages say themselves what they are."""

    def start_group(self) -> None:
        """Messages are delivered one by one."""

    end_group = step_ended = start_group

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """The last to come does it for all, in the order of ranks."""
        ended = StreamPoint()
        part = _StreamPart(kind, out, own, _here(), ended)
        came = self.hub.meetings.come(group, self.rank, self.members[group], part)
        if came:
            with torch.cuda.stream(self.collectives):
                for part in came:
                    part.ready.wait()
                meet(came)
                for part in came:
                    part.ended.reach(self.collectives)
        return ended

    def aside(self) -> AbstractContextManager[object]:
        """Nobody waits for gathers."""
        return nullcontext()


def _here() -> StreamPoint:
    """The point that the current stream has reached."""
    return StreamPoint(torch.cuda.current_stream())


def _copy(source: _MessageSide, target: _MessageSide) -> StreamPoint:
    """A message, on its lane; both sides know where it ends."""
    with torch.cuda.stream(target.lane):
        source.ready.wait()
        target.ready.wait()
        target.tensor.copy_(source.tensor, non_blocking=True)
        source.ended.reach(target.lane)
        target.ended.reach(target.lane)
    return target.ended
