"""Count the references to a storage, to find tensors that a module keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from time import sleep
from typing import Final

import torch
from torch import Tensor

# The largest number of waits. Each wait gives the threads of a transport 10 ms to release a
# reference.
_MAX_WAITS: Final = 5


class StorageReferences:
    """The number of references to the storage of each tensor.

    Each tensor that uses a storage counts as one reference, and so does each view of such a tensor.
    A module, a hook or an autograd graph may keep the tensor or the view.

    Args:
        tensors: The tensors. They must not be freed before this object.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.addresses: list[int] = [t.untyped_storage()._cdata for t in tensors]
        self.counts: list[int] = self._count()

    def find_increased(self) -> list[int]:
        """Return the indices of tensors whose storage has more references than at construction."""
        increased = self._compare()
        for wait in range(_MAX_WAITS):
            if not increased:
                break
            if wait in (0, _MAX_WAITS - 1):  # each collection may take a second
                gc.collect()  # frees unreachable reference cycles
            sleep(0.01)  # a thread of a transport may release a message late
            increased = self._compare()
        return increased

    def _compare(self) -> list[int]:
        count_pairs = zip(self.counts, self._count(), strict=True)
        return [k for k, (old_count, new_count) in enumerate(count_pairs) if new_count > old_count]

    def _count(self) -> list[int]:
        return [int(torch._C._storage_Use_Count(address)) for address in self.addresses]
