"""The common base classes of the transports of virtual ranks on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from schedir.analysis.progress_models import ProgressModel
from schedir.transports.collectives import GroupKey
from schedir.transports.transport import allocate_buffers


class VirtualRankHub:
    """The state that virtual ranks share."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []  # the payloads of all ranks, see Transport.check_agreement


_Hub = TypeVar("_Hub", bound=VirtualRankHub)


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
