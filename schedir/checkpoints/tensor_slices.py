"""Tensor slices: an offset and a size in each dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class TensorSlice(NamedTuple):
    """One of the slices into which a range of a flattened tensor is split.

    Attributes:
        offset: The offset in each dimension of the tensor.
        size: The size in each dimension.
        flat_offset: The number of elements of the range before the slice.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    flat_offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.size)


def split_range_into_slices(shape: Sequence[int], low: int, high: int) -> Iterator[TensorSlice]:
    """Split a range of the flattened tensor into as few slices as possible.

    In a tensor of n dimensions, a range has at most 2 n - 1 slices.

    Args:
        shape: The shape of the tensor.
        low: The first element of the range.
        high: The end of the range, exclusive. The end may be larger than the number of elements.

    Yields:
        The slices in the order of their elements.

    Example:
        >>> [(box.offset, box.size) for box in split_range_into_slices((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    range_start, high = low, min(high, prod(shape))
    if not shape and low < high:
        yield TensorSlice((), (), 0)
        return
    row = prod(shape[1:])
    while low < high:
        index, row_offset = divmod(low, row)
        flat_offset, rows = low - range_start, (high - low) // row
        if row_offset or not rows:  # The range begins within this row, or ends in it.
            end = min(row, high - index * row)
            for part in split_range_into_slices(shape[1:], row_offset, end):
                yield TensorSlice(
                    (index, *part.offset), (1, *part.size), flat_offset + part.flat_offset
                )
            low = index * row + end
        else:
            yield TensorSlice((index, *(0 for _ in shape[1:])), (rows, *shape[1:]), flat_offset)
            low += rows * row
