"""Events of a CUDA stream, and their stand-in on CPUs."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """What is asked of a torch.cuda.Event."""

    def record(self) -> object: ...
    def query(self) -> bool: ...
    def synchronize(self) -> object: ...


class CpuEvent:
    """An event on a CPU: what the host has issued there has run."""

    def record(self) -> None:
        """Nothing: the point is passed."""

    def query(self) -> bool:
        """Yes."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def make_event(device: torch.device) -> Event:
    """An event on a device, recorded once: CUDA makes one when it is recorded first."""
    event: Event = torch.cuda.Event() if device.type == "cuda" else CpuEvent()
    event.record()
    return event
