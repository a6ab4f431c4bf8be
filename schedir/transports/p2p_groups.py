"""Transports that use a process group for each directed edge, or one group for all edges.

NCCL matches the messages of a communicator by their order only, and runs them in this order. The
choice of communicators therefore determines which messages can delay each other, so it determines
the progress model.

- `EdgeGroups`, model `per_edge`: a group of two ranks for each directed edge and lane.
- `GroupedMessages`, model `per_device`: one process group for the pipeline. The transport issues
  the transfers of each group of the program as one batch.

Both classes work over any backend. All processes create groups, and send the first message of each
edge, in one global order before the first step. The first message creates the connection. A
connection that is created while a kernel of the peer waits can hang (NVIDIA/nccl issue 783).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS, Lane
from schedir.ir.program import Program
from schedir.transports import process_groups
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.transport import Work


class DirectedEdge(NamedTuple):
    """The messages of one lane from one pipeline rank to another.

    Attributes:
        lane: The lane.
        source: The pipeline rank that sends.
        target: The pipeline rank that receives.
    """

    lane: Lane
    source: int
    target: int


def directed_edges(*programs: Program) -> list[DirectedEdge]:
    """Return all edges on which programs send, in the sorted order that all ranks use.

    Args:
        *programs: The programs.
    """
    return sorted({edge for program in programs for edge in _iterate_edges(program)})


def partition_disjoint_edges(edges: Iterable[DirectedEdge]) -> list[list[DirectedEdge]]:
    """Partition edges into lists in which no two edges have a rank in common.

    Args:
        edges: The edges.
    """
    return process_groups.partition_disjoint(edges, lambda edge: {edge.source, edge.target})


def _iterate_edges(program: Program) -> Iterator[DirectedEdge]:
    for rank, stream in enumerate(program.streams):
        for instr in stream:
            if instr.op in SEND_OPS:
                yield DirectedEdge(INSTRUCTIONS[instr.op].lane, rank, program.peer_rank(instr))


class _EdgeTransport(ProcessTransport):
    """A transport that creates the connection of each edge when it is created."""

    def open_channels(self) -> None:
        """Send a number along every edge, one edge after the other, to create the connections."""
        self.edges: list[DirectedEdge] = directed_edges(*self.programs)
        self.create_edge_groups()
        tensor = torch.zeros(1, device=self.device)
        for edge in self.edges:
            if self.rank == edge.source:
                self.send(tensor, edge.target, edge.lane).wait()
            elif self.rank == edge.target:
                self.recv(tensor, edge.source, edge.lane).wait()

    def create_edge_groups(self) -> None:
        """Create the groups of the edges. By default, all edges use the group of the pipeline."""

    def describe_missing_channels(self, program: Program) -> str:
        """See `ProcessTransport.describe_missing_channels`."""
        if missing := super().describe_missing_channels(program):
            return missing
        for lane, source, target in directed_edges(program):
            if (lane, source, target) not in self.edges:
                return f"edge for {lane.name.lower()} from rank {source} to rank {target}"
        return ""


class EdgeGroups(_EdgeTransport):
    """A transport with a process group for each directed edge. Its progress model is `per_edge`.

    Over NCCL a group uses only as many multiprocessors as its messages need.

    Args:
        program: The program that the transport runs.
        timeout: See `ProcessTransport`.
        device: The device of the tensors.
        max_message_bytes: The size of the largest message, in bytes, or 0 if it is unknown.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: See `ProcessTransport`.
    """

    progress_model: ProgressModel = "per_edge"

    def create_edge_groups(self) -> None:
        """Create a group of two ranks for each edge."""
        # The processes with the same replica and tensor-parallel rank as this process. The index is
        # the pipeline rank.
        self.peer_processes: list[int] = self.mesh[self.dp_rank, :, self.tp_rank].tolist()
        self.edge_groups: dict[DirectedEdge, Any] = {}
        for edges in partition_disjoint_edges(self.edges):
            rows = [row for edge in edges for row in self._list_edge_ends(edge)]
            max_ctas = process_groups.choose_max_ctas(self.max_message_bytes)
            group = self.make_group(rows, max_ctas=max_ctas)
            local_edges = (edge for edge in edges if self.rank in (edge.source, edge.target))
            self.edge_groups |= dict.fromkeys(local_edges, group)

    def _list_edge_ends(self, edge: DirectedEdge) -> list[list[int]]:
        """Return the two processes of an edge for each replica and tensor-parallel rank."""
        ends = self.mesh[:, [edge.source, edge.target]]
        return [sorted(map(int, pair)) for pair in ends.swapaxes(1, 2).reshape(-1, 2)]

    def start_transfer(self, edge: DirectedEdge, tensor: Tensor, *, is_send: bool) -> Any:
        """Start a transfer to or from the other end of an edge.

        Args:
            edge: An edge of this rank.
            tensor: The tensor to send or to receive into.
            is_send: True to send, and False to receive. The direction of the edge does not matter.

        Returns:
            The Work of torch.distributed.
        """
        peer = self.peer_processes[edge.source + edge.target - self.rank]
        return (dist.isend if is_send else dist.irecv)(tensor, peer, group=self.edge_groups[edge])

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`."""
        group = self.edge_groups[DirectedEdge(lane, self.rank, peer)]
        return cast(Work, dist.isend(tensor, self.peer_processes[peer], group=group))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`."""
        group = self.edge_groups[DirectedEdge(lane, peer, self.rank)]
        return cast(Work, dist.irecv(tensor, self.peer_processes[peer], group=group))


class _GroupedTransfer:
    """The Work of a transfer that is not issued before its group is complete."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def is_completed(self) -> bool:
        """Return whether the transfer was issued and has completed."""
        return self.work is not None and cast(dist.Work, self.work).is_completed()

    def wait(self) -> None:
        assert self.work is not None, "a group is issued before a rank waits for it"
        self.work.wait()


class GroupedMessages(_EdgeTransport):
    """A transport with one process group for all messages of a pipeline.

    Its progress model is `per_device`. The transport issues each group of transfers with one
    `batch_isend_irecv`. A transfer outside of a group is a batch of one. NCCL fuses a batch into
    one operation, so the sender and the receiver of a message must batch it with the same messages.

    Args:
        program: The program that the transport runs.
        timeout: See `ProcessTransport`.
        device: The device of the tensors.
        max_message_bytes: Not used.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: See `ProcessTransport`.
    """

    progress_model: ProgressModel = "per_device"
    is_grouped = True
    has_pipeline_group = True
    deferred_transfers: list[tuple[dist.P2POp, _GroupedTransfer]] | None = None

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.send`. Within a group the transfer is issued by `end_group`."""
        return self._issue_or_defer(
            dist.P2POp(dist.isend, tensor, group=self.pipeline_group, group_peer=peer)
        )

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `Transport.recv`. Within a group the transfer is issued by `end_group`."""
        return self._issue_or_defer(
            dist.P2POp(dist.irecv, tensor, group=self.pipeline_group, group_peer=peer)
        )

    def _issue_or_defer(self, transfer: dist.P2POp) -> Work:
        if self.deferred_transfers is None:
            (work,) = dist.batch_isend_irecv([transfer])
            return cast(Work, work)
        deferred = _GroupedTransfer()
        self.deferred_transfers.append((transfer, deferred))
        return deferred

    def start_group(self) -> None:
        """Defer the following transfers until `end_group`."""
        self.deferred_transfers = []

    def end_group(self) -> None:
        """Issue the deferred transfers as one batch."""
        assert self.deferred_transfers is not None
        members, self.deferred_transfers = self.deferred_transfers, None
        works = dist.batch_isend_irecv([transfer for transfer, _ in members])
        # NCCL returns one Work for the batch, and Gloo returns one Work for each transfer.
        member_works = works if len(works) == len(members) else works * len(members)
        for (_, deferred), work in zip(members, member_works, strict=True):
            deferred.work = cast(Work, work)
