"""Tests that the benchmark of attention windows runs, and prints the predicted tiles."""

from __future__ import annotations

import pytest

from benchmarks import kernels
from schedir.models.window_config import compute_device_tiles


def test_each_window_shorter_than_its_sequence_has_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--only windows --lengths 100 200 --windows 64:64 128:1 --heads 2 --width 8 --rounds 2"
    assert kernels.main(words.split()) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if " | " in row][2:]
    assert [row[:3] for row in rows] == [
        ["| 100", "64", "64"], ["| 200", "64", "64"], ["| 200", "128", "1"],
    ]  # fmt: skip
    for row, window in zip(rows, [(100, 64, 64), (200, 64, 64), (200, 128, 1)], strict=True):
        tiles = compute_device_tiles(*window)
        assert row[3:5] == [f"{tiles.visited_count} of {tiles.dense_count}", f"{tiles.speedup:.2f}"]
        assert len(row) == len(kernels.HEADER)
