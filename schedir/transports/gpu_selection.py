"""Choose the GPU of a process, and check its preconditions.

What goes wrong here later goes wrong as a hang, so it is refused before a process group exists.
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

# A process of its own "host": NCCL refuses two ranks on one GPU of one host.
HOST_ID_VARIABLE = "NCCL_HOSTID"
SHARED_GPU_VARIABLES = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# How many queues the host has to a GPU: streams that share one wait for each other.
QUEUES_VARIABLE, MIN_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8
_SHARED_GPU_KEY = "schedir: processes of one GPU"


class _RefusedVariable(NamedTuple):
    """Variables, and which of their values are refused: more than `max_value`, or one of
    `refused_values`."""

    names: tuple[str, ...]
    reason: str
    refused_values: tuple[str, ...] = ()
    max_value: int | None = None
    hint: str = "unset it"

    def refuses(self, value: str) -> bool:
        if self.max_value is None:
            return value.lower() in self.refused_values
        return value.isdecimal() and int(value) > self.max_value


_TRUE_VALUES = ("1", "true", "yes", "on", "y", "t")
_HOST_WAITS_REASON = (
    "the host would wait inside a step, in Stream order, for what others have yet to issue"
)
_REFUSED_VARIABLES: Final = (
    _RefusedVariable(
        (QUEUES_VARIABLE,),
        "streams that share a hardware queue wait for each other, and a receive that waits holds "
        "up the computation behind it, for ever",
        tuple(map(str, range(MIN_QUEUES))),
        hint="unset it, or 32",
    ),
    _RefusedVariable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING"),
        _HOST_WAITS_REASON,
        _TRUE_VALUES,
    ),
    _RefusedVariable(("TORCH_DISTRIBUTED_DEBUG",), _HOST_WAITS_REASON, ("detail",)),
    _RefusedVariable(
        ("PYTORCH_NO_CUDA_MEMORY_CACHING",),
        "each tensor that is freed would wait for the whole GPU, beside receives that wait",
        max_value=-1,  # torch looks only if it is there
    ),
    _RefusedVariable(
        ("NCCL_LAUNCH_ORDER_IMPLICIT",),
        "communicators would start in the order in which the host issues them, and a receive that "
        "waits would hold up all others",
        max_value=0,
    ),
    _RefusedVariable(
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES",),
        "communicators would run one after the other, and a receive that waits would hold up all "
        "others",
        max_value=0,
    ),
    _RefusedVariable(
        (
            "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_PEER",
            "NCCL_NCHANNELS_PER_NET_PEER",
        ),
        "it counts for each edge, whose receive would keep as many multiprocessors from what "
        "computes while it waits",
        max_value=MAX_CTAS,
        hint=f"unset it, or {MAX_CTAS} at most",
    ),
)  # fmt: skip


def require_gpus(
    processes: int, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse a machine, or its environment, that cannot run `processes` ranks over NCCL.

    `gpus` is how many there are, counted unless told.  More processes than GPUs may share them
    for a test, if each says by NCCL_HOSTID that it is a host of its own.  Raises UsageError.
    """
    if gpus is None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        without = torch.version.cuda is None
        raise UsageError(
            "device cuda needs a GPU, and torch sees none",
            hint="this torch is built without CUDA" if without else "nvidia-smi should list one",
        )
    said = read_nccl_files(environ) | dict(environ)
    for refused in _REFUSED_VARIABLES:
        for name in refused.names:
            if refused.refuses(said.get(name, "").strip()):
                raise UsageError(f"{name} is {said[name]}: {refused.reason}", hint=refused.hint)
    if processes <= gpus:
        return
    if HOST_ID_VARIABLE not in environ:
        if gpus == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
            # a launcher may show each process one of its own: `require_distinct_gpus`
            # will tell
            return
        raise UsageError(
            f"{processes} processes on this machine, and {gpus} GPU{'s' * (gpus > 1)}",
            hint=f"to share one in a test, set {HOST_ID_VARIABLE} to a name of its own for "
            "each process",
        )
    for name, value in SHARED_GPU_VARIABLES.items():
        if environ.get(name) != value:
            raise UsageError(
                f"processes share a GPU ({HOST_ID_VARIABLE} is set), but {name} is not "
                f"{value}: they would "
                "look for each other's memory",
                hint=" ".join(f"{n}={v}" for n, v in SHARED_GPU_VARIABLES.items()),
            )


def read_nccl_files(environ: Mapping[str, str]) -> dict[str, str]:
    """What NCCL's files set, as variables: a machine's, and before it the user's."""
    own = environ.get("NCCL_CONF_FILE") or (environ.get("HOME") or "/nonexistent") + "/.nccl.conf"
    found: dict[str, str] = {}
    for path in (Path("/etc/nccl.conf"), Path(own)):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        split = (line.partition("=") for line in lines if not line.startswith("#"))
        found |= {name.strip(): value.strip() for name, equals, value in split if equals}
    return found


def take_gpu(
    local_rank: int, processes: int, environ: Mapping[str, str] = os.environ
) -> torch.device:
    """The GPU of the process that is number `local_rank` of `processes` on this machine, made
    current.  Raises as `require_gpus`."""
    require_gpus(processes, environ=environ)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def require_distinct_gpus(store: Any, rank: int, processes: int, gpu: str, host: str) -> None:
    """Refuse two processes of one GPU that NCCL takes for one host's: `gpu` names the GPU.

    All processes must call this, with the store where they meet: before NCCL does, which would
    say less.  The first compares, and tells the others.  Raises ModelError in each.
    """
    keys = [f"schedir: GPU of process {other}" for other in range(processes)]
    store.set(keys[rank], f"{gpu}\n{host}")
    if rank == 0:
        store.set(_SHARED_GPU_KEY, json.dumps(_find_shared_gpu(store.multi_get(keys))))
    if twins := json.loads(store.get(_SHARED_GPU_KEY)):
        first, other, both = twins
        raise ModelError(
            f"processes {first} and {other} are on one GPU, {both}, and on one host",
            hint="each process takes the GPU of its LOCAL_RANK; to share one in a test, set "
            f"{HOST_ID_VARIABLE} to another name for each",
        )


def _find_shared_gpu(gpus_and_hosts: Sequence[bytes]) -> tuple[int, int, str] | None:
    """The first process that has the GPU and the host of an earlier one, and that GPU."""
    seen: dict[bytes, int] = {}
    for other, who in enumerate(gpus_and_hosts):
        first = seen.setdefault(who, other)
        if first != other:
            return first, other, who.decode().partition("\n")[0]
    return None
