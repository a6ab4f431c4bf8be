"""Tests of packed windows, which have every target of every document once, and few pads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.data.token_windows import PackedWindows
from schedir.errors import UsageError


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 9))
def test_packed_windows_have_each_target_once(lengths: list[int], context: int) -> None:
    document_ends = np.cumsum(np.array(lengths, np.int64))
    if max(lengths) < 2:
        with pytest.raises(UsageError, match="no document of two tokens"):
            PackedWindows(document_ends, context)
        return
    windows = PackedWindows(document_ends, context)
    positions, counts = windows.locate(np.arange(len(windows)))
    assert positions.shape == (len(windows), context + 1)
    assert counts.shape == (
        len(windows),
        context,
    )
    assert counts.any(axis=1).all()  # every window has targets
    inputs, targets = positions[:, :-1][counts], positions[:, 1:][counts]
    assert np.array_equal(inputs + 1, targets)
    firsts = {0, *document_ends[:-1].tolist()}
    assert sorted(targets.tolist()) == [k for k in range(document_ends[-1]) if k not in firsts]
    # The tokens of a document that fits are adjacent in one window.
    for begin, length in zip([0, *document_ends[:-1].tolist()], lengths, strict=True):
        if 2 <= length <= context + 1:
            row = int(np.flatnonzero((positions == begin).any(axis=1))[0])
            column = int(np.flatnonzero(positions[row] == begin)[0])
            assert positions[row, column : column + length].tolist() == [
                *range(begin, begin + length)
            ]


@given(st.lists(st.integers(2, 10), min_size=1, max_size=60))
def test_window_count_is_within_best_fit_bound(lengths: list[int]) -> None:
    """Best fit decreasing needs at most about 11/9 of the minimum (Johnson 1974)."""
    windows = PackedWindows(np.cumsum(np.array(lengths, np.int64)), 9)
    half = sum(length > 5 for length in lengths)  # no two of these fit into one window
    fewest = max(-(-sum(lengths) // 10), half)
    assert fewest <= len(windows) <= 3 * fewest / 2 + 1


def test_document_goes_into_fullest_fitting_window() -> None:
    """Windows of 10 get 7, then 6, then 3 in the window of 7, then 2 and 2 in that of 6."""
    windows = PackedWindows(np.cumsum([2, 6, 3, 2, 7]), 9)
    assert len(windows) == 2 and windows.fill_ratio == 1
    positions, counts = windows.locate(np.array([0, 1]))
    assert positions.tolist() == [
        [13, 14, 15, 16, 17, 18, 19, 8, 9, 10],
        [*range(2, 8), 0, 1, 11, 12],
    ]
    assert counts.tolist() == [
        [True] * 6 + [False] + [True] * 2, [True] * 5 + [False, True, False, True]
    ]  # fmt: skip
