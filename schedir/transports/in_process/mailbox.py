"""Messages and collectives between virtual ranks of one process."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.tied_weights import groups_of
from schedir.ir.program import Program
from schedir.transports.collectives import CollectiveMember, Group, Kind, PendingCollectives, meet
from schedir.transports.in_process.cuda_streams import StreamHub, StreamMailbox
from schedir.transports.transport import CompletedWork, Work, buffers


@dataclass(eq=False)
class _CollectivePart(CollectiveMember, CompletedWork):
    """A part in a collective, and whether that is over: in a legal order, before anybody waits."""

    over: bool = False

    def wait(self) -> None:
        assert self.over, "the others come before anybody waits"


class MailboxHub:
    """Where the virtual ranks meet: messages on their way, and collectives half arrived."""

    def __init__(self) -> None:
        self.sent: dict[tuple[Lane, int, int], deque[Tensor]] = defaultdict(deque)
        self.awaited: dict[tuple[Lane, int, int], deque[Tensor]] = defaultdict(deque)
        self.meetings: PendingCollectives[_CollectivePart] = PendingCollectives()
        self.told: list[Any] = []  # what is told of all ranks


class Mailbox:
    """The transport of one virtual rank."""

    tp, dp, tp_rank, dp_rank = 1, 1, 0, 0
    grouped, blocking_hosts, static = False, False, False

    def __init__(
        self,
        hub: MailboxHub,
        rank: int,
        members: dict[Group, list[int]],
        progress_model: ProgressModel,
    ) -> None:
        self.hub, self.rank, self.members, self.progress_model = hub, rank, members, progress_model

    buffers = staticmethod(buffers)

    def agree(
        self, facts: Mapping[str, str], tell: object = None, kinds: Sequence[type] = ()
    ) -> list[Any]:
        """All virtual ranks are told the same."""
        return self.hub.told

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        key = lane, self.rank, peer
        if self.hub.awaited[key]:
            self.hub.awaited[key].popleft().copy_(tensor)
        else:
            self.hub.sent[key].append(tensor.clone())
        return CompletedWork()

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        key = lane, peer, self.rank
        if self.hub.sent[key]:
            tensor.copy_(self.hub.sent[key].popleft())
        else:
            self.hub.awaited[key].append(tensor)
        return CompletedWork()

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        """The last to come does it for all, in the order of ranks whatever that of arrival."""
        own_part = _CollectivePart(kind, out, own)
        came = self.hub.meetings.come(group, self.rank, self.members[group], own_part)
        if came:
            meet(came)
            for part in came:
                part.over = True
        return own_part

    running = nullcontext

    def step_begins(self, program: int) -> None:
        """Messages say themselves what they are."""

    def start_group(self) -> None:
        """Messages are delivered one by one."""

    begin = end = end_group = step_ended = start_group

    def aside(self) -> AbstractContextManager[object]:
        """Nobody waits for gathers."""
        return nullcontext()


def mailboxes(
    program: Program, progress_model: ProgressModel, cuda: bool, told: list[Any]
) -> Sequence[Mailbox | StreamMailbox]:
    """A transport for each virtual rank, to all of which this is told."""
    members = [members_of(program, rank) for rank in range(program.shape.ranks)]
    if cuda:
        streams = StreamHub()
        streams.told = told
        return [StreamMailbox(streams, rank, m, progress_model) for rank, m in enumerate(members)]
    hub = MailboxHub()
    hub.told = told
    return [Mailbox(hub, rank, m, progress_model) for rank, m in enumerate(members)]


def members_of(program: Program, rank: int) -> dict[Group, list[int]]:
    """Whom a rank meets, itself included."""
    shape = program.shape
    return {
        "dp": [rank],
        "params": [rank],
        "tp": [rank],
        "model": [*range(shape.ranks)],
        **{ranks: [*ranks] for ranks in groups_of(program.summed, shape)},
    }
