"""Tests of full disks: one error that names the folder, and no partial files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedir
from schedir import PipelineShape
from schedir.checkpoints import Saver, dcp_storage, save
from schedir.checkpoints.checkpoint_directory import LOCK_FILE, CheckpointDirectory
from schedir.errors import CheckpointError, UsageError
from schedir.io.files import atomic_write, require_writable
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import one_f_one_b
from tests.cpu.train_command import ONE_PROCESS, ROOT
from tests.file_size_limit import limit_file_size

FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def make_ranks(width: int) -> InProcessExecutor:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), checkpoint_snapshots=True)
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "boundary": (5, width)}
    stages = [nn.Linear(width, width) for _ in range(2)]
    return InProcessExecutor(
        program, stages, optimizer=partial(torch.optim.AdamW, lr=1e-2), **options
    )


@needs_full_device
@pytest.mark.parametrize(
    "width", [4, 512]
)  # a small file is written at its close, and a large one at once
def test_full_disk_error_of_save_states_sizes(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_storage, "Path", lambda _: FULL)
    with pytest.raises(CheckpointError) as caught:
        save(make_ranks(width), tmp_path, step=3)
    fact = f"cannot save step 3 to {tmp_path}: the disk is full (No space left on device): "
    assert caught.value.fact.startswith(f"{fact}this process writes ")
    assert caught.value.fact.endswith(" were free") and caught.value.step == 3
    assert "another disk" in caught.value.hint
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_save_beyond_file_size_limit_leaves_no_files(tmp_path: Path) -> None:
    run = make_ranks(512)
    with limit_file_size(100_000), pytest.raises(CheckpointError) as caught:
        save(run, tmp_path, step=3)
    assert caught.value.fact == f"cannot save step 3 to {tmp_path}: File too large"
    assert os.listdir(tmp_path) == [LOCK_FILE]
    assert save(run, tmp_path, step=3).name == "step-00000003"


def test_background_save_beyond_file_size_limit_leaves_no_files(tmp_path: Path) -> None:
    run, x = make_ranks(512), torch.ones(2, 5, 512)
    saver = Saver(run, tmp_path)
    run.step(x, x)
    saver.schedule_save(1)
    run.step(x, x)
    with limit_file_size(100_000), pytest.raises(CheckpointError, match="File too large"):
        saver.write()
        saver.wait()
    assert (
        os.listdir(tmp_path) == [LOCK_FILE]
        and CheckpointDirectory(tmp_path).find_newest_step() is None
    )


@needs_full_device
def test_failed_atomic_write_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with pytest.raises(UsageError) as caught, atomic_write(target):
        FULL.write_text("a")
    assert caught.value.fact == (
        f"cannot write {target}: the disk is full (No space left on device)"
    )
    assert not os.listdir(tmp_path)


def test_require_writable_changes_no_files(tmp_path: Path) -> None:
    require_writable(tmp_path / "a.txt")
    assert not os.listdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    require_writable(tmp_path / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_text() == "a"
    with pytest.raises(UsageError, match="cannot write"):
        require_writable(tmp_path / "none" / "a.txt")


COMMANDS = {
    "svg": "draw gpipe -o a.svg",
    "png": "draw gpipe -o a.png",
    "pdf": "draw gpipe -o a.pdf",
    "page": "draw gpipe -o a.html",
    "program": "print gpipe --no-repeat --microbatches 300 -o a.sched",
    "run": "simulate gpipe --microbatches 300 -o a.timeline",
    "trace": "export gpipe --to perfetto --microbatches 300 -o a.json",
    "packed": "export gpipe --to perfetto --microbatches 3000 -o a.json.gz",
    "frontier": "search --frontier --time-limit 1 -o a.svg",
    "plan": "plan --layers 4 --hidden 64 --heads 4 --vocab 128 --sequence 32 --cluster a100 "
    "--gpus 8 --batch 8 --picture a.svg",
}


@pytest.mark.parametrize("what", COMMANDS)
def test_failed_commands_leave_no_output_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.__main__ import main

    monkeypatch.chdir(tmp_path)
    argv = COMMANDS[what].split()
    name = next(word for word in argv if word.startswith("a.") and len(word) > 2)
    with limit_file_size(2000):
        assert main(argv) == 2
    assert f"UsageError: cannot write {name}: File too large" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def run_with_small_disk(*command: str) -> list[str]:
    """Return a command line that runs a command with ./disk as a file system of 1 MB."""
    script = 'mount -t tmpfs -o size=1m tmpfs disk && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    if subprocess.run(run_with_small_disk("true"), cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    return tmp_path


@pytest.mark.parametrize("where", ["checkpoint", "beside", "output"])
def test_training_on_full_disk_ends_with_one_error(
    where: str, config: str, small_disk: Path
) -> None:
    """The first checkpoint needs more than 1 MB. For the output only a few bytes are free."""
    folders = {"checkpoint": "disk/saved", "folder": "out"}
    if where == "output":
        folders = {"checkpoint": "saved", "folder": "disk/out"}
    words = [
        *ONE_PROCESS,
        "model.hidden=64",
        "train.steps=4",
        f"train.checkpoint_every={2 if where == 'beside' else 4}",
        f'train.checkpoint_dir="{folders["checkpoint"]}"',
        f'output.dir="{folders["folder"]}"',
    ]
    train = [sys.executable, "-m", "schedir", "train", config, *(f"--set={w}" for w in words)]
    fill = "head -c 1040000 /dev/zero > disk/fill; " * (where == "output")
    script = f'{fill} "$@"; code=$?; find disk; exit $code'
    result = subprocess.run(
        run_with_small_disk("sh", "-c", script, "sh", *train),
        cwd=small_disk, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) <= 2 and "the disk is full" in result.stderr
    if where == "output":
        assert "cannot write disk/out/" in result.stderr
    else:
        assert "cannot save step " in result.stderr and " to disk/saved: " in result.stderr
        assert "step-" not in result.stdout.partition("disk\n")[2]
