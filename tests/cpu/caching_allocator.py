"""The memory of a virtual GPU: what torch's caching allocator would request from the device.

A tensor takes the smallest fitting piece of memory that its stream has released, and the rest
remains free. Adjacent free pieces are merged. If none fits, the device is asked for a segment with
room for several tensors (c10/cuda/CUDACachingAllocator, whose segments are 20 MiB for tensors of up
to 10 MiB).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.virtual_gpu import Stream, VirtualGPU

GRAIN = 512  # bytes, a multiple of which each size is rounded to
SEGMENT = 16 << 10  # bytes, where tests' largest tensors have 8 KiB
GAP = 1 << 40  # addresses between segments


class CachingAllocator(TorchDispatchMode):
    """A model of torch's caching allocator. `asked` counts the requests to the device."""

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu, self.asked = gpu, 0
        self.free: dict[Stream, dict[int, int]] = defaultdict(dict)  # sizes by address
        self.held: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given:
                self._take(tensor)
        return out

    def _take(self, tensor: Tensor) -> None:
        storage, stream = tensor.untyped_storage(), self.gpu.stream
        if (key := storage._cdata) in self.held or not storage.nbytes():
            return
        free, size = self.free[stream], -(-storage.nbytes() // GRAIN) * GRAIN
        fits = [(whole, at) for at, whole in free.items() if whole >= size]
        if not fits:
            self.asked += 1
            fits = [(max(size, SEGMENT), self.asked * GAP)]
        whole, at = min(fits)
        free.pop(at, None)
        if whole > size:
            free[at + size] = whole - size
        self.held.add(key)
        weakref.finalize(storage, self._let_go, key, free, at, size)

    def _let_go(self, key: int, free: dict[int, int], at: int, size: int) -> None:
        self.held.discard(key)
        size += free.pop(at + size, 0)
        for before, its in [*free.items()]:
            if before + its == at:
                at, size = before, free.pop(before) + size
        free[at] = size


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors with their own memory, since a sparse tensor consists of others.

    Arguments and results of operations are nested in lists, tuples and dictionaries only, and
    torch's `tree_leaves` is slow.
    """
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield values
    elif isinstance(values, (list, tuple, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)
