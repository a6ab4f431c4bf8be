"""The common base classes of the transports of virtual ranks on a CPU and on a GPU."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.transports.collectives import CollectiveMember, GroupKey
from schedir.transports.transport import allocate_buffers

_Side = TypeVar("_Side")  # the sender's or the receiver's side of a message
_Member = TypeVar("_Member", bound=CollectiveMember)
_DirectedEdge = tuple[Lane, int, int]  # lane, source, target


class VirtualRankHub(Generic[_Side, _Member]):
    """The state that virtual ranks share: incomplete messages and collectives.

    Incomplete messages have only a sender or only a receiver so far. Incomplete collectives were
    called by some of their members. A member may call several collectives before another member
    calls the first of them.
    """

    def __init__(self) -> None:
        self.payloads: list[Any] = []  # the payloads of all ranks, see Transport.check_agreement
        self.sent_messages: dict[_DirectedEdge, deque[_Side]] = defaultdict(deque)
        self.awaited_messages: dict[_DirectedEdge, deque[_Side]] = defaultdict(deque)
        self.collective_calls: dict[tuple[GroupKey, int], deque[_Member]] = defaultdict(deque)

    def call_collective(
        self, group: GroupKey, rank: int, member_ranks: list[int], member: _Member
    ) -> list[_Member]:
        """Add the call of one rank, and return all calls if the collective is now complete.

        Args:
            group: The group of the collective.
            rank: The rank that calls.
            member_ranks: All ranks of the group.
            member: The call of this rank.

        Returns:
            The call of each member, in the order of `member_ranks`, if this rank was the last one
            to call. Otherwise an empty list.
        """
        self.collective_calls[group, rank].append(member)
        queues = [self.collective_calls[group, member_rank] for member_rank in member_ranks]
        return [queue.popleft() for queue in queues] if all(queues) else []


_Hub = TypeVar("_Hub", bound=VirtualRankHub[Any, Any])


class VirtualRankTransport(Generic[_Hub]):
    """The transport of one virtual rank, without its messages and collectives.

    Args:
        hub: The state that all virtual ranks share.
        rank: The rank.
        group_members: The ranks of each group that contains this rank.
        progress_model: The value of the attribute `progress_model`.
    """

    tp: int = 1
    dp: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    is_grouped: bool = False
    blocking_hosts: bool = False
    uses_static_buffers: bool = False

    def __init__(
        self,
        hub: _Hub,
        rank: int,
        group_members: dict[GroupKey, list[int]],
        progress_model: ProgressModel,
    ) -> None:
        self.hub = hub
        self.rank = rank
        self.group_members = group_members
        self.progress_model = progress_model

    allocate_buffers = staticmethod(allocate_buffers)

    def check_agreement(
        self, facts: Mapping[str, str], payload: object = None, record_types: Sequence[type] = ()
    ) -> list[Any]:
        """Return the payloads of all virtual ranks, which `make_mailboxes` received.

        Args:
            facts: Not used.
            payload: Not used.
            record_types: Not used.
        """
        return self.hub.payloads

    def on_step_begin(self, program: int) -> None:
        """Do nothing, because this transport matches messages only by their order.

        Args:
            program: Not used.
        """

    def start_group(self) -> None:
        """Do nothing, because each message is delivered or copied by itself."""

    end_group = on_step_end = start_group

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context that does nothing. Virtual ranks have tp=1, so they start no gathers."""
        return nullcontext()
