"""Tests of the order of windows, which is a permutation per seed and epoch without a table."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schedir.data.shuffle import shuffle_indices


def list_order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return list(map(int, shuffle_indices(np.arange(size, dtype=np.uint64), size, seed, epoch)))


@given(st.integers(1, 3000), st.integers(0, 2**62), st.integers(0, 2**62))
def test_order_is_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(list_order(size, seed, epoch)) == list(range(size))


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), min_size=1, max_size=9, unique=True))
def test_large_orders_compute_single_indices(size: int, at: list[int]) -> None:
    at = [k % size for k in at]
    indices = shuffle_indices(np.array(at, np.uint64), size, 1, 2).tolist()
    assert all(0 <= k < size for k in indices) and len({*indices}) == len({*at})
    assert indices == [
        shuffle_indices(np.array([k], np.uint64), size, 1, 2).tolist()[0] for k in at
    ]


def test_orders_are_random() -> None:
    """All 24 orders of four windows occur. Of many windows, few neighbours stay neighbours."""
    counts = Counter(tuple(list_order(4, seed)) for seed in range(480))
    assert len(counts) == 24 and min(counts.values()) > 5 and max(counts.values()) < 40
    for size in (1000, 1024):
        neighbours = sum(b - a == 1 for a, b in pairwise(list_order(size)))
        assert neighbours < 10
        assert abs(np.corrcoef(list_order(size), range(size))[0, 1]) < 0.1


def test_order_is_stable_across_versions() -> None:
    """Checkpoints of other versions continue in this order."""
    assert list_order(10, seed=3, epoch=1) == [1, 3, 0, 6, 9, 5, 8, 4, 2, 7]
