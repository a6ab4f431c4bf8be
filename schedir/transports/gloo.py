"""The transport between processes on CPUs, over Gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from schedir.analysis.progress_models import ProgressModel
from schedir.ir.isa.instructions import Lane
from schedir.transports.process_transport import ProcessTransport
from schedir.transports.transport import Work


def require_cpus(processes: int) -> None:
    """Accept any number of processes, because every machine has a CPU.

    Args:
        processes: The number of processes on this machine.
    """


def initialise(timeout: float, **init_args: Any) -> torch.device:
    """Initialise torch.distributed over Gloo.

    Args:
        timeout: The timeout of the default process group, in seconds.
        **init_args: Arguments of `init_process_group`. Without arguments, torch uses the
            environment variables that torchrun sets.

    Returns:
        The device of the tensors: the CPU.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **init_args)
    return torch.device("cpu")


class GlooTransport(ProcessTransport):
    """The transport between processes on CPUs. Its progress model is `per_edge`.

    Gloo matches messages by tag. Each lane has a tag, so each directed edge is a queue that no
    other edge can delay.

    Args:
        program: The program that the transport runs.
        timeout: The timeout of the transport's groups in seconds, see `ProcessTransport`.
        device: The device of the tensors.
        max_message_bytes: Not used.
        group: The process group that runs the program. By default all processes run it.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: See `ProcessTransport`.

    Example:
        >>> import schedir
        >>> from torch import distributed
        >>> from schedir.runtime import GlooTransport
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(),
        ...     rank=0, world_size=1)
        >>> one = schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(ranks=1, microbatches=4))
        >>> GlooTransport(one).progress_model
        'per_edge'
        >>> GlooTransport(schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(ranks=4, microbatches=4), dp=2))
        Traceback (most recent call last):
            ...
        schedir.errors.ModelError: gpipe: there is 1 process, but pp 4 x tp 1 x dp 2 needs 8
          hint: torchrun --nproc-per-node 8, or compile a program whose pp x tp x dp is 1
        >>> distributed.destroy_process_group()
    """

    progress_model: ProgressModel = "per_edge"
    has_pipeline_group = True

    def send(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `schedir.transports.transport.Transport.send`. A thread of Gloo sends the message."""
        # Calling the group directly avoids the lookups that dist.isend does for each message.
        return cast(Work, self.pipeline_group.send([tensor], peer, lane))

    def recv(self, tensor: Tensor, peer: int, lane: Lane) -> Work:
        """See `schedir.transports.transport.Transport.recv`."""
        return cast(Work, self.pipeline_group.recv([tensor], peer, lane))

    def disconnect(self) -> None:
        """See `ProcessTransport.disconnect`.

        Gloo closes the connections of a group when the last reference to the group is dropped.
        """
        pipeline_group: Any = self.pipeline_group
        self.pipeline_group: Any = None
        if pipeline_group is not None:
            dist.destroy_process_group(pipeline_group)
