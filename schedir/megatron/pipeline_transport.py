"""The messages between the pipeline ranks of a Megatron run."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.errors import UsageError
from schedir.ir.isa.instructions import Lane
from schedir.transports.process_groups import get_backend_name, get_nccl_progress_model


class Message(Protocol):
    """A send or a receive in progress, such as a Work of torch.distributed."""

    def wait(self) -> object:
        """Wait for the message."""

    def is_completed(self) -> bool:
        """Return whether the message has been transferred."""


class PipelineGroupTransport:
    """Sends and receives tensors in Megatron's pipeline group.

    Args:
        group: The pipeline-parallel process group.
        device: The device of the tensors.

    Attributes:
        device: The device of the tensors.
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
        self.blocking_hosts = device.type == "cpu"
        self.progress_model: ProgressModel = (
            "per_edge" if self.uses_tags else get_nccl_progress_model(group)
        )

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Message:
        """Start a send to a pipeline rank.

        Args:
            tensor: The tensor, contiguous.
            peer: The pipeline rank that receives it.
            lane: The lane of the instruction.
        """
        if self.uses_tags:
            return cast(Message, self.group.send([tensor], peer, int(lane)))
        return cast(Message, dist.isend(tensor, group=self.group, group_dst=peer))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Message:
        """Start a receive from a pipeline rank.

        Args:
            tensor: The memory for the tensor, contiguous.
            peer: The pipeline rank that sends it.
            lane: The lane of the instruction.
        """
        if self.uses_tags:
            return cast(Message, self.group.recv([tensor], peer, int(lane)))
        return cast(Message, dist.irecv(tensor, group=self.group, group_src=peer))
