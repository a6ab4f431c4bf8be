"""Boxes: a run of a tensor's numbers, as ranges of its dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Where a box begins in each dimension of a tensor, how long it is there, and how many numbers
    of the run come before it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return prod(self.size)


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The fewest boxes that the numbers from `low` to `high` of a tensor are, one behind the other,
    in the order of its numbers: of n dimensions at most 2 n - 1.

    >>> [(box.offset, box.size) for box in boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not shape and low < high:
        yield Box((), (), 0)
        return
    at, end = low, min(high, prod(shape))
    while at < end:
        # The longest that begins here: whole slices of the first dimension into which it goes.
        inner, dim = 1, len(shape) - 1
        while dim and at % (inner * shape[dim]) == 0 and at + inner * shape[dim] <= end:
            inner *= shape[dim]
            dim -= 1
        outer = inner * shape[dim]
        count = min((end - at) // inner, (outer - at % outer) // inner)
        index, rest = [], at
        for length in reversed(shape):
            index.append(rest % length)
            rest //= length
        size = (*(1,) * dim, count, *shape[dim + 1 :])
        yield Box(tuple(reversed(index)), size, at - low)
        at += count * inner
