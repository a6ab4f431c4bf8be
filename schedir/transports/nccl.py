"""NCCL: the transports of `edges` on GPUs.

Lanes are CUDA streams: computation is on the stream that is current when a step runs, and each
process group has a stream of its own, for which torch orders both sides by events.  A Work's
`wait` lets the current stream wait, and never the host.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from schedir.errors import ModelError, UsageError
from schedir.ir.program import Program
from schedir.transports.cuda import HOST, QUEUES, refuse_twins, take_gpu
from schedir.transports.edges import Edge, Grouped

BACKENDS = "cpu:gloo,cuda:nccl"  # what processes agree on goes over Gloo
CTAS = 4  # multiprocessors that one edge may take from what computes
# Set where the environment does not say otherwise.
VARIABLES: Final = {
    QUEUES: "32",
    # The host's group would connect all processes with all others, n x n reads of the store.
    "TORCH_GLOO_LAZY_INIT": "1",
    # That an edge's messages are one queue is what an edge is: no reason to warn.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def initialise(timeout: float, **how: Any) -> torch.device:
    """Initialise torch.distributed over NCCL, and Gloo for the host; returns this process's GPU.

    Processes are found as torchrun says, or as `how` tells `init_process_group`.  Raises
    UsageError or ModelError for machines, variables or neighbours with which it cannot work.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    there = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    device = take_gpu(int(os.environ.get("LOCAL_RANK", "0")), there)
    if not dist.is_nccl_available():
        raise UsageError("this torch is built without NCCL")
    how = meet(timeout, **how)
    card = str(torch.cuda.get_device_properties(device).uuid)
    host = os.environ.get(HOST, socket.gethostname())
    refuse_twins(how["store"], how["rank"], how["world_size"], card, host)
    # With its device a group is connected when it is made, and not at first use.
    dist.init_process_group(BACKENDS, timeout=timedelta(seconds=timeout), device_id=device, **how)
    return device


def meet(
    timeout: float, store: Any = None, rank: int = -1, world_size: int = -1, **how: Any
) -> dict[str, Any]:
    """The store at which processes meet, this one's number, and how many they are: what
    `init_process_group` is told."""
    if store is None:
        patience = timedelta(seconds=timeout)
        url = how.pop("init_method", "env://")
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=patience))
        store.set_timeout(patience)
    return {"store": store, "rank": rank, "world_size": world_size, **how}


class NCCLEdge(Edge):
    """Each directed edge has a communicator, with few multiprocessors and a stream of high
    priority.  Raises as Edge."""

    def __init__(
        self, program: Program, timeout: float | None = None, *, device: torch.device
    ) -> None:
        _require_cuda(device, program)
        options = partial(edge_options, timeout)
        super().__init__(program, timeout, device=device, backend="nccl", options=options)


class NCCLGrouped(Grouped):
    """The pipeline has one communicator.  Raises as Grouped."""

    def __init__(
        self, program: Program, timeout: float | None = None, *, device: torch.device
    ) -> None:
        _require_cuda(device, program)
        super().__init__(program, timeout, device=device)


def _require_cuda(device: torch.device, program: Program) -> None:
    if device.type != "cuda":
        raise ModelError(f"NCCL moves tensors of GPUs, not of {device}", program=program.name)


def nccl(
    program: Program,
    device: torch.device,
    kind: Literal["edge", "grouped"] = "edge",
    timeout: float | None = None,
) -> NCCLEdge | NCCLGrouped:
    """The transport of a program on GPUs, connected and warm; after `transports.nccl.initialise`.

    "edge" gives each directed edge a communicator, "grouped" one to the pipeline.  A program must
    be proven for the model of its kind.

    >>> import schedir, torch
    >>> from schedir.runtime import nccl
    >>> program = schedir.compile(schedir.schedules.gpipe, schedir.Plan(ranks=2, microbatches=4))
    >>> nccl(program, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    schedir.errors.ModelError: gpipe: NCCL moves tensors of GPUs, not of cpu
    """
    make = NCCLGrouped if kind == "grouped" else NCCLEdge
    return make(program, timeout, device=device)


def edge_options(timeout: float | None = None) -> Any:
    """Of a communicator that must not starve what computes beside it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, CTAS
    if timeout is not None:
        options._timeout = timedelta(seconds=timeout)  # as the group's, or torch warns
    return options
