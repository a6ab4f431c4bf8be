"""Tests of checkpoints when a save or a removal is killed before any of its system calls."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from schedir.checkpoints.checkpoint_directory import LOCK_FILE, CheckpointDirectory
from tests.kill_points import killed_before
from tests.pure.test_checkpoint_folder import save


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a folder in memory if possible, since hundreds of saves would wait for a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=memory) as folder:
        yield Path(folder)


def test_killed_before_any_call_there_is_a_whole_one_all_the_time(tmp_path: Path) -> None:
    """A repeated save also removes an older checkpoint and cleans up a stale one."""
    template = CheckpointDirectory(tmp_path / "template")
    for step in (20, 30):
        save(template, step, note="old")
    template.begin(25)
    (template.get_unfinished_path(25) / "half").write_bytes(b"x")
    template.release()
    notes = set()
    for call in range(1000):
        place = CheckpointDirectory(tmp_path / "run")
        shutil.copytree(template.path, place.path)
        ended = not killed_before(call, partial(save, place, 30, 1, "new"))
        found = place.find_checkpoint()
        assert found.manifest is not None and found.manifest.step == 30 and not found.skip_reasons
        notes.add(found.manifest.facts["note"])
        assert not ended or found.manifest.facts["note"] == "new"
        save(place, 40, keep=2)  # the lock of a killed process does not block others
        assert sorted(os.listdir(place.path)) == [LOCK_FILE, "step-00000030", "step-00000040"]
        place.release()
        shutil.rmtree(place.path)
        if ended:
            break
    assert ended and call > 40 and notes == {"old", "new"}


def test_killed_while_all_are_removed_there_are_whole_ones_or_none(tmp_path: Path) -> None:
    """The newest checkpoint is there as long as any is."""
    template, left = CheckpointDirectory(tmp_path / "template"), set()
    for step in (20, 30):
        save(template, step)
    (template.path / "step-00000010.tmp").mkdir()
    template.release()
    for call in range(1000):
        place = CheckpointDirectory(tmp_path / "run")
        shutil.copytree(template.path, place.path)
        ended = not killed_before(call, place.remove_all)
        for step in place.list_steps():
            place.verify(step)
        left.add(tuple(place.list_steps()))
        save(place, 40, keep=1)
        assert sorted(os.listdir(place.path)) == [LOCK_FILE, "step-00000040"]
        place.release()
        shutil.rmtree(place.path)
        if ended:
            break
    assert ended and left == {(20, 30), (30,), ()}
