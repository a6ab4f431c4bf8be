"""Streams: virtual ranks of one process on one GPU, each with CUDA streams of its own.

The lanes of a virtual rank are streams, ordered by events as they would be between GPUs: what
overlaps here overlaps there.  The host never waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from schedir.graph import Model
from schedir.ops import Lane
from schedir.runtime.transport import Group, Work


class _Point:
    """A point on a stream, perhaps not reached by the host yet; to wait is the current stream's."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event = torch.cuda.Event()
        self.set = False
        if stream is not None:
            self.reach(stream)

    def reach(self, stream: torch.cuda.Stream) -> None:
        self.event.record(stream)
        self.set = True

    def wait(self) -> None:
        # A wait for an event that was never recorded would be none.
        assert self.set, "the other side comes before anybody waits"
        torch.cuda.current_stream().wait_event(self.event)


class _Meeting:
    """A collective that some members have come to."""

    def __init__(self) -> None:
        self.came: list[tuple[Tensor, _Point]] = []
        self.ended = _Point()


class StreamHub:
    """Where virtual ranks meet: messages on their way, and collectives half arrived."""

    def __init__(self) -> None:
        self.mail: dict[tuple[Lane, int, int], deque[tuple[Tensor, _Point, _Point]]]
        self.mail = defaultdict(deque)
        self.meetings: dict[tuple[Group, int], _Meeting] = defaultdict(_Meeting)


class StreamMailbox:
    """The transport of a virtual rank on a GPU: a message is a copy on the receiver's lane."""

    tp, dp, tp_rank, grouped, blocks = 1, 1, 0, False, False

    def __init__(
        self, hub: StreamHub, rank: int, members: dict[Group, list[int]], model: Model
    ) -> None:
        self.hub, self.rank, self.members, self.model = hub, rank, members, model
        self.compute = torch.cuda.Stream()
        self.lanes = {lane: torch.cuda.Stream(priority=-1) for lane in Lane}

    def agree(self, facts: Mapping[str, str]) -> None:
        """All virtual ranks are told the same."""

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
        ended = _Point()
        self.hub.mail[lane, self.rank, peer].append((tensor, _here(), ended))
        return ended

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """Copy what was left, when it is there and the buffer is free."""
        source, ready, ended = self.hub.mail[lane, peer, self.rank].popleft()
        free = _here()
        with torch.cuda.stream(self.lanes[lane]):
            ready.wait()
            free.wait()
            tensor.copy_(source, non_blocking=True)
            ended.reach(self.lanes[lane])
        return ended

    def start_group(self) -> None:
        """Messages are delivered one by one."""

    end_group = start_group

    def all_reduce(self, tensor: Tensor, group: Group) -> Work:
        """The last to come sums for all."""
        members = self.members[group]
        key = group, members[0]
        meeting = self.hub.meetings[key]
        meeting.came.append((tensor, _here()))
        if len(meeting.came) == len(members):
            del self.hub.meetings[key]
            lane = self.lanes[Lane.DP]
            with torch.cuda.stream(lane):
                for _, ready in meeting.came:
                    ready.wait()
                total = meeting.came[0][0].clone()
                for other, _ in meeting.came[1:]:
                    total += other
                for each, _ in meeting.came:
                    each.copy_(total)
                meeting.ended.reach(lane)
        return meeting.ended

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        raise NotImplementedError("virtual ranks have no tensor-parallel group")

    def aside(self) -> AbstractContextManager[object]:
        """Nobody waits for gathers."""
        return nullcontext()


def _here() -> _Point:
    """The point that the current stream has reached."""
    return _Point(torch.cuda.current_stream())
