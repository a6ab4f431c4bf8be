"""NCCL: the transports of `p2p_groups` on GPUs.

Lanes are CUDA streams: computation is on the stream that is current when a step runs, messages are
on one that torch has for each process group, and collectives on two of ours.  Events order both
sides.  A Work's `wait` lets the current stream wait, and never the host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from schedir.analysis.progress_models import ProgressModel, get_model_row
from schedir.errors import ModelError, UsageError
from schedir.ir.program import Program
from schedir.transports.gloo import collect_group_rows
from schedir.transports.gpu_selection import (
    HOST_ID_VARIABLE,
    QUEUES_VARIABLE,
    require_distinct_gpus,
    take_gpu,
)
from schedir.transports.hardware_queue_probe import make_cuda_probe, require_safe_queues
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages, directed_edges

# ---------------------------------------------------------------- hardware queues

# Streams that share a hardware queue wait for each other, and no program shows this.  A GPU has 32,
# and CUDA_DEVICE_MAX_CONNECTIONS says how many CUDA uses, 8 unless it is set (CUDA C++ Programming
# Guide, "CUDA Environment Variables").

MAX_HARDWARE_QUEUES: Final = 32
DEFAULT_HARDWARE_QUEUES: Final = 8  # the default of CUDA


def count_streams(
    program: Program,
    rank: int,
    progress_model: ProgressModel,
    extra_programs: Sequence[Program] = (),
) -> dict[str, int]:
    """How many streams have work in a step of a rank over NCCL, by what they are for.

    `progress_model` is that of the transport: `per_edge` has a communicator for each directed edge,
    others one for all messages.  A communicator launches its kernels on a stream that it is given,
    and lets one of its own follow.  torch has a stream for each group whose messages it moves, and
    for the layers' group, where a sum runs beside what computes.  Collectives run on one of ours
    for gathers and one for reductions.  A step that is recorded has one for each queue of receives,
    which is counted in any case.  Communicators that no step uses are not.  Those that
    `extra_programs` programs beside the first use are.
    """
    edges = [e for e in directed_edges(program, *extra_programs) if rank in (e.source, e.target)]
    queues = len(edges) if get_model_row(progress_model).has_direction_queues else bool(edges)
    received = {
        e if get_model_row(progress_model).has_direction_queues else None
        for e in edges
        if e.target == rank
    }
    first = rank * program.tp  # of this rank's processes
    groups = [
        group
        for group, rows in collect_group_rows(program, *extra_programs).items()
        if (rows == first).any()
    ]
    reductions = len(groups) - ("tp" in groups)
    found = {
        "computation": 1,
        "layers": 2 * (program.tp > 1),
        "gathers": 2 * (program.tp > 1),
        "reductions": 1 + reductions,
        "messages": 2 * queues,
        "records": len(received),
    }
    return {name: number for name, number in found.items() if number}


def require_enough_queues(
    program: Program,
    progress_model: ProgressModel,
    environ: Mapping[str, str] = os.environ,
    extra_programs: Sequence[Program] = (),
) -> None:
    """Refuse a program, with `extra_programs` beside it, of which a rank has more streams than
    there are hardware queues.

    Raises ModelError, which says what they are for.
    """
    said = environ.get(QUEUES_VARIABLE, "")
    has = min(MAX_HARDWARE_QUEUES, int(said) if said.isdecimal() else DEFAULT_HARDWARE_QUEUES)
    each = [
        count_streams(program, rank, progress_model, extra_programs)
        for rank in range(program.shape.ranks)
    ]
    most = max(range(len(each)), key=lambda rank: sum(each[rank].values()))
    if (needs := sum(each[most].values())) > has:
        parts = ", ".join(f"{number} for {name}" for name, number in each[most].items())
        hint = f"{QUEUES_VARIABLE}={MAX_HARDWARE_QUEUES}, set before CUDA starts"
        if needs > MAX_HARDWARE_QUEUES:
            hint = 'transport = "nccl_grouped", which has one communicator for all messages'
        raise ModelError(
            f"rank {most} has {needs} streams ({parts}), and its GPU {has} hardware queues: "
            "streams that share one wait for each other, and may do so for ever",
            program=program.name,
            hint=hint,
        )


# ---------------------------------------------------------------- initialisation


BACKENDS = "cpu:gloo,cuda:nccl"  # what processes agree on goes over Gloo
# Set where the environment does not say otherwise, under any of the names that torch knows.
DEFAULT_VARIABLES: Final[dict[tuple[str, ...], str]] = {
    (QUEUES_VARIABLE,): "32",
    # The host's group would connect all processes with all others, n x n reads of the store.
    ("TORCH_GLOO_LAZY_INIT",): "1",
    # That an edge's messages are one queue is what an edge is: no reason to warn.
    ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",): "false",
    # Memory in pieces is none that the allocator waits for the device to get back.
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
    # The flight recorder: what was issued last, for a hang.
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
}


def initialise(timeout: float, **init_args: Any) -> torch.device:
    """Initialise torch.distributed over NCCL, and Gloo for the host; returns this process's GPU.

    Processes are found as torchrun says, or as `init_args` tells `init_process_group`.  Raises
    UsageError or ModelError for machines, variables or neighbours with which it cannot work.
    """
    set_default_variables(os.environ)
    there = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    device = take_gpu(int(os.environ.get("LOCAL_RANK", "0")), there)
    if not dist.is_nccl_available():
        raise UsageError("this torch is built without NCCL")
    init_args = join_rendezvous(timeout, **init_args)
    card = str(torch.cuda.get_device_properties(device).uuid)
    host = os.environ.get(HOST_ID_VARIABLE, socket.gethostname())
    require_distinct_gpus(
        init_args["store"], init_args["rank"], init_args["world_size"], card, host
    )
    # With its device a group is connected when it is made, and not at first use.
    dist.init_process_group(
        BACKENDS, timeout=timedelta(seconds=timeout), device_id=device, **init_args
    )
    return device


def set_default_variables(environ: MutableMapping[str, str]) -> None:
    """Set what is not set, before torch begins with CUDA and NCCL, which read it once."""
    for names, value in DEFAULT_VARIABLES.items():
        if not any(name in environ for name in names):
            environ[names[0]] = value


def join_rendezvous(
    timeout: float, store: Any = None, rank: int = -1, world_size: int = -1, **init_args: Any
) -> dict[str, Any]:
    """The store at which processes meet, this one's number, and how many they are: what
    `init_process_group` is told."""
    if store is None:
        patience = timedelta(seconds=timeout)
        url = init_args.pop("init_method", "env://")
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=patience))
        store.set_timeout(patience)
    return {"store": store, "rank": rank, "world_size": world_size, **init_args}


# ---------------------------------------------------------------- transports


class NCCLEdge(EdgeGroups):
    """Each directed edge has a communicator.  Raises as Edge."""

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str,
        max_message_bytes: int = 0,
        extra_programs: Sequence[Program] = (),
    ) -> None:
        _require_cuda(device, program)
        require_enough_queues(program, self.progress_model, extra_programs=extra_programs)
        super().__init__(
            program,
            timeout,
            device=device,
            max_message_bytes=max_message_bytes,
            extra_programs=extra_programs,
        )
        touch = make_cuda_probe(self, device)
        for one in self.programs:
            require_safe_queues(one, self, touch)


class NCCLGrouped(GroupedMessages):
    """The pipeline has one communicator.  Raises as Grouped."""

    def __init__(
        self,
        program: Program,
        timeout: float | None = None,
        *,
        device: torch.device | str,
        max_message_bytes: int = 0,
        extra_programs: Sequence[Program] = (),
    ) -> None:
        _require_cuda(device, program)
        super().__init__(program, timeout, device=device, extra_programs=extra_programs)


def _require_cuda(device: torch.device | str, program: Program) -> None:
    if torch.device(device).type != "cuda":
        raise ModelError(f"NCCL moves tensors of GPUs, not of {device}", program=program.name)


def nccl_transport(
    program: Program,
    device: torch.device,
    kind: Literal["per_edge", "grouped"] = "per_edge",
    timeout: float | None = None,
    *,
    max_message_bytes: int = 0,
    extra_programs: Sequence[Program] = (),
) -> NCCLEdge | NCCLGrouped:
    """The transport of a program on GPUs, connected and warm; after `transports.nccl.initialise`.

    "per_edge" gives each directed edge a communicator, "grouped" one to the pipeline.  A program
    must be proven for the model of its kind.  `max_message_bytes` is how many bytes one has at
    most, 0 if that is not known.  `extra_programs` are programs beside it on the same stages.

    What is received and what is sent lies in memory that is made once, with room for a boundary in
    each slot of the program: compile it with `buffer_sharing="latency_preserving"`.  Without, each
    value has a slot of its own, and a rank of 1F1B on 8 ranks with 64 microbatches makes 256
    boundaries, not 6.

    >>> import schedir, torch
    >>> from schedir.runtime import nccl_transport
    >>> program = schedir.compile(schedir.schedules.gpipe,
    ...     schedir.PipelineShape(ranks=2, microbatches=4))
    >>> nccl_transport(program, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    schedir.errors.ModelError: gpipe: NCCL moves tensors of GPUs, not of cpu
    """
    make = NCCLGrouped if kind == "grouped" else NCCLEdge
    return make(
        program,
        timeout,
        device=device,
        max_message_bytes=max_message_bytes,
        extra_programs=extra_programs,
    )
