"""NCCL: the transports of `edges` on GPUs.

Lanes are CUDA streams: computation is on the stream that is current when a step runs, and each
process group has a stream of its own, for which torch orders both sides by events.  A Work's
`wait` lets the current stream wait, and never the host.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from schedir.errors import ModelError, UsageError
from schedir.graph import Model
from schedir.program import Program
from schedir.runtime.c10d import Processes
from schedir.runtime.cuda import HOST, refuse_twins, take_gpu
from schedir.runtime.edges import Edge, Grouped

Kind = Literal["edge", "grouped"]
MODELS: Final[dict[Kind, Model]] = {"edge": Edge.model, "grouped": Grouped.model}
BACKENDS = "cpu:gloo,cuda:nccl"  # what processes agree on goes over Gloo
CTAS = 4  # multiprocessors that one edge may take from what computes


def initialise(timeout: float, **how: Any) -> torch.device:
    """Initialise torch.distributed over NCCL, and Gloo for the host; returns this process's GPU.

    Processes are found as torchrun says, or as `how` tells `init_process_group`.  Raises
    UsageError or ModelError for machines, variables or neighbours with which it cannot work.
    """
    there = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    device = take_gpu(int(os.environ.get("LOCAL_RANK", "0")), there)
    if not dist.is_nccl_available():
        raise UsageError("this torch is built without NCCL")
    dist.init_process_group(BACKENDS, timeout=timedelta(seconds=timeout), device_id=device, **how)
    card = str(torch.cuda.get_device_properties(device).uuid)
    refuse_twins(card, os.environ.get(HOST, socket.gethostname()))
    return device


def nccl(
    program: Program, device: torch.device, kind: Kind = "edge", timeout: float | None = None
) -> Processes:
    """The transport of a program on GPUs, connected and warm; after `initialise`.

    "edge" gives each directed edge a communicator, with few multiprocessors and a stream of high
    priority; "grouped" one to the pipeline.  A program must be proven for the model of its kind.
    """
    if device.type != "cuda":
        raise ModelError(f"NCCL moves tensors of GPUs, not of {device}", program=program.name)
    if kind == "grouped":
        return Grouped(program, timeout, device=device)
    return Edge(program, timeout, device=device, backend="nccl", options=_edge_options)


def _edge_options() -> Any:
    """Of a communicator that must not starve what computes beside it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, CTAS
    return options
