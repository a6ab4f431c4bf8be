"""Choose the GPU of a process, and check its environment before a process group exists.

An unsuitable environment would make a later step hang, so it is refused early.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from schedir.errors import ModelError, UsageError
from schedir.transports.process_groups import MAX_CTAS

# NCCL refuses two ranks on one GPU of one host. If NCCL_HOSTID has a different value in each
# process, NCCL treats each process as a separate host.
HOST_ID_VARIABLE = "NCCL_HOSTID"
SHARED_GPU_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# CUDA_DEVICE_MAX_CONNECTIONS sets the number of hardware queues of a GPU. Streams that share a
# queue wait for each other, so `require_gpus` refuses fewer than 8 queues.
QUEUES_VARIABLE, MIN_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8
_SHARED_GPU_KEY = "schedir: processes of one GPU"


class _RefusedVariable(NamedTuple):
    """Environment variables, and their refused values.

    Attributes:
        names: The names of the variables.
        reason: The reason, for the error message.
        refused_values: The refused values, in lower case, if `max_value` is None.
        max_value: The largest allowed value. If it is None, `refused_values` applies.
        hint: The remedy, for the error message.
    """

    names: tuple[str, ...]
    reason: str
    refused_values: tuple[str, ...] = ()
    max_value: int | None = None
    hint: str = "unset this variable"

    def refuses(self, value: str) -> bool:
        if self.max_value is None:
            return value.lower() in self.refused_values
        return value.isdecimal() and int(value) > self.max_value


_TRUE_VALUES = ("1", "true", "yes", "on", "y", "t")
_HOST_WAITS_REASON = (
    "the host would wait in a step for operations that other ranks have not issued yet"
)
_REFUSED_VARIABLES: Final = (
    _RefusedVariable(
        (QUEUES_VARIABLE,),
        "streams that share a hardware queue wait for each other, and a waiting receive may block "
        "the computation after it for ever",
        tuple(map(str, range(MIN_QUEUES))),
        hint="unset this variable, or set it to 32",
    ),
    _RefusedVariable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING"),
        _HOST_WAITS_REASON,
        _TRUE_VALUES,
    ),
    _RefusedVariable(("TORCH_DISTRIBUTED_DEBUG",), _HOST_WAITS_REASON, ("detail",)),
    _RefusedVariable(
        ("PYTORCH_NO_CUDA_MEMORY_CACHING",),
        "each free of a tensor would wait for all work of the GPU, and so for receives",
        max_value=-1,  # torch ignores the value: any value disables the cache
    ),
    _RefusedVariable(
        ("NCCL_LAUNCH_ORDER_IMPLICIT",),
        "communicators would start in the order in which the host issues them, and a waiting "
        "receive would block all others",
        max_value=0,
    ),
    _RefusedVariable(
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES",),
        "communicators would run one after the other, and a waiting receive would block all others",
        max_value=0,
    ),
    _RefusedVariable(
        (
            "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_PEER",
            "NCCL_NCHANNELS_PER_NET_PEER",
        ),
        "a waiting receive of each edge would take this number of multiprocessors from computation",
        max_value=MAX_CTAS,
        hint=f"unset this variable, or set it to {MAX_CTAS} or less",
    ),
)  # fmt: skip


def require_gpus(
    processes: int, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse a machine or an environment that cannot run the given number of ranks over NCCL.

    In a test, processes may share GPUs if each process sets NCCL_HOSTID to a different name.

    Args:
        processes: The number of processes on this machine.
        gpus: The number of GPUs. By default torch counts them.
        environ: The environment variables.

    Raises:
        UsageError: There is no GPU, a variable has a refused value, or there are more processes
            than GPUs and the processes cannot share them.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        lacks_cuda = torch.version.cuda is None
        raise UsageError(
            "device 'cuda' needs a GPU, but torch finds none",
            hint="on a machine without a GPU, use the device 'cpu'; otherwise "
            + ("install a torch with CUDA" if lacks_cuda else "check that nvidia-smi lists a GPU"),
        )
    variables = read_nccl_files(environ) | dict(environ)
    for rule in _REFUSED_VARIABLES:
        for name in rule.names:
            if rule.refuses(variables.get(name, "").strip()):
                raise UsageError(f"{name} is {variables[name]}: {rule.reason}", hint=rule.hint)
    if processes <= gpus:
        return
    if HOST_ID_VARIABLE not in environ:
        if gpus == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
            # A launcher may have given each process a different GPU. `require_distinct_gpus` checks
            # that later.
            return
        raise UsageError(
            f"{processes} processes need a GPU each, but this machine has {gpus}",
            hint=f"to share a GPU in a test, set {HOST_ID_VARIABLE} to a different name for "
            "each process",
        )
    for name, value in SHARED_GPU_VARIABLES.items():
        if environ.get(name) != value:
            raise UsageError(
                f"processes share a GPU ({HOST_ID_VARIABLE} is set), but {name} is not {value}, "
                "so NCCL would try to access the memory of other processes",
                hint="set " + " ".join(f"{n}={v}" for n, v in SHARED_GPU_VARIABLES.items()),
            )


def read_nccl_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL reads from its configuration files.

    The user's file overrides /etc/nccl.conf.

    Args:
        environ: The environment variables. NCCL_CONF_FILE has the path of the user's file. By
            default the file is .nccl.conf in the folder HOME.

    Returns:
        The values by name.
    """
    user_file = (
        environ.get("NCCL_CONF_FILE") or (environ.get("HOME") or "/nonexistent") + "/.nccl.conf"
    )
    variables: dict[str, str] = {}
    for path in (Path("/etc/nccl.conf"), Path(user_file)):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        assignments = (line.partition("=") for line in lines if not line.startswith("#"))
        variables |= {
            name.strip(): value.strip() for name, separator, value in assignments if separator
        }
    return variables


def take_gpu(
    local_rank: int, processes: int, environ: Mapping[str, str] = os.environ
) -> torch.device:
    """Make the GPU of this process the current CUDA device, and return it.

    Args:
        local_rank: The index of the process on this machine.
        processes: The number of processes on this machine.
        environ: The environment variables.

    Returns:
        The device: `local_rank` modulo the number of GPUs.

    Raises:
        UsageError: See `require_gpus`.
    """
    require_gpus(processes, environ=environ)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def require_distinct_gpus(store: Any, rank: int, processes: int, gpu: str, host: str) -> None:
    """Refuse two processes on the same GPU of the same host, which NCCL would also refuse.

    All processes must call this function before they create NCCL communicators, because the error
    of NCCL does not name the processes. Process 0 compares the GPUs, and the other processes read
    the result from the store.

    Args:
        store: The store of the process group.
        rank: The index of this process among all processes.
        processes: The number of all processes.
        gpu: A unique name of this process's GPU.
        host: The name of this process's host, as NCCL uses it.

    Raises:
        ModelError: Two processes have the same GPU and host. All processes raise this error.
    """
    keys = [f"schedir: GPU of process {process}" for process in range(processes)]
    store.set(keys[rank], f"{gpu}\n{host}")
    if rank == 0:
        store.set(_SHARED_GPU_KEY, json.dumps(_find_shared_gpu(store.multi_get(keys))))
    if shared_gpu := json.loads(store.get(_SHARED_GPU_KEY)):
        first_process, process, gpu_name = shared_gpu
        raise ModelError(
            f"processes {first_process} and {process} use the same GPU {gpu_name} of the same host",
            hint="use the GPU of LOCAL_RANK in each process; to share a GPU in a test, set "
            f"{HOST_ID_VARIABLE} to a different name for each process",
        )


def _find_shared_gpu(gpus_and_hosts: Sequence[bytes]) -> tuple[int, int, str] | None:
    """Return the first two processes with the same GPU and host, and the GPU, or None."""
    process_by_gpu: dict[bytes, int] = {}
    for process, gpu_and_host in enumerate(gpus_and_hosts):
        first_process = process_by_gpu.setdefault(gpu_and_host, process)
        if first_process != process:
            return first_process, process, gpu_and_host.decode().partition("\n")[0]
    return None
