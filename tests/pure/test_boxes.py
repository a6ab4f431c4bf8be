"""Tests of boxes for ranges of a tensor's elements."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schedir.checkpoints.tensor_slices import split_range_into_slices


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_boxes_are_the_run_in_its_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    numbers = np.arange(total).reshape(shape)
    found = [*split_range_into_slices(shape, low, high)]
    got: list[int] = []
    for box in found:
        assert box.flat_offset == len(got)
        where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        assert numbers[where].shape == box.size
        got += numbers[where].ravel().tolist()
    assert got == [*range(low, high)]
    assert len(found) <= max(2 * len(shape) - 1, 1)
