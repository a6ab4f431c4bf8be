"""Copy what a step changes to host memory, for a checkpoint.

Whoever saves says before a step which tensors of which stages it wants (`SnapshotCopies.want`); the
step's Snapshots then begin to copy them, and its OptimizerStep waits until they have been.  Where
nobody wants any, both do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

CopyPair = tuple[Tensor, Tensor]  # memory of the host, and what is copied to it


class SnapshotCopies:
    """The copies of a rank's stages in the next step, or in this one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.requested: dict[int, Sequence[CopyPair]] = {}  # by stage
        self.pending_copies: list[SnapshotCopy] = []
        self.started_copies: list[SnapshotCopy] = []  # since they were wanted
        self.requester: object = None  # who wants them

    def request(self, tensors: Mapping[int, Sequence[CopyPair]], requester: object = None) -> None:
        """Let the next step's Snapshots copy these tensors, by stage, and nothing that others have
        wanted before."""
        self.requested, self.started_copies, self.requester = dict(tensors), [], requester

    def cancel_request(self) -> None:
        """Let nothing be copied that has not been: it is about to change otherwise."""
        if self.requested:
            self.request({})

    def take_copies(self) -> list[SnapshotCopy]:
        """The copies that a step has made; whoever reads them lets each `finish` before."""
        made, self.started_copies, self.requester = self.started_copies, [], None
        return made

    def begin_stage(self, stage: int) -> None:
        """Begin to copy a stage, if that is wanted."""
        if self.requested and (pairs := self.requested.pop(stage, ())):
            one = self.start_copy(pairs)
            self.pending_copies.append(one)
            self.started_copies.append(one)

    def start_copy(self, pairs: Sequence[CopyPair]) -> SnapshotCopy:
        """Begin to copy these, whatever is wanted."""
        return (_DeviceCopy if self.device.type == "cuda" else _ThreadCopy)(pairs)

    def wait(self) -> None:
        """Wait until nothing is copied any more: what was copied may change now.

        Raises what a copy has raised.
        """
        while self.pending_copies:
            self.pending_copies.pop().wait()


class SnapshotCopy:
    """A copy that is under way."""

    def wait(self) -> None:
        """Wait until what is copied may change; on a GPU its stream waits, and the host does not.

        To be called once.  Raises what the copy has raised.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait, when the step has, until the host may read the copy."""


class _ThreadCopy(SnapshotCopy):
    """A copy beside what computes: torch lets other threads run while it copies."""

    def __init__(self, pairs: Sequence[CopyPair]) -> None:
        self.result_queue: SimpleQueue[BaseException | None] = SimpleQueue()
        Thread(target=self._run, args=(pairs,), name="snapshot", daemon=True).start()

    def _run(self, pairs: Sequence[CopyPair]) -> None:
        try:
            copy_pairs(pairs)
        except BaseException as error:  # whoever waits raises it
            self.result_queue.put(error)
        else:
            self.result_queue.put(None)

    def wait(self) -> None:
        if (error := self.result_queue.get()) is not None:
            raise error


class _DeviceCopy(SnapshotCopy):
    """A copy on a stream of its own, which what comes next on the current one waits for."""

    def __init__(self, pairs: Sequence[CopyPair]) -> None:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy_pairs(pairs)
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()


@torch.no_grad()
def copy_pairs(pairs: Sequence[CopyPair]) -> None:
    """Copy each to its memory; from a GPU without waiting for it."""
    for memory, of in pairs:
        memory.copy_(of, non_blocking=True)
