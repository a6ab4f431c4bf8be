"""A slice of a tensor: an offset and a size in each dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class TensorSlice(NamedTuple):
    """Where a box begins in each dimension of a tensor, how long it is there, and how many numbers
    of the run come before it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    flat_offset: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return prod(self.size)


def split_range_into_slices(shape: Sequence[int], low: int, high: int) -> Iterator[TensorSlice]:
    """The fewest boxes that the numbers from `low` to `high` of a tensor are, one behind the other,
    in the order of its numbers: of n dimensions at most 2 n - 1.

    >>> [(box.offset, box.size) for box in split_range_into_slices((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    low_of_all, high = low, min(high, prod(shape))
    if not shape and low < high:
        yield TensorSlice((), (), 0)
        return
    row = prod(shape[1:])
    while low < high:
        index, within = divmod(low, row)
        at, rows = low - low_of_all, (high - low) // row
        if within or not rows:  # a part of a row
            end = min(row, high - index * row)
            for box in split_range_into_slices(shape[1:], within, end):
                yield TensorSlice((index, *box.offset), (1, *box.size), at + box.flat_offset)
            low = index * row + end
        else:
            yield TensorSlice((index, *(0 for _ in shape[1:])), (rows, *shape[1:]), at)
            low += rows * row
