"""Helpers for real NCCL between processes on one GPU, which NCCL treats as separate hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from schedir.ir.program import Program
from schedir.transports.gpu_selection import HOST_ID_VARIABLE, SHARED_GPU_VARIABLES
from schedir.transports.nccl import initialise, nccl_transport
from schedir.transports.p2p_groups import EdgeGroups, GroupedMessages

Kind = Literal["per_edge", "grouped"]

# A rehearsal uses a CPU in place of the GPU, and Gloo in place of NCCL. It shows that these tests
# run. See `stand_in`.
REHEARSED = os.environ.get("SCHEDIR_REHEARSAL") == "1"

# These "hosts" communicate over sockets of this machine, and their kernels take turns on the GPU,
# which is correct but slow. One protocol and one ring need the fewest turns.
VARIABLES = SHARED_GPU_VARIABLES | {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LL_THRESHOLD": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_MIN_CTAS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def share_gpu(rank: int, folder: str) -> torch.device:
    """Replace the Gloo process group that `spawn.run` created by one of NCCL."""
    if REHEARSED:
        return torch.device("cpu")
    world = dist.get_world_size()
    dist.barrier()  # no process leaves before all have arrived
    dist.destroy_process_group()
    os.environ.update(VARIABLES)
    os.environ.update({HOST_ID_VARIABLE: f"schedir-{rank}", "LOCAL_RANK": f"{rank}"})
    os.environ["LOCAL_WORLD_SIZE"] = f"{world}"
    store = Path(folder, "nccl").as_uri()
    return initialise(120.0, init_method=store, rank=rank, world_size=world)


def make_transport(
    program: Program, device: torch.device, kind: Kind = "per_edge"
) -> EdgeGroups | GroupedMessages:
    """Return the transport of a program over NCCL."""
    if not REHEARSED:
        return nccl_transport(program, device, kind)
    transport = EdgeGroups(program) if kind == "per_edge" else GroupedMessages(program)
    transport.uses_static_buffers = True
    return transport


@contextmanager
def no_wait() -> Iterator[None]:
    """Raise an error if an operation makes the host wait for the GPU within the context."""
    if REHEARSED:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wait_for_device() -> None:
    """Wait for all work on the GPU, and release cached memory, for which torch also waits."""
    if not REHEARSED:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
