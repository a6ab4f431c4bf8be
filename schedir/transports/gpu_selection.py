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
from schedir.transports.process_groups import MOST

# A process of its own "host": NCCL refuses two ranks on one GPU of one host.
HOST = "NCCL_HOSTID"
SHARED = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# How many queues the host has to a GPU: streams that share one wait for each other.
QUEUES, ENOUGH = "CUDA_DEVICE_MAX_CONNECTIONS", 8
_TWINS = "schedir: processes of one GPU"


class _RefusedVariable(NamedTuple):
    """Variables, and which of their values are refused: more than `most`, or one of `values`."""

    names: tuple[str, ...]
    why: str
    values: tuple[str, ...] = ()
    most: int | None = None
    hint: str = "unset it"

    def has(self, value: str) -> bool:
        if self.most is None:
            return value.lower() in self.values
        return value.isdecimal() and int(value) > self.most


_YES = ("1", "true", "yes", "on", "y", "t")
_HOST_WAITS = (
    "the host would wait inside a step, in Stream order, for what others have yet to issue"
)
_REFUSED: Final = (
    _RefusedVariable(
        (QUEUES,),
        "streams that share a hardware queue wait for each other, and a receive that waits holds "
        "up the computation behind it, for ever",
        tuple(map(str, range(ENOUGH))),
        hint="unset it, or 32",
    ),
    _RefusedVariable(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING"),
        _HOST_WAITS,
        _YES,
    ),
    _RefusedVariable(("TORCH_DISTRIBUTED_DEBUG",), _HOST_WAITS, ("detail",)),
    _RefusedVariable(
        ("PYTORCH_NO_CUDA_MEMORY_CACHING",),
        "each tensor that is freed would wait for the whole GPU, beside receives that wait",
        most=-1,  # torch looks only if it is there
    ),
    _RefusedVariable(
        ("NCCL_LAUNCH_ORDER_IMPLICIT",),
        "communicators would start in the order in which the host issues them, and a receive that "
        "waits would hold up all others",
        most=0,
    ),
    _RefusedVariable(
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES",),
        "communicators would run one after the other, and a receive that waits would hold up all "
        "others",
        most=0,
    ),
    _RefusedVariable(
        (
            "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_PEER",
            "NCCL_NCHANNELS_PER_NET_PEER",
        ),
        "it counts for each edge, whose receive would keep as many multiprocessors from what "
        "computes while it waits",
        most=MOST,
        hint=f"unset it, or {MOST} at most",
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
    said = nccl_files(environ) | dict(environ)
    for refused in _REFUSED:
        for name in refused.names:
            if refused.has(said.get(name, "").strip()):
                raise UsageError(f"{name} is {said[name]}: {refused.why}", hint=refused.hint)
    if processes <= gpus:
        return
    if HOST not in environ:
        if gpus == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
            return  # a launcher may show each process one of its own: `refuse_twins` will tell
        raise UsageError(
            f"{processes} processes on this machine, and {gpus} GPU{'s' * (gpus > 1)}",
            hint=f"to share one in a test, set {HOST} to a name of its own for each process",
        )
    for name, value in SHARED.items():
        if environ.get(name) != value:
            raise UsageError(
                f"processes share a GPU ({HOST} is set), but {name} is not {value}: they would "
                "look for each other's memory",
                hint=" ".join(f"{n}={v}" for n, v in SHARED.items()),
            )


def nccl_files(environ: Mapping[str, str]) -> dict[str, str]:
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


def refuse_twins(store: Any, process: int, processes: int, card: str, host: str) -> None:
    """Refuse two processes of one GPU that NCCL takes for one host's: `card` names the GPU.

    All processes must call this, with the store where they meet: before NCCL does, which would
    say less.  The first compares, and tells the others.  Raises ModelError in each.
    """
    keys = [f"schedir: GPU of process {other}" for other in range(processes)]
    store.set(keys[process], f"{card}\n{host}")
    if process == 0:
        store.set(_TWINS, json.dumps(_twins(store.multi_get(keys))))
    if twins := json.loads(store.get(_TWINS)):
        first, other, both = twins
        raise ModelError(
            f"processes {first} and {other} are on one GPU, {both}, and on one host",
            hint="each process takes the GPU of its LOCAL_RANK; to share one in a test, set "
            f"{HOST} to another name for each",
        )


def _twins(cards: Sequence[bytes]) -> tuple[int, int, str] | None:
    """The first process that has the GPU and the host of an earlier one, and that GPU."""
    seen: dict[bytes, int] = {}
    for other, who in enumerate(cards):
        first = seen.setdefault(who, other)
        if first != other:
            return first, other, who.decode().partition("\n")[0]
    return None
