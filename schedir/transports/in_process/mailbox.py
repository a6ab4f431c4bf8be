"""Messages and collectives between virtual ranks of one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.ir.pipeline.tied_weights import find_reduction_groups
from schedir.ir.program import Program
from schedir.transports.collectives import (
    Collective,
    CollectiveMember,
    GroupKey,
    run_collective,
)
from schedir.transports.in_process.cuda_streams import StreamHub, StreamMailbox
from schedir.transports.in_process.virtual_rank import VirtualRankHub, VirtualRankTransport
from schedir.transports.transport import CompletedWork, Work


@dataclass(eq=False)
class _CollectivePart(CollectiveMember, CompletedWork):
    """The call of a collective by a virtual rank, and whether the collective has run.

    In a legal execution order, the collective has run before `wait` is called.
    """

    is_done: bool = False

    def wait(self) -> None:
        assert self.is_done, "all ranks are issued before one of them waits"


MailboxHub = VirtualRankHub[Tensor, _CollectivePart]


class Mailbox(VirtualRankTransport[MailboxHub]):
    """The transport of one virtual rank on a CPU."""

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`. This method copies the tensor immediately."""
        key = lane, self.rank, peer
        if self.hub.awaited_messages[key]:
            self.hub.awaited_messages[key].popleft().copy_(tensor)
        else:
            self.hub.sent_messages[key].append(tensor.clone())
        return CompletedWork()

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`."""
        key = lane, peer, self.rank
        if self.hub.sent_messages[key]:
            tensor.copy_(self.hub.sent_messages[key].popleft())
        else:
            self.hub.awaited_messages[key].append(tensor)
        return CompletedWork()

    def start_collective(
        self, kind: Collective, group: GroupKey, output_tensor: Tensor, input_tensor: Tensor
    ) -> Work:
        """See `Transport.start_collective`.

        The call of the last member runs the collective for all members. Sums add the inputs in the
        order of ranks, whatever the order of the calls is.
        """
        own_part = _CollectivePart(kind, output_tensor, input_tensor)
        members = self.hub.call_collective(group, self.rank, self.group_members[group], own_part)
        if members:
            run_collective(members)
            for member in members:
                member.is_done = True
        return own_part

    use_compute_stream = nullcontext

    def wait_for_caller(self) -> None:
        """Do nothing, because the calls of a CPU run one after the other."""

    make_caller_wait = wait_for_caller


def make_mailboxes(
    program: Program, progress_model: ProgressModel, on_cuda: bool, payloads: list[Any]
) -> Sequence[Mailbox | StreamMailbox]:
    """Return a transport for each virtual rank.

    Args:
        program: The program that the ranks run.
        progress_model: The value of the attribute `progress_model`.
        on_cuda: True if the ranks use streams of a GPU.
        payloads: The payloads of all ranks, which `check_agreement` returns.
    """
    members = [list_group_members(program, rank) for rank in range(program.shape.ranks)]
    hub: Any = StreamHub() if on_cuda else MailboxHub()
    hub.payloads = payloads
    kind = StreamMailbox if on_cuda else Mailbox
    return [kind(hub, rank, m, progress_model) for rank, m in enumerate(members)]


def list_group_members(program: Program, rank: int) -> dict[GroupKey, list[int]]:
    """Return the ranks of each group that contains a rank.

    Args:
        program: The program that the ranks run.
        rank: The rank.
    """
    shape = program.shape
    return {
        "dp": [rank],
        "params": [rank],
        "tp": [rank],
        "model": [*range(shape.ranks)],
        **{ranks: [*ranks] for ranks in find_reduction_groups(program.trained_ties, shape)},
    }
