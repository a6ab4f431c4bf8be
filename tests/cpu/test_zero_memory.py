"""Tests that live memory with ZeRO is exactly as predicted after each instruction."""

from __future__ import annotations

import pytest

from benchmarks.zero import list_byte_rows, run_row
from tests.cases import cases

NAMES = cases(
    ["interleaved zero 3, each turn"],
    ["one_f_one_b zero 2, recomputed", "looped_bfs zero 1, states on the host"],
)


@pytest.mark.parametrize("name", NAMES)
def test_live_memory_with_zero_matches_prediction(name: str) -> None:
    """The bytes are those of live storages on each rank and replica."""
    for row in run_row(list_byte_rows()[name]):
        assert row.comparisons > 10 and row.peak_bytes > 0 and not row.differences
