"""Tests that every reader accepts or properly refuses files with random or manual changes."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.cases import ALL
from tests.fuzz import (
    ENDS,
    Reader,
    make_hand_written_changes,
    make_readers,
    mutate_file,
    run_reader,
)

RANDOM_CHANGES, MANUAL_CHANGES = 2000 if ALL else 300, 200  # for each reader
READERS = (
    "program, .sched", "torch's CSV", "configuration, TOML", "cluster, TOML", "costs, @FILE",
    "sizes, @FILE", "run, .timeline", "a run's header", "trace of torch.profiler",
    "dump of a flight recorder", "pickle",
)  # fmt: skip


@pytest.fixture(scope="module")
def readers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return make_readers(tmp_path_factory.mktemp("right"))


def test_readers_are_listed(readers_by_name: dict[str, Reader]) -> None:
    assert tuple(readers_by_name) == READERS


@pytest.mark.parametrize("reader_name", READERS)
def test_reader_accepts_or_refuses_changed_files(
    reader_name: str, readers_by_name: dict[str, Reader], tmp_path: Path
) -> None:
    reader, path = readers_by_name[reader_name], tmp_path / ENDS.get(reader_name, "file")
    valid = run_reader(reader, iter(reader.right), path)
    assert valid.kinds == {"taken": len(reader.right)}, valid.failed
    manual = run_reader(
        reader, islice(make_hand_written_changes(reader.right), MANUAL_CHANGES), path
    )
    rng = random.Random(f"1 {reader_name}")
    random_ = run_reader(
        reader, (mutate_file(reader.right, rng) for _ in range(RANDOM_CHANGES)), path
    )
    assert not manual.failed + random_.failed
    assert manual.kinds.total() == MANUAL_CHANGES and len(random_.kinds) > 1, (
        "all were taken, or none"
    )
