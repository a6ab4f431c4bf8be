"""Copy weights and optimizer state to host memory for a checkpoint, before a step changes them.

Before a step, a checkpoint saver requests tensors by stage with `SnapshotCopies.request`. The
Snapshot instructions of the step start the copies, and its OptimizerStep waits for them. Without a
request, the Snapshot instructions and the wait of OptimizerStep do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from schedir.ir.isa.instructions import Lane
from schedir.runtime.offload.copy_lanes import CopyLanes, LaneJob
from schedir.runtime.rank_resources import RankResources, RankService

CopyPair = tuple[Tensor, Tensor]  # host memory, and the tensor to copy to it


class SnapshotCopies(RankService):
    """The snapshot copies of a rank's stages in the current or the next step.

    Args:
        resources: The resources of the rank.
    """

    def __init__(self, resources: RankResources) -> None:
        # This lane is separate from the lanes of the step, so a step's own copies do not queue up
        # behind a snapshot.
        self.lanes = CopyLanes(resources)
        self.requested: dict[int, Sequence[CopyPair]] = {}  # stage -> pairs to copy
        self.started_copies: list[LaneJob] = []  # since the last request
        self.requester: object = None  # the object that made the last request

    def on_load(self) -> None:
        """Cancel the requested copies, because a load changes the tensors."""
        self.cancel_request()

    def request(self, tensors: Mapping[int, Sequence[CopyPair]], requester: object = None) -> None:
        """Request copies in the next step. The new request replaces an earlier request.

        Args:
            tensors: Stage -> the pairs to copy.
            requester: The object that requests the copies. The attribute `requester` refers to this
                object, so that the object can recognize its request.
        """
        self.requested = dict(tensors)
        self.started_copies = []
        self.requester = requester

    def cancel_request(self) -> None:
        """Cancel copies that have not been started, because their tensors are about to change."""
        if self.requested:
            self.request({})

    def take_copies(self) -> list[LaneJob]:
        """Return the copies that a step started, and end the request.

        Call `finish` of each copy before the host reads it.
        """
        copies, self.started_copies, self.requester = self.started_copies, [], None
        return copies

    def begin_stage(self, stage: int) -> None:
        """Start the requested copies of a stage, if there are any.

        Args:
            stage: The number of the stage.
        """
        if self.requested and (pairs := self.requested.pop(stage, ())):
            self.started_copies.append(self.start_copy(pairs))

    def start_copy(self, pairs: Sequence[CopyPair]) -> LaneJob:
        """Start copies immediately, independent of the request.

        Args:
            pairs: Pairs of host memory and the tensor to copy to it.
        """
        return self.lanes.start(Lane.D2H, partial(copy_pairs, pairs))

    def wait(self) -> None:
        """Wait until the computation may change the copied tensors.

        If a copy failed, this method raises the error of the copy.
        """
        for copy in self.started_copies:
            copy.wait()


@torch.no_grad()
def copy_pairs(pairs: Sequence[CopyPair]) -> None:
    """Copy the second tensor of each pair to the first. The host does not wait for a GPU.

    Args:
        pairs: Pairs of a target and a source.
    """
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
