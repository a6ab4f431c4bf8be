"""Copy scalars of a step to the host without waiting for the GPU.

A host that reads a number of a step right away waits until the device has done the step, and
the device then waits until the host has issued the next.  So the numbers are copied behind the
step, into pinned memory, and read when the next step has been issued.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from schedir.runtime.recording.stream_events import make_event


class AsyncScalarBuffer:
    """Memory for `count` numbers of each of `max_steps` steps that are on their way at once."""

    def __init__(self, device: torch.device, count: int, max_steps: int) -> None:
        self.free_rows = deque(_Row(device, count) for _ in range(max_steps))

    def copy(self, numbers: Tensor) -> AsyncScalars:
        """Let float64 numbers follow what has been issued, without waiting for it."""
        row = self.free_rows.popleft()
        row.memory.copy_(numbers, non_blocking=True)
        row.copy_event.record()
        return AsyncScalars(self, row)


class AsyncScalars:
    """Numbers on their way."""

    def __init__(self, buffer: AsyncScalarBuffer, row: _Row) -> None:
        self.buffer, self.row = buffer, row

    def read(self) -> list[float]:
        """The numbers, once: waits until they are there, and for nothing behind them."""
        self.row.copy_event.synchronize()
        found: list[float] = self.row.values.tolist()
        self.buffer.free_rows.append(self.row)
        return found


class _Row:
    def __init__(self, device: torch.device, count: int) -> None:
        cuda = device.type == "cuda"
        self.memory = torch.zeros(count, dtype=torch.float64, pin_memory=cuda)
        self.values = self.memory.numpy()  # the same memory, in which torch has no part
        self.copy_event = make_event(device)
