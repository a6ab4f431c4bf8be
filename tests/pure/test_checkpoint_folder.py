"""Tests that checkpoints are complete or absent, whenever the writing process ends."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.checkpoints.checkpoint_directory import (
    LOCK_FILE,
    MANIFEST_NAME,
    CheckpointDirectory,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
)
from schedir.checkpoints.manifest import IncompleteCheckpointError
from schedir.checkpoints.manifest_json import _is_exact_cover
from schedir.checkpoints.tensor_slices import split_range_into_slices
from schedir.errors import CheckpointError, UsageError
from tests.commands import ENV
from tests.file_size_limit import limit_file_size

DATA = bytes(range(32))


def write_files(path: Path, step: int, note: str = "") -> Manifest:
    """Write two files of a checkpoint, and return its manifest."""
    files, stored = {}, []
    for k, name in enumerate(("__0_0.distcp", "__1_0.distcp")):
        data = DATA + f"{step} {k} {note}".encode()
        (path / name).write_bytes(data)
        files[name] = ManifestFile(len(data), hashlib.sha256(data).hexdigest())
        stored.append(StoredSlice("weights/w", (2 * k, 0), (2, 2), name, 0, 16))
    kinds = {"weights/w": TensorMeta((4, 2), "float32")}
    return Manifest(step, files, kinds, tuple(stored), {"note": note}, {"next": step + 1})


def save(folder: CheckpointDirectory, step: int, keep: int | None = None, note: str = "") -> Path:
    return folder.finish(write_files(folder.begin(step), step, note), keep)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointDirectory]:
    directory = CheckpointDirectory(tmp_path / "run")
    yield directory
    directory.release()


def test_saved_checkpoint_is_read_back(folder: CheckpointDirectory) -> None:
    assert folder.list_steps() == [] and folder.find_newest_step() is None
    path = save(folder, 12, note="ü \N{SNOWMAN}")
    read = folder.verify(12)
    assert read == replace(write_files(path, 12, "ü \N{SNOWMAN}"), finished_at=read.finished_at)
    assert read.finished_at
    assert folder.load_manifest(12, include_tensors=False).files == read.files
    assert (folder.find_newest_step(), folder.locate_step(12)) == (12, path)
    assert {*read.assign_files(0, 2), *read.assign_files(1, 2)} == {
        *read.files
    } and read.assign_files(2, 3) == []


# Interrupted writers


def test_failed_removal_is_reported(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 7)

    def raise_permission_error(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", raise_permission_error)
    with pytest.raises(CheckpointError, match=r"cannot remove step 7 of \S*run"):
        folder.remove_all()
    assert folder.find_newest_step() == 7


def test_files_are_synced_before_folder_is_renamed(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, os.rename

    def record_sync(file: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    def record_rename(path: Path, to: Path) -> Path:
        events.append("rename")
        rename(path, to)
        return to

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(folder, 1)
    assert events == [
        "__0_0.distcp", "__1_0.distcp", MANIFEST_NAME, "step-00000001.tmp", "rename", "run",
    ]  # fmt: skip


def test_full_disk_keeps_only_earlier_checkpoint(folder: CheckpointDirectory) -> None:
    save(folder, 1)
    manifest = write_files(folder.begin(2), 2)
    with limit_file_size(100), pytest.raises(CheckpointError) as error:
        folder.finish(manifest, keep=1)
    assert error.value.step == 2 and "File too large" in error.value.fact
    assert (
        sorted(os.listdir(folder.path)) == [LOCK_FILE, "step-00000001"]
        and folder.find_newest_step() == 1
    )


def test_incomplete_checkpoint_is_not_finished(folder: CheckpointDirectory) -> None:
    manifest = write_files(folder.begin(1), 1)
    with pytest.raises(CheckpointError, match="of its 8 elements"):  # a process reported no slices
        folder.finish(replace(manifest, slices=manifest.slices[:1]))
    invalid_states: list[Any] = [{1: 2}, {"x": float("nan")}, {"x": object()}]
    for state in invalid_states:
        with pytest.raises(CheckpointError):
            folder.finish(replace(write_files(folder.begin(1), 1), state=state))
    manifest = write_files(folder.begin(1), 1)
    (folder.get_unfinished_path(1) / "__1_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError) as error:
        folder.finish(manifest)
    assert error.value.file == "__1_0.distcp" and os.listdir(folder.path) == [LOCK_FILE]


# Removal of old checkpoints


def test_keep_counts_complete_checkpoints_and_leaves_foreign_files(
    folder: CheckpointDirectory,
) -> None:
    for name in ("step-5", "notes.tmp", "step-00000005.bak"):
        (folder.path / name).mkdir(parents=True)
    for step in (1, 2, 3):
        save(folder, step)
    (folder.locate_step(3) / "__0_0.distcp").unlink()
    save(folder, 4, keep=2)
    assert folder.list_steps() == [2, 3, 4]
    save(folder, 3, keep=1)  # a run that went back does not remove its own checkpoint
    assert folder.list_steps() == [3, 4]
    assert {"step-5", "notes.tmp", "step-00000005.bak"} < {*os.listdir(folder.path)}
    (folder.path / "step-00000009").mkdir()
    with pytest.raises(CheckpointError) as error:
        folder.begin(9)
    assert (
        error.value.hint == "move step-00000009 to another folder"
        and folder.locate_step(9).is_dir()
    )


def test_second_writer_is_refused_until_first_writer_ends(folder: CheckpointDirectory) -> None:
    code = (
        "import sys; from schedir.checkpoints.checkpoint_directory import CheckpointDirectory; "
        "f = CheckpointDirectory(sys.argv[1]); "
        "f.begin(5); print('has it', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(folder.path)]
    other = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
    )
    try:
        assert other.stdout and other.stdout.readline() == "has it\n"
        with pytest.raises(CheckpointError) as error:
            folder.begin(6)
        assert f"process {other.pid}" in error.value.fact
        assert folder.get_unfinished_path(5).is_dir()  # its process still runs
    finally:
        other.kill()
        other.communicate(timeout=30)
    folder.begin(6)
    assert not folder.get_unfinished_path(5).exists()


# Reading


def test_newest_complete_checkpoint_and_skip_reasons(folder: CheckpointDirectory) -> None:
    for step in range(1, 6):
        save(folder, step)
    (folder.locate_step(5) / "__1_0.distcp").write_bytes(DATA)
    changed = bytearray((folder.locate_step(4) / "__0_0.distcp").read_bytes())
    changed[3] ^= 1
    (folder.locate_step(4) / "__0_0.distcp").write_bytes(changed)
    with (folder.locate_step(3) / MANIFEST_NAME).open("rb+") as file:
        file.truncate(200)
    (folder.locate_step(2) / "__0_0.distcp").unlink()
    (folder.locate_step(2) / "__0_0.distcp").symlink_to("/dev/zero")
    result = folder.find_checkpoint()
    assert result.manifest is not None
    assert result.manifest.step == 1
    assert len(result.skip_reasons) == 4
    size = len(DATA) + len("5 1 ")
    assert result.skip_reasons[0] == (
        f"step-00000005 is not complete: __1_0.distcp has 32 bytes instead of {size}"
    )
    for step, name in ((5, "__1_0.distcp"), (4, "__0_0.distcp"), (3, MANIFEST_NAME)):
        with pytest.raises(IncompleteCheckpointError) as error:
            folder.verify(step)
        assert (error.value.step, error.value.file) == (step, name)


def test_processes_with_different_files_agree_on_checkpoint(folder: CheckpointDirectory) -> None:
    for step in (1, 2):
        save(folder, step)
    broken = bytearray((folder.locate_step(2) / "__0_0.distcp").read_bytes())
    broken[3] ^= 1
    (folder.locate_step(2) / "__0_0.distcp").write_bytes(broken)
    rounds: list[dict[int, str]] = []
    barrier = Barrier(2)

    def find_newest_step_of(k: int) -> int:
        round_number = 0

        def exchange_texts(text: str) -> list[str]:
            nonlocal round_number
            barrier.wait(30)
            while len(rounds) <= round_number:
                rounds.append({})
            rounds[round_number][k] = text
            barrier.wait(30)
            round_number += 1
            return [rounds[round_number - 1][0], rounds[round_number - 1][1]]

        result = folder.find_checkpoint(lambda manifest: [f"__{k}_0.distcp"], exchange_texts)
        assert len(result.skip_reasons) == 1 and "__0_0.distcp" in result.skip_reasons[0]
        assert result.manifest is not None
        return result.manifest.step

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(find_newest_step_of, range(2))] == [1, 1]


def test_unknown_format_does_not_select_older_checkpoint(folder: CheckpointDirectory) -> None:
    save(folder, 1)
    save(folder, 2)
    rewrite_manifest(
        folder.locate_step(2),
        lambda lines: [lines[0].replace(b'"schedir_checkpoint":1', b'"schedir_checkpoint":2')],
    )
    with pytest.raises(CheckpointError, match="format 2") as error:
        folder.find_checkpoint()
    assert not isinstance(error.value, IncompleteCheckpointError)
    assert "use the version of schedir that wrote the checkpoint" in error.value.hint


def test_checkpoint_paths_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / ("x" * 300), tmp_path / "y" / ("z" * 300)):
        with pytest.raises(CheckpointError):
            CheckpointDirectory(path).begin(1)
    for invalid_path in ("a\0b", "~nobody-of-this-name/x", 3):
        with pytest.raises(UsageError):
            CheckpointDirectory(invalid_path)  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real ü").mkdir()
    (tmp_path / "link").symlink_to("real ü")
    relative = CheckpointDirectory("link")
    monkeypatch.chdir("/")
    save(relative, 1)
    assert CheckpointDirectory("~/real ü").find_newest_step() == 1
    relative.release()
    for step in (-1, True, 1.5, 10**16):
        with pytest.raises(UsageError):
            relative.begin(step)  # type: ignore[arg-type]


def rewrite_manifest(path: Path, change: Any) -> None:
    """Change lines of a manifest, and write the new digest."""
    lines = (path / MANIFEST_NAME).read_bytes().splitlines(keepends=True)[:-1]
    changed = b"".join([*change(lines), *lines[len(change(lines)) :]])
    seal = json.dumps({"sha256": hashlib.sha256(changed).hexdigest()}).encode() + b"\n"
    (path / MANIFEST_NAME).write_bytes(changed + seal)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"file":"__0_0.distcp"', '"file":"../x"'),
        ('"file":"__0_0.distcp"', '"file":"/etc/passwd"'),
        ('"file":"__0_0.distcp"', '"file":"__1_0.distcp"'),
        ('"file":"__0_0.distcp"', '"file":7'),
        ('"size":', '"size":-'),
        ('"size":', '"size":1e9,"size":'),
        ('"shape":[4,2]', '"shape":[4,3]'),
        ('"shape":[4,2]', '"shape":[4.0,2]'),
        ("[0,0],[2,2]", "[1,0],[2,2]"),
        ("[0,0],[2,2]", "[0,0],[4,2]"),
        ("[0,0],[2,2]", "[-1,0],[3,2]"),
        ("[2,0],[2,2]", "[2,0],[3,2]"),
        ("[0,0,16,", "[9,0,16,"),
        ("[0,0,16,", "[0,99,16,"),
        ("[0,0,16,", "[0,0,15,"),
        ("[0,0,16,", "[0,true,16,"),
        ("float32", "object"),
        ("weights/w", "weights/\\u0000"),
        ('"next":13', '"next":NaN'),
        ('"next":13', '"next":1e999'),
        ('"next":13', '"next":' + "9" * 5000),
        ('"next":13', '"next":' + "[" * 3000),
        ('"next":13', '"next":' + "[" * 60 + "]" * 60),
        ('"step":12', '"step":13'),
        ('"step":12', '"step":"12"'),
        ('"when"', '"then"'),
    ],
)  # fmt: skip
def test_inconsistent_manifest_is_refused(folder: CheckpointDirectory, old: str, new: str) -> None:
    path = save(folder, 12)
    text = (path / MANIFEST_NAME).read_text()
    assert old in text
    lines = text.replace(old, new, 1).encode().splitlines(keepends=True)[:-1]
    rewrite_manifest(path, lambda _: lines)
    with pytest.raises(IncompleteCheckpointError) as error:
        folder.load_manifest(12)
    assert (error.value.step, error.value.file) == (12, MANIFEST_NAME) and len(
        error.value.fact
    ) < 400


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_exact_cover_by_slices(shape: list[int], data: st.DataObject) -> None:
    """Slices of all elements cover a tensor in any order. A missing or double slice does not."""
    element_count = 1
    for length in shape:
        element_count *= length
    cuts = sorted(data.draw(st.lists(st.integers(0, element_count), max_size=3)))
    slices = [
        StoredSlice("t", box.offset, box.size, "f", 0, 0)
        for low, high in zip([0, *cuts], [*cuts, element_count], strict=True)
        for box in split_range_into_slices(shape, low, high)
    ]
    slices = data.draw(st.permutations(slices))
    assert _is_exact_cover(tuple(shape), slices)
    k = data.draw(st.integers(0, len(slices) - 1))
    assert not _is_exact_cover(tuple(shape), slices[:k] + slices[k + 1 :])
    assert not _is_exact_cover(tuple(shape), [*slices, slices[k]])
    if len(slices) > 1:
        duplicate = slices[k - 1]
        assert not _is_exact_cover(tuple(shape), slices[:k] + slices[k + 1 :] + [duplicate])
