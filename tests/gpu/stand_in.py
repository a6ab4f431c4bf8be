"""A stand-in for the GPU: tests of this folder are rehearsed on a CPU.

    SCHEDIR_REHEARSAL=1 python -m pytest tests/gpu

What would be on a GPU is on the CPU, at once.  Streams and events are those of a GPU that is not
there, on which every operation takes a moment; graphs note what torch computes, and do it again.  A
rehearsal shows that the tests themselves run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.runtime import compute_graphs, graphs
from tests.cpu.replayed import Graph, Noting
from tests.cpu.virtual_gpu import Stream, VirtualGPU, install

MOMENT = 1e-5  # seconds that an operation takes
CYCLE = 1e-9  # of a kernel that does nothing


class _OnCPU(TorchFunctionMode):
    """Lets a CPU's tensor be made where one of a GPU is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0].clone()
        given = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(value: Any) -> Any:
    gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return "cpu" if gpu else value


class _Moments(TorchDispatchMode):
    """Lets every operation take its time, on the stream that is current, and of the host."""

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.gpu.host += MOMENT / 10
        self.gpu.work(MOMENT)
        return func(*args, **(kwargs or {}))


class _Noting(Noting):
    """Notes besides what was there before it was written to."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {**dict(enumerate(args)), **(kwargs or {})}
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tree_leaves(given.get(k, given.get(argument.name)))
                self.before += [(t, t.clone()) for t in written if isinstance(t, Tensor)]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _captured(
    gpu: VirtualGPU,
    graph: Graph,
    pool: object = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """A capture: what is written in it is afterwards what it was, as nothing has run."""
    noting = _Noting(graph)
    gpu.current.append(stream or Stream(gpu))
    try:
        with noting:
            yield
    finally:
        gpu.current.pop()
    with torch.no_grad():
        for tensor, before in reversed(noting.before):
            with _unsafe_preserve_version_counter(tensor):
                tensor.copy_(before)


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[VirtualGPU]:
    """Within this, torch.cuda has the GPU that is not there."""
    gpu = install(patch)
    patches: dict[str, Any] = {
        "_sleep": lambda cycles: gpu.work(cycles * CYCLE),
        "get_rng_state": lambda: torch.zeros(1),  # from which nobody draws
        "set_sync_debug_mode": lambda mode: None,
        "CUDAGraph": Graph,
        "graph": partial(_captured, gpu),
        "graph_pool_handle": object,
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 1 << 20,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, value in patches.items():
        patch.setattr(torch.cuda, name, value)
    for module in (graphs, compute_graphs):
        patch.setattr(module, "require_gpu", lambda executor: None)
    with _OnCPU(), _Moments(gpu):
        yield gpu
