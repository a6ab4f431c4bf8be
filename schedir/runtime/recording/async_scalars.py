"""Copy scalars of a step to the host without waiting for the GPU.

If the host reads a result right after it has issued the step, it waits until the device has
finished the step. The device then waits until the host has issued the next step. So scalars are
copied to pinned memory after the step, and the host reads them when it has issued the next step.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from schedir.runtime.recording.stream_events import make_event


class AsyncScalarBuffer:
    """Host memory for the scalars of two steps.

    Args:
        device: The device that computes the scalars. For a GPU the memory is pinned.
        count: The number of scalars per step.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.free_rows = deque(_Row(device, count) for _ in range(2))

    def copy(self, numbers: Tensor) -> AsyncScalars:
        """Start to copy scalars to the host, after all issued work of the current stream.

        Args:
            numbers: A float64 tensor of shape (count,) on the device.

        Returns:
            The scalars. The caller must read them once.

        Raises:
            IndexError: Two copies have not been read yet.
        """
        row = self.free_rows.popleft()
        row.memory.copy_(numbers, non_blocking=True)
        row.copy_event.record()
        return AsyncScalars(self, row)


class AsyncScalars:
    """The scalars of one step, which may still be copied.

    Args:
        buffer: The buffer to which `read` returns the memory.
        row: The memory of the scalars.
    """

    def __init__(self, buffer: AsyncScalarBuffer, row: _Row) -> None:
        self.buffer = buffer
        self.row = row

    def read(self) -> list[float]:
        """Wait for the copy, and return the scalars. Call this method once.

        The method does not wait for work that was issued after the copy.
        """
        self.row.copy_event.synchronize()
        scalars: list[float] = self.row.values.tolist()
        self.buffer.free_rows.append(self.row)
        return scalars


class _Row:
    def __init__(self, device: torch.device, count: int) -> None:
        cuda = device.type == "cuda"
        self.memory = torch.zeros(count, dtype=torch.float64, pin_memory=cuda)
        self.values = self.memory.numpy()  # the same memory as a numpy array
        self.copy_event = make_event(device)
