"""The messages between the pipeline ranks of a Megatron run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.ir.isa.instructions import Lane
from schedir.transports.process_groups import get_backend_name, get_nccl_progress_model

# The tag of shapes in a Gloo group. Tensors have the number of their lane as the tag.
_SHAPE_TAG: Final = len(Lane)
_DIMENSIONS: Final = 3  # of the tensors between Megatron's stages


class PipelineGroupTransport:
    """Sends and receives tensors in Megatron's pipeline group.

    Args:
        group: The pipeline-parallel process group.
        device: The device of the tensors.

    Attributes:
        device: The device of the tensors.
        shape_group: The group with Gloo that sends shapes between hosts: the pipeline group itself
            if its backend is Gloo. Otherwise None until `create_shape_group`.
        progress_model: The progress model under which schedir proves that programs finish. The
            model follows from the group's backend:

            - Gloo: "per_edge". Messages match by their tag, and each lane has its own tag. So each
              direction of a pair of ranks has a queue for activations and a queue for gradients.
            - NCCL: "per_device" if the group is bound to its device, because all messages then use
              one communicator. "torch_lazy" otherwise: torch creates a communicator for each pair
              of ranks at their first message.
        blocking_hosts: True if the host waits for the inputs of an instruction before it issues the
            instruction, as on CPUs.

    Raises:
        UsageError: The group has no backend for the device, or a backend other than Gloo and NCCL.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        backend = get_backend_name(group, device)
        if backend not in ("gloo", "nccl"):
            raise UsageError(
                f"the pipeline group has {backend or 'no'} backend for {device.type}; schedir "
                "checks programs for Gloo and NCCL only",
                hint='torch.distributed.init_process_group("nccl")',
            )
        self.uses_tags = backend == "gloo"
        self.shape_group: Any = group if self.uses_tags else None
        self.blocking_hosts = device.type == "cpu"
        self.progress_model: ProgressModel = (
            "per_edge" if self.uses_tags else get_nccl_progress_model(group)
        )

    def create_shape_group(self, pipelines: Sequence[Sequence[int]]) -> None:
        """Create the group that sends shapes, if there is none. All processes must call this.

        Args:
            pipelines: The processes of each pipeline. All processes give the same list.
        """
        if self.shape_group is not None:
            return
        groups = [dist.new_group([*processes], backend="gloo") for processes in pipelines]
        own_pipeline = tuple(dist.get_process_group_ranks(self.group))
        self.shape_group = groups[[*map(tuple, pipelines)].index(own_pipeline)]

    def send_shape(self, shape: Sequence[int], peer: int) -> tuple[dist.Work, Tensor]:
        """Start a send of a shape, and return it with the tensor that must exist until its end.

        Args:
            shape: The shape of the tensor that is sent next, of three dimensions.
            peer: The pipeline rank that receives it.
        """
        message = torch.tensor([*shape])
        return cast(dist.Work, self.shape_group.send([message], peer, _SHAPE_TAG)), message

    def receive_shape(self, peer: int) -> tuple[int, ...]:
        """Wait for a shape, and return it.

        Args:
            peer: The pipeline rank that sends it.
        """
        message = torch.empty(_DIMENSIONS, dtype=torch.int64)
        self.shape_group.recv([message], peer, _SHAPE_TAG).wait()
        return tuple(message.tolist())

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> dist.Work:
        """Start a send to a pipeline rank.

        Args:
            tensor: The tensor, contiguous.
            peer: The pipeline rank that receives it.
            lane: The lane of the instruction.
        """
        if self.uses_tags:
            return cast(dist.Work, self.group.send([tensor], peer, int(lane)))
        return cast(dist.Work, dist.isend(tensor, group=self.group, group_dst=peer))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> dist.Work:
        """Start a receive from a pipeline rank.

        Args:
            tensor: The memory for the tensor, contiguous.
            peer: The pipeline rank that sends it.
            lane: The lane of the instruction.
        """
        if self.uses_tags:
            return cast(dist.Work, self.group.recv([tensor], peer, int(lane)))
        return cast(dist.Work, dist.irecv(tensor, group=self.group, group_src=peer))
