"""Storage references: count the tensors that refer to memory, to find those that are kept."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


class StorageReferences:
    """Counts the references to the storages of tensors.

    A reference is a tensor of that storage, a view included, wherever it is kept: in a module, in a
    hook or in a graph of autograd.

    Args:
        tensors: tensors that live as long as this object.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.addresses = [t.untyped_storage()._cdata for t in tensors]
        self.counts = self._count()

    def increased(self) -> list[int]:
        """Return the indices of the tensors to which there are more references than at first."""
        if self._count() == self.counts:
            return []
        gc.collect()  # A reference cycle that is garbage is never read.
        both = zip(self.counts, self._count(), strict=True)
        return [k for k, (before, now) in enumerate(both) if now > before]

    def _count(self) -> list[int]:
        return [int(torch._C._storage_Use_Count(address)) for address in self.addresses]
