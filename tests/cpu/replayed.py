"""CUDA graphs without a GPU: what torch computes is noted at a capture, and done again at a replay.

On a CPU a capture runs what it captures; tensors that it makes are written again, in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """What stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.noted:
            again = func(*args, **kwargs)
            for was, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(was, Tensor) and was is not now:
                    was.copy_(now)

    def reset(self) -> None:
        self.noted.clear()


class Noting(TorchDispatchMode):
    """Notes what a graph holds."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):  # no view
            self.graph.noted.append((func, args, kwargs or {}, out))
        return out


@contextmanager
def _captured(graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    with Noting(graph):
        yield


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda have graphs; the virtual GPU has the rest."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", _captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
