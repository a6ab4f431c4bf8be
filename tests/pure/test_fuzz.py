"""Tests that every reader accepts or properly refuses files with random or manual changes."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz import ENDS, Reader, by_hand, judge, mutated, readers

MUTATED, BY_HAND = 2000, 200
READERS = (
    "program, .sched", "torch's CSV", "configuration, TOML", "cluster, TOML", "costs, @FILE",
    "sizes, @FILE", "run, .timeline", "a run's header", "trace of torch.profiler",
    "dump of a flight recorder", "pickle",
)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return readers(tmp_path_factory.mktemp("right"))


def test_all_readers_are_tried(known: dict[str, Reader]) -> None:
    assert tuple(known) == READERS


@pytest.mark.parametrize("what", READERS)
def test_a_reader_takes_a_file_or_refuses_it(
    what: str, known: dict[str, Reader], tmp_path: Path
) -> None:
    reader, path = known[what], tmp_path / ENDS.get(what, "file")
    right = judge(reader, iter(reader.right), path)
    assert right.kinds == {"taken": len(reader.right)}, right.failed
    hand = judge(reader, islice(by_hand(reader.right), BY_HAND), path)
    rng = random.Random(f"1 {what}")
    random_ = judge(reader, (mutated(reader.right, rng) for _ in range(MUTATED)), path)
    assert not hand.failed + random_.failed
    assert hand.kinds.total() == BY_HAND and len(random_.kinds) > 1, "all were taken, or none"
