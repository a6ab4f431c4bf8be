"""Events of a CUDA stream, and a substitute for CPUs."""

from __future__ import annotations

import torch


class CpuEvent:
    """A substitute for `torch.cuda.Event` on a CPU, where all issued work has already run."""

    def record(self) -> None:
        """Do nothing, because all issued work has ended."""

    def query(self) -> bool:
        """Return True, because all issued work has ended."""
        return True

    def synchronize(self) -> None:
        """Return immediately, because all issued work has ended."""


def make_event(device: torch.device) -> torch.cuda.Event | CpuEvent:
    """Create an event of a device, and record it once.

    torch creates a CUDA event when the event is first recorded. Without the record in this
    function, torch would create the event within a step.

    Args:
        device: The device.
    """
    event = torch.cuda.Event() if device.type == "cuda" else CpuEvent()
    event.record()
    return event
