"""Transports over NCCL on GPUs, based on the transports of `p2p_groups`.

Lanes are CUDA streams. Computation runs on the stream that is current during a step. Messages run
on the streams that torch creates for process groups, and collectives on streams of the transport.
Events order the streams. `Work.wait` makes the current stream wait, and never the host.
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
from schedir.transports.gpu_selection import (
    HOST_ID_VARIABLE,
    QUEUES_VARIABLE,
    require_distinct_gpus,
    take_gpu,
)
from schedir.transports.hardware_queue_probe import make_cuda_probe, require_safe_queues
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages, directed_edges
from schedir.transports.process_transport import collect_group_rows

# ---------------------------------------------------------------- hardware queues

# Streams that share a hardware queue wait for each other, and programs do not model this. A GPU has
# 32 queues. CUDA_DEVICE_MAX_CONNECTIONS sets the number that CUDA uses, which is 8 by default (CUDA
# C++ Programming Guide, "CUDA Environment Variables").

MAX_HARDWARE_QUEUES: Final = 32
DEFAULT_HARDWARE_QUEUES: Final = 8  # the default of CUDA_DEVICE_MAX_CONNECTIONS


def count_streams(
    program: Program,
    rank: int,
    progress_model: ProgressModel,
    extra_programs: Sequence[Program] = (),
) -> dict[str, int]:
    """Return the number of CUDA streams that a rank uses in a step over NCCL, by purpose.

    A communicator uses two streams: a stream of NCCL, and the launch stream of its kernels. Each
    group with messages, the group of the layers, and the group of the gathers use two streams each.
    Each group with reductions has a stream of NCCL, and all reductions share one launch stream.
    All-to-alls use three streams: two for the tokens, and the stream of NCCL of a second
    communicator for the numbers of tokens. This second communicator uses the launch stream of the
    reductions.

    If the timeline of a step is recorded, the step uses one more stream for each queue of receives.
    These streams are always counted. Communicators that no step uses are not counted.

    Args:
        program: The program that runs.
        rank: The pipeline rank.
        progress_model: The progress model of the transport. `per_edge` has a communicator for each
            directed edge. Other models have one communicator for all messages.
        extra_programs: Other programs that run on the same transport. Their communicators are
            counted, too.

    Returns:
        The numbers for "computation", "layers", "gathers", "all_to_alls", "reductions", "messages"
        and "records". A number that is 0 is left out.
    """
    edges = [e for e in directed_edges(program, *extra_programs) if rank in (e.source, e.target)]
    queues = len(edges) if get_model_row(progress_model).has_direction_queues else bool(edges)
    receive_queues = {
        e if get_model_row(progress_model).has_direction_queues else None
        for e in edges
        if e.target == rank
    }
    first_process = rank * program.tp  # the first process of this rank
    groups = [
        group
        for group, rows in collect_group_rows(program, *extra_programs).items()
        if (rows == first_process).any()
    ]
    reductions = len({*groups} - {"tp", "ep", "ep_counts"})
    counts = {
        "computation": 1,
        "layers": 2 * (program.tp > 1),
        "gathers": 2 * (program.tp > 1),
        "all_to_alls": 3 * (program.ep > 1),
        "reductions": 1 + reductions,
        "messages": 2 * queues,
        "records": len(receive_queues),
    }
    return {name: number for name, number in counts.items() if number}


def require_enough_queues(
    program: Program,
    progress_model: ProgressModel,
    environ: Mapping[str, str] = os.environ,
    extra_programs: Sequence[Program] = (),
) -> None:
    """Refuse a program if a rank uses more CUDA streams than CUDA has hardware queues.

    Args:
        program: The program that runs.
        progress_model: The progress model of the transport.
        environ: The environment variables. CUDA_DEVICE_MAX_CONNECTIONS is the number of queues.
        extra_programs: Other programs that run on the same transport.

    Raises:
        ModelError: A rank has too many streams. The error lists their purposes.
    """
    variable = environ.get(QUEUES_VARIABLE, "")
    num_queues = min(
        MAX_HARDWARE_QUEUES, int(variable) if variable.isdecimal() else DEFAULT_HARDWARE_QUEUES
    )
    counts_per_rank = [
        count_streams(program, rank, progress_model, extra_programs)
        for rank in range(program.shape.ranks)
    ]
    busiest = max(range(len(counts_per_rank)), key=lambda rank: sum(counts_per_rank[rank].values()))
    if (num_streams := sum(counts_per_rank[busiest].values())) > num_queues:
        parts = ", ".join(
            f"{number} for {name}" for name, number in counts_per_rank[busiest].items()
        )
        hint = f"set {QUEUES_VARIABLE}={MAX_HARDWARE_QUEUES} before CUDA starts"
        if num_streams > MAX_HARDWARE_QUEUES:
            hint = 'transport = "nccl_grouped", which uses one communicator for all messages'
        raise ModelError(
            f"rank {busiest} needs {num_streams} CUDA streams ({parts}), but its GPU has "
            f"{num_queues} hardware queues: streams that share a queue may wait for each other "
            "for ever",
            program=program.name,
            hint=hint,
        )


# ---------------------------------------------------------------- initialisation


BACKENDS = "cpu:gloo,cuda:nccl"  # Gloo exchanges the values that processes compare on the host.
# Alternative names of an environment variable -> its default value. The default is set only if the
# environment has none of the names.
DEFAULT_VARIABLES: Final[dict[tuple[str, ...], str]] = {
    (QUEUES_VARIABLE,): "32",
    # Without this variable, the Gloo group connects all pairs of n processes, which takes n x n
    # reads of the store.
    ("TORCH_GLOO_LAZY_INIT",): "1",
    # Otherwise torch warns that messages of one communicator run in order. This order is intended
    # for an edge.
    ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",): "false",
    # With expandable segments the allocator does not free and reallocate memory, which would
    # synchronise with the device.
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
    # The flight recorder lists the last operations of each process, to diagnose a hang.
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
}


def initialise(timeout: float, **init_args: Any) -> torch.device:
    """Initialise torch.distributed over NCCL for GPUs and Gloo for the host.

    Args:
        timeout: The timeout of the default process group, in seconds.
        **init_args: Arguments of `init_process_group`. Without arguments, torch uses the
            environment variables that torchrun sets.

    Returns:
        The GPU of this process.

    Raises:
        UsageError: The machine or its environment is unsuitable, see `require_gpus`, or torch has
            no NCCL.
        ModelError: Two processes have the same GPU.
    """
    set_default_variables(os.environ)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    device = take_gpu(int(os.environ.get("LOCAL_RANK", "0")), local_world_size)
    if not dist.is_nccl_available():
        raise UsageError("this torch is built without NCCL")
    init_args = join_rendezvous(timeout, **init_args)
    gpu_uuid = str(torch.cuda.get_device_properties(device).uuid)
    host = os.environ.get(HOST_ID_VARIABLE, socket.gethostname())
    require_distinct_gpus(
        init_args["store"], init_args["rank"], init_args["world_size"], gpu_uuid, host
    )
    # A group with a device is connected when it is created, not at its first use.
    dist.init_process_group(
        BACKENDS, timeout=timedelta(seconds=timeout), device_id=device, **init_args
    )
    return device


def set_default_variables(environ: MutableMapping[str, str]) -> None:
    """Set the default environment variables of `DEFAULT_VARIABLES`.

    Call this before torch initialises CUDA and NCCL, which read the variables only once.

    Args:
        environ: The environment variables, which are changed.
    """
    for names, value in DEFAULT_VARIABLES.items():
        if not any(name in environ for name in names):
            environ[names[0]] = value


def join_rendezvous(
    timeout: float, store: Any = None, rank: int = -1, world_size: int = -1, **init_args: Any
) -> dict[str, Any]:
    """Connect to the store of the processes, and return the arguments for `init_process_group`.

    Args:
        timeout: The timeout of the store, in seconds.
        store: The store. By default, the function connects to the store of `init_method`.
        rank: The index of this process, or -1 if an environment variable has it.
        world_size: The number of processes, or -1 if an environment variable has it.
        **init_args: Other arguments of `init_process_group`. `init_method` is env:// by default.

    Returns:
        `init_args` with the store, the rank and the world size. `init_method` is omitted if it
        determined the store.
    """
    if store is None:
        store_timeout = timedelta(seconds=timeout)
        url = init_args.pop("init_method", "env://")
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=store_timeout))
        store.set_timeout(store_timeout)
    return {"store": store, "rank": rank, "world_size": world_size, **init_args}


# ---------------------------------------------------------------- transports


class NCCLEdge(EdgeGroups):
    """A transport with a NCCL communicator for each directed edge.

    The constructor connects all edges. It then probes which CUDA streams share a hardware queue.

    Args:
        program: The program that the transport runs.
        timeout: See `ProcessTransport`.
        device: The GPU.
        max_message_bytes: The size of the largest message, in bytes, or 0 if it is unknown. This
            size determines the number of multiprocessors of a communicator.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: The device is not a GPU, or a rank has too many CUDA streams. Or streams share a
            hardware queue, and a program would therefore hang. Also see `EdgeGroups`.
    """

    def require_supported_device(self) -> None:
        """Refuse a device that is no GPU, and programs that need too many streams."""
        program, *extra_programs = self.programs
        _require_cuda(self.device, program)
        require_enough_queues(program, self.progress_model, extra_programs=extra_programs)

    def open_channels(self) -> None:
        """Connect all edges, and refuse programs that shared hardware queues would block."""
        super().open_channels()
        touch = make_cuda_probe(self, self.device)
        for program in self.programs:
            require_safe_queues(program, self, touch)


class NCCLGrouped(GroupedMessages):
    """A transport with one NCCL communicator for all messages of the pipeline.

    Args:
        program: The program that the transport runs.
        timeout: See `ProcessTransport`.
        device: The GPU.
        max_message_bytes: Not used.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: The device is not a GPU. Also see `GroupedMessages`.
    """

    def require_supported_device(self) -> None:
        """Refuse a device that is no GPU."""
        _require_cuda(self.device, self.programs[0])


def _require_cuda(device: torch.device | str, program: Program) -> None:
    if torch.device(device).type != "cuda":
        raise ModelError(f"NCCL needs tensors on a GPU, not on {device}", program=program.name)


def nccl_transport(
    program: Program,
    device: torch.device,
    kind: Literal["per_edge", "grouped"] = "per_edge",
    timeout: float | None = None,
    *,
    max_message_bytes: int = 0,
    extra_programs: Sequence[Program] = (),
) -> NCCLEdge | NCCLGrouped:
    """Create the transport of a program on GPUs, and connect it.

    Call `transports.nccl.initialise` first. The program must be proven free of deadlocks under the
    progress model of the transport: `per_edge` for "per_edge", and `per_device` for "grouped".

    The memory of messages is allocated once: one boundary for each slot of the program. Compile the
    program with `buffer_sharing="latency_preserving"`.
    Otherwise each value has its own slot: a rank of 1F1B on 8 ranks with 64 microbatches then
    allocates memory for 256 boundaries instead of 6.

    Args:
        program: The program.
        device: The GPU of this process.
        kind: "per_edge" for a communicator for each directed edge, or "grouped" for one
            communicator for the pipeline.
        timeout: See `ProcessTransport`.
        max_message_bytes: The size of the largest message, in bytes, or 0 if it is unknown.
        extra_programs: Other programs that run on the same mesh.

    Raises:
        ModelError: See `NCCLEdge` and `NCCLGrouped`.

    Example:
        >>> import schedir, torch
        >>> from schedir.runtime import nccl_transport
        >>> program = schedir.compile(schedir.schedules.gpipe,
        ...     schedir.PipelineShape(ranks=2, microbatches=4))
        >>> nccl_transport(program, torch.device("cpu"))
        Traceback (most recent call last):
            ...
        schedir.errors.ModelError: gpipe: NCCL needs tensors on a GPU, not on cpu
    """
    transport_class = NCCLGrouped if kind == "grouped" else NCCLEdge
    return transport_class(
        program,
        timeout,
        device=device,
        max_message_bytes=max_message_bytes,
        extra_programs=extra_programs,
    )
