"""A stand-in for the GPU, to rehearse the tests of this folder on a CPU.

    SCHEDIR_REHEARSAL=1 python -m pytest tests/gpu

All tensors are on the CPU, where operations end at once. Streams and events are those of a virtual
GPU, on which every operation takes a moment. A rehearsal shows that the tests themselves run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.virtual_gpu import VirtualGPU, install_virtual_gpu

MOMENT = 1e-5  # seconds of an operation
CYCLE = 1e-9  # seconds per cycle of a kernel that only waits


class _OnCPU(TorchFunctionMode):
    """Creates a tensor on the CPU where one on a GPU is requested."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0].clone()
        cpu_kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **cpu_kwargs)


def _on_cpu(value: Any) -> Any:
    gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return "cpu" if gpu else value


class _Moments(TorchDispatchMode):
    """Makes every operation take time on the current stream and on the host."""

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.gpu.host += MOMENT / 10
        self.gpu.work(MOMENT)
        return func(*args, **(kwargs or {}))


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[VirtualGPU]:
    """Make torch.cuda use the virtual GPU while the context is active."""
    gpu = install_virtual_gpu(patch)
    patches: dict[str, Any] = {
        "_sleep": lambda cycles: gpu.work(cycles * CYCLE),
        "get_rng_state": lambda: torch.zeros(1),  # no one draws from it
        "set_sync_debug_mode": lambda mode: None,
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 1 << 20,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, value in patches.items():
        patch.setattr(torch.cuda, name, value)
    with _OnCPU(), _Moments(gpu):
        yield gpu
