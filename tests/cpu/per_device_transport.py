"""A CPU transport with queues exactly as in the `per_device` model.

Gloo's own sends are asynchronous, so a program that would hang on a GPU runs over Gloo. Here each
rank has one queue. A group of transfers leaves it when all its members have ended on both sides,
and a send ends no earlier than its receive (a rendezvous), as in a communicator of NCCL.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.ir.isa.instructions import Lane
from schedir.ir.program import Program
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.transport import Work

ACK = 99  # the tag of a receiver's message that it is ready


class TransferTimeout(Exception):
    """A transfer did not end in time."""


class _Batch:
    """Transfers of a group, each with whether it is a send, its tensor, peer and lane."""

    def __init__(self, limit: float) -> None:
        self.members: list[tuple[bool, Tensor, int, Lane]] = []
        self.ended, self.limit = Event(), limit

    def wait(self) -> None:
        if not self.ended.wait(self.limit):
            raise TransferTimeout(f"{len(self.members)} transfers")


class PerDeviceTransport(ProcessTransport):
    """A strict transport. A transfer that takes longer than `waits` seconds raises Stuck."""

    progress_model = "per_device"
    is_grouped = True
    has_pipeline_group = True

    def __init__(self, program: Program, waits: float = 60.0) -> None:
        super().__init__(program)
        self.waits = waits
        self.open: _Batch | None = None
        self.queue: SimpleQueue[_Batch] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        return self._put(True, tensor, peer, lane)

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        return self._put(False, tensor, peer, lane)

    def _put(self, *transfer: Any) -> Work:
        batch = self.open or _Batch(self.waits)
        batch.members.append(transfer)
        if self.open is None:
            self.queue.put(batch)
        return batch

    def start_group(self) -> None:
        self.open = _Batch(self.waits)

    def end_group(self) -> None:
        assert self.open is not None
        self.queue.put(self.open)
        self.open = None

    def _work(self) -> None:
        group = self.pipeline_group
        while True:
            batch = self.queue.get()
            works = []
            for sends, tensor, peer, lane in batch.members:
                if sends:
                    works.append(dist.isend(tensor, group=group, group_dst=peer, tag=int(lane)))
                    heard = torch.empty(1)
                    works.append(dist.irecv(heard, group=group, group_src=peer, tag=ACK + lane))
                else:
                    works.append(dist.irecv(tensor, group=group, group_src=peer, tag=int(lane)))
                    said = torch.zeros(1)
                    works.append(dist.isend(said, group=group, group_dst=peer, tag=ACK + lane))
            for work in works:
                assert work is not None
                work.wait()
            batch.ended.set()
