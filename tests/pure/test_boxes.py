"""Tests that slices of a tensor cover a range of its elements."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schedir.checkpoints.tensor_slices import split_range_into_slices


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_slices_of_range_cover_it_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    numbers = np.arange(total).reshape(shape)
    slices = [*split_range_into_slices(shape, low, high)]
    covered: list[int] = []
    for piece in slices:
        assert piece.flat_offset == len(covered)
        index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
        assert numbers[index].shape == piece.size
        covered += numbers[index].ravel().tolist()
    assert covered == [*range(low, high)]
    assert len(slices) <= max(2 * len(shape) - 1, 1)
