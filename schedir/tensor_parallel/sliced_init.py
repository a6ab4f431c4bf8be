"""Initialize weights slice by slice: a rank draws its own slice and one block beside it.

A weight is cut into blocks along the dimension that tensor-parallel ranks share, and each block is
drawn by a generator of its own.  So a number is decided by seed, name and place: any number of
ranks holds slices of one weight, and none draws the whole of it.

Blocks are drawn on the CPU, wherever the slice is to be: torch's generators of other devices give
other numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 1 << 22  # numbers in a block, or one row or column: 16 MiB of float32


@dataclass(frozen=True)
class SlicedInit:
    """A weight, normal(0, std), to be cut along `dim`; slices are in `dtype` on `device`.

    `key` is the seed and what names the weight: others have other numbers.
    """

    key: str
    shape: torch.Size
    dim: int = 0
    std: float = 1.0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """A slice, as of a tensor, in memory of its own."""
        assert dim == self.dim, "blocks lie along the dimension that is shared"
        sizes = list(self.shape)
        sizes[dim] = length
        own = torch.empty(sizes, device=self.device, dtype=self.dtype)
        each, end = self._lines_per_block, start + length
        for block in range(start // each, -(-end // each)):
            drawn, first = self._draw_block(block), block * each
            low, high = max(start, first), min(end, first + each)
            own.narrow(dim, low - start, high - low).copy_(
                drawn.narrow(dim, low - first, high - low)
            )
        return own

    @property
    def _lines_per_block(self) -> int:
        """Rows, or columns, that a block has: as many as hold so many numbers, and one at least."""
        return max(1, BLOCK_SIZE * self.shape[self.dim] // max(1, self.shape.numel()))

    def _draw_block(self, number: int) -> Tensor:
        # The first by the name alone, as a weight of one block always was.
        key = f"{self.key} {number}" if number else self.key
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        sizes, first = list(self.shape), number * self._lines_per_block
        sizes[self.dim] = min(self._lines_per_block, sizes[self.dim] - first)
        drawn = torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.mul_(self.std)
