"""Tests of full disks: one error that names the folder, and no partial files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from schedir.checkpoints import Saver, dcp_storage, save
from schedir.checkpoints.checkpoint_directory import LOCK_FILE, CheckpointDirectory
from schedir.errors import CheckpointError, UsageError
from schedir.io.files import atomic_write, require_writable
from tests.cases import cases
from tests.cpu.test_checkpoint_errors import make_two_ranks
from tests.cpu.train_command import ONE_PROCESS, ROOT, make_arguments, write_config
from tests.file_size_limit import limit_file_size

FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@needs_full_device
@pytest.mark.parametrize(
    "width", [4, 512]
)  # a small file is written at its close, and a large one at once
def test_full_disk_error_of_save_states_sizes(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_storage, "Path", lambda _: FULL)
    with pytest.raises(CheckpointError) as caught:
        save(make_two_ranks(width=width), tmp_path, step=3)
    fact = f"cannot save step 3 to {tmp_path}: the disk is full (No space left on device): "
    assert caught.value.fact.startswith(f"{fact}this process writes ")
    assert caught.value.fact.endswith(" were free") and caught.value.step == 3
    assert "another disk" in caught.value.hint
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_save_beyond_file_size_limit_leaves_no_files(tmp_path: Path) -> None:
    run = make_two_ranks(width=512)
    with limit_file_size(100_000), pytest.raises(CheckpointError) as caught:
        save(run, tmp_path, step=3)
    assert caught.value.fact == f"cannot save step 3 to {tmp_path}: File too large"
    assert os.listdir(tmp_path) == [LOCK_FILE]
    assert save(run, tmp_path, step=3).name == "step-00000003"


def test_background_save_beyond_file_size_limit_leaves_no_files(tmp_path: Path) -> None:
    run, x = make_two_ranks(width=512), torch.ones(2, 5, 512)
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
    "pdf": "draw gpipe -o a.pdf",
    "svg": "draw gpipe -o a.svg",
    "png": "draw gpipe -o a.png",
    "page": "draw gpipe -o a.html",
    "program": "print gpipe --no-repeat --microbatches 300 -o a.sched",
    "run": "simulate gpipe --microbatches 300 -o a.timeline",
    "trace": "export gpipe --to perfetto --microbatches 300 -o a.json",
    "packed": "export gpipe --to perfetto --microbatches 600 -o a.json.gz",
    "frontier": "search --frontier --time-limit 1 -o a.svg",
    "plan": "plan --layers 4 --hidden 64 --heads 4 --vocab 128 --sequence 32 --cluster a100 "
    "--gpus 2 --batch 4 --picture a.svg",
}


@pytest.mark.parametrize("what", cases([*COMMANDS][1:], ["pdf"]))
def test_failed_commands_leave_no_output_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from schedir.__main__ import main

    monkeypatch.chdir(tmp_path)
    argv = COMMANDS[what].split()
    name = next(word for word in argv if word.startswith("a.") and len(word) > 2)
    with limit_file_size(500):
        assert main(argv) == 2
    assert f"UsageError: cannot write {name}: File too large" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def run_with_small_disk(*command: str) -> list[str]:
    """Return a command line that runs a command with ./disk as a file system of 1 MB."""
    script = 'mount -t tmpfs -o size=1m tmpfs disk && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command]


# It trains into ./disk with each list of arguments, and writes its exit codes, errors and files.
TRAIN = """\
import json, shutil, sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from schedir.__main__ import main

results = {}
for where, words in json.loads(sys.argv[1]).items():
    if where == "output":
        Path("disk/fill").write_bytes(bytes(1_040_000))
    with redirect_stderr(StringIO()) as err:
        code = main(words)
    results[where] = code, err.getvalue(), [str(path) for path in Path("disk").rglob("*")]
    for path in Path("disk").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
Path("results.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Return the exit code, the errors and the files on the disk of each training.

    The first checkpoint needs more than 1 MB. For the output only a few bytes are free.
    """
    folder = tmp_path_factory.mktemp("small")
    (folder / "disk").mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    if subprocess.run(run_with_small_disk("true"), cwd=folder, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    config = str(write_config(folder))
    words = {}
    for where, saved, out, every in (
        ("checkpoint", "disk/saved", "out", 4),
        ("beside", "disk/saved", "beside", 2),
        ("output", "saved", "disk/out", 4),
    ):
        sets = [*ONE_PROCESS, "model.hidden=64", "train.steps=4"]
        sets += [f"train.checkpoint_every={every}", f'train.checkpoint_dir="{saved}"']
        words[where] = make_arguments(config, Path(out), *sets)
    result = subprocess.run(
        run_with_small_disk(sys.executable, "-c", TRAIN, json.dumps(words)),
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=240,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    return dict(json.loads((folder / "results.json").read_text()))


@pytest.mark.parametrize("where", ["checkpoint", "beside", "output"])
def test_training_on_full_disk_ends_with_one_error(
    where: str, trainings: dict[str, tuple[int, str, list[str]]]
) -> None:
    """A checkpoint is written after the last step, or beside the third step."""
    code, error, files = trainings[where]
    assert code == 2 and len(error.splitlines()) <= 2 and "the disk is full" in error
    if where == "output":
        assert "cannot write disk/out/" in error
    else:
        assert "cannot save step " in error and " to disk/saved: " in error
        assert not any("step-" in file for file in files)
