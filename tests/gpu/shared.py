"""Real NCCL between processes of one GPU: each says that it is a host of its own."""

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

# A rehearsal: a CPU in the place of the GPU, and Gloo in that of NCCL.  What it shows is that these
# tests run; see `stand_in`.
REHEARSED = os.environ.get("SCHEDIR_REHEARSAL") == "1"

# "Hosts" talk over sockets of this machine. Their kernels take turns on the GPU: all correct, and
# nothing fast. One protocol and one ring have the fewest turns.
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
    """In a process that `spawn.run` started: exchange its Gloo world for one of NCCL."""
    if REHEARSED:
        return torch.device("cpu")
    world = dist.get_world_size()
    dist.barrier()  # nobody leaves while another still arrives
    dist.destroy_process_group()
    os.environ.update(VARIABLES)
    os.environ.update({HOST_ID_VARIABLE: f"schedir-{rank}", "LOCAL_RANK": f"{rank}"})
    os.environ["LOCAL_WORLD_SIZE"] = f"{world}"
    store = Path(folder, "nccl").as_uri()
    return initialise(120.0, init_method=store, rank=rank, world_size=world)


def over(
    program: Program, device: torch.device, kind: Kind = "per_edge"
) -> EdgeGroups | GroupedMessages:
    """The transport of a program over NCCL."""
    if not REHEARSED:
        return nccl_transport(program, device, kind)
    transport = EdgeGroups(program) if kind == "per_edge" else GroupedMessages(program)
    transport.uses_static_buffers = True
    return transport


@contextmanager
def no_wait() -> Iterator[None]:
    """Within this, what makes the host wait for the GPU unasked raises."""
    if REHEARSED:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wait_for_device() -> None:
    """Wait for all that runs on the GPU, and give memory back, which torch waits for as well."""
    if not REHEARSED:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
