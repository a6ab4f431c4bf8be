"""Tests of checkpoints when a save or a removal is killed before any of its changes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from schedir.checkpoints.checkpoint_directory import LOCK_FILE, CheckpointDirectory
from tests.cases import ALL
from tests.kill_points import kill_before_system_call
from tests.pure.test_checkpoint_folder import save

STEP = 1 if ALL else 3  # a normal run kills before each third system call


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a folder in memory if possible, since hundreds of saves would wait for a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=memory) as folder:
        yield Path(folder)


def test_killed_save_leaves_complete_checkpoint(tmp_path: Path) -> None:
    """A repeated save also removes an older checkpoint and cleans up a stale one."""
    template = CheckpointDirectory(tmp_path / "template")
    for step in (20, 30):
        save(template, step, note="old")
    template.begin(25)
    (template.get_unfinished_path(25) / "half").write_bytes(b"x")
    template.release()
    notes = set()
    for call in range(0, 1000, STEP):
        directory = CheckpointDirectory(tmp_path / "run")
        shutil.copytree(template.path, directory.path)
        has_ended = not kill_before_system_call(call, partial(save, directory, 30, 1, "new"))
        result = directory.find_checkpoint()
        assert result.manifest is not None
        assert result.manifest.step == 30
        assert not result.skip_reasons
        notes.add(result.manifest.facts["note"])
        assert not has_ended or result.manifest.facts["note"] == "new"
        save(directory, 40, keep=2)  # the lock of a killed process does not block others
        assert sorted(os.listdir(directory.path)) == [LOCK_FILE, "step-00000030", "step-00000040"]
        directory.release()
        shutil.rmtree(directory.path)
        if has_ended:
            break
    assert has_ended and call > 40 and notes == {"old", "new"}


def test_killed_removal_leaves_complete_checkpoints_or_none(tmp_path: Path) -> None:
    """The removal deletes the newest checkpoint last."""
    template, remaining_steps = CheckpointDirectory(tmp_path / "template"), set()
    for step in (20, 30):
        save(template, step)
    (template.path / "step-00000010.tmp").mkdir()
    template.release()
    for call in range(0, 1000, STEP):
        directory = CheckpointDirectory(tmp_path / "run")
        shutil.copytree(template.path, directory.path)
        has_ended = not kill_before_system_call(call, directory.remove_all)
        for step in directory.list_steps():
            directory.verify(step)
        remaining_steps.add(tuple(directory.list_steps()))
        save(directory, 40, keep=1)
        assert sorted(os.listdir(directory.path)) == [LOCK_FILE, "step-00000040"]
        directory.release()
        shutil.rmtree(directory.path)
        if has_ended:
            break
    assert has_ended and remaining_steps == {(20, 30), (30,), ()}
