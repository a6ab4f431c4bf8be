"""Count how often torch allocated or freed GPU memory.

The warm-up steps allocate all memory that steps need (see `Executor.step`). A later allocation or
free may wait for all work on the GPU. This work may include a receive that waits for its peer.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_ALLOCATION_STATS: Final = ("num_device_alloc", "num_device_free", "num_alloc_retries")


def count_allocations(device: torch.device) -> int:
    """Return how often torch has allocated or freed memory of a GPU in this process.

    An allocation that failed and was retried also counts.

    Args:
        device: The device. The count is 0 for a device that is not a GPU.
    """
    if device.type != "cuda":
        return 0
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return sum(int(stats.get(name, 0)) for name in _ALLOCATION_STATS)


def describe_growth(processes: int, total_processes: int) -> str:
    """Return a warning about processes that allocated GPU memory after the first step.

    Args:
        processes: The number of processes that allocated GPU memory.
        total_processes: The number of processes of the run.
    """
    return (
        f"memory: {processes} of {total_processes} processes allocated GPU memory after the "
        "first step; such a step may hang if receives are posted early. "
        "`schedir check --host-device-sync` shows whether the program can hang"
    )
