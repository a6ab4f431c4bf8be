"""Count how often a step allocated GPU memory.

What steps need is asked for before the first one (`Executor.step`).  To ask for more, or to give
some back, may wait for all that runs on the GPU, and so for a receive that waits for its peer.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_ALLOCATION_STATS: Final = ("num_device_alloc", "num_device_free", "num_alloc_retries")


def count_allocations(device: torch.device) -> int:
    """How often torch has asked a GPU for memory so far, in this process, or given some back; an
    allocation that failed and was tried again counts, too.  0 of any other device."""
    if device.type != "cuda":
        return 0
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return sum(int(stats.get(name, 0)) for name in _ALLOCATION_STATS)


def describe_growth(processes: int, total_processes: int) -> str:
    """What to tell of a run in which so many of its processes have asked after the first step."""
    return (
        f"memory: {processes} of {total_processes} processes asked their GPU for memory after "
        "the first step; "
        "a step that does may wait for ever beside receives that are posted early, unless its "
        "program lives through it (schedir check --host-device-sync)"
    )
