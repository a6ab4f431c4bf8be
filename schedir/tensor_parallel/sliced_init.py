"""Initialize weights slice by slice, so that no rank needs memory for the full weight.

A weight is divided into blocks along the dimension that is sharded over tensor-parallel ranks. Each
block has a separate random generator. A value depends only on the seed, the name and the position,
so any number of ranks has slices of the same weight. A rank needs memory for its slice and one
block.

Blocks are generated on the CPU for all devices, because the generators of other devices in torch
return different numbers for the same seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# The number of elements in a block: 16 MiB of float32. A block has at least one row or column.
BLOCK_SIZE = 1 << 22


@dataclass(frozen=True)
class SlicedInit:
    """The initializer of a weight with the distribution normal(0, std), which returns slices.

    Args:
        key: The seed and the name of the weight, which determine its values.
        shape: The shape of the full weight.
        dim: The dimension that is sharded over tensor-parallel ranks.
        std: The standard deviation.
        device: The device of the slices.
        dtype: The type of the slices.
    """

    key: str
    shape: torch.Size
    dim: int = 0
    std: float = 1.0
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a slice, as `Tensor.narrow` does, but in new memory.

        Args:
            dim: The dimension. It must be `self.dim`.
            start: The first row or column.
            length: The number of rows or columns.
        """
        assert dim == self.dim, "blocks are along the dimension that is sharded"
        sizes = list(self.shape)
        sizes[dim] = length
        result = torch.empty(sizes, device=self.device, dtype=self.dtype)
        lines, end = self._lines_per_block, start + length
        for block in range(start // lines, -(-end // lines)):
            values = self._draw_block(block)
            first_line = block * lines
            low = max(start, first_line)
            high = min(end, first_line + lines)
            result.narrow(dim, low - start, high - low).copy_(
                values.narrow(dim, low - first_line, high - low)
            )
        return result

    @property
    def _lines_per_block(self) -> int:
        """The number of rows or columns of a block: as many as `BLOCK_SIZE` allows, at least 1."""
        return max(1, BLOCK_SIZE * self.shape[self.dim] // max(1, self.shape.numel()))

    def _draw_block(self, number: int) -> Tensor:
        # The key of the first block has no number. So a weight with a single block has the same
        # values as in versions of schedir without blocks.
        key = f"{self.key} {number}" if number else self.key
        digest = hashlib.sha256(key.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        sizes = list(self.shape)
        first_line = number * self._lines_per_block
        sizes[self.dim] = min(self._lines_per_block, sizes[self.dim] - first_line)
        values = torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")
        return values.mul_(self.std)
