"""Tests of `schedir checkpoint inspect`, which lists and verifies checkpoints without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedir.__main__ import main
from schedir.checkpoints.checkpoint_directory import (
    MANIFEST_NAME,
    CheckpointDirectory,
    Manifest,
    ManifestFile,
    StoredSlice,
    TensorMeta,
)
from tests.commands import ENV, run_command, run_refused_command

TENSORS = {
    "weights/up": TensorMeta((4, 2), "bfloat16"),
    "main/up": TensorMeta((4, 2), "float32"),
    "optimizer/up/exp_avg": TensorMeta((4, 2), "float32"),
    "optimizer/up/step": TensorMeta((), "float32"),
    "weights/frozen": TensorMeta((3,), "float32"),
    "buffers/count": TensorMeta((), "int64"),
}
STATE = {"next": 3, "extra": {"settings": {"model.heads": "2", "data.seed": "0"}, "data": [1]}}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save three checkpoints in the folder `run` of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = CheckpointDirectory("run")
    for step in (2, 4, 6):
        path, data, slices = folder.begin(step), b"", []
        for name, meta in TENSORS.items():
            slices.append(
                StoredSlice(
                    name, (0,) * len(meta.shape), meta.shape, "__0_0", len(data), meta.nbytes
                )
            )
            data += bytes([step]) * meta.nbytes
        (path / "__0_0").write_bytes(data)
        files = {"__0_0": ManifestFile(len(data), hashlib.sha256(data).hexdigest())}
        facts = {"program": "gpipe\x1b[2J", "tp": 2}
        folder.finish(Manifest(step, files, TENSORS, tuple(slices), facts, STATE))
    folder.release()
    return tmp_path / "run"


def test_tables_of_checkpoints_and_newest_tensors(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_command(capsys, "checkpoint", "inspect", "run")
    table = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "(when)", out)
    assert re.findall(r"^ (\d) +(\S+ B) +\(when\) +(.*)$", table, re.M) == [
        (step, "104 B", "by file sizes") for step in "246"
    ]
    assert "--verify reads the files" in out and "\nstep 6\n" in out
    assert "  program: gpipe?[2J\n" in out  # without control characters of terminals
    assert "  [model]: heads 2\n" in out and "  [data]: seed 0\n" in out and "  data: [1]\n" in out
    assert "  step of the next random numbers: 3\n" in out
    rows = {line.split("  ")[0].strip(): line.split()[1:] for line in out.splitlines()}
    assert rows["up"] == ["4x2", "bfloat16", "16", "B", "32", "B", "36", "B"]
    assert rows["frozen"] == ["3", "float32", "12", "B", "-", "-"]
    assert rows["buffers/count"] == ["scalar", "int64", "8", "B", "-", "-"]
    assert rows["weights"] == ["2", "11", "28", "B"] and rows["all"] == ["6", "29", "104", "B"]


def test_incomplete_checkpoints_are_reported_and_skipped(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "step-00000006" / MANIFEST_NAME).unlink()
    file = saved / "step-00000004" / "__0_0"
    file.write_bytes(b"?" + file.read_bytes()[1:])
    out = run_command(capsys, "checkpoint", "inspect", "run")
    assert f"step 6: step-00000006 is not complete: {MANIFEST_NAME} is missing\n" in out
    assert "\nstep 4\n" in out  # the file sizes are correct
    assert main(["checkpoint", "inspect", "run", "--verify"]) == 2
    out = capsys.readouterr().out
    assert "step 4: step-00000004 is not complete: __0_0 does not match its digest\n" in out
    assert "\nstep 2\n" in out and out.count("yes") == 1 and "sizes" not in out
    assert main(["checkpoint", "inspect", "run", "--step", "2", "--verify"]) == 0
    file.write_bytes(b"?")
    capsys.readouterr()
    assert "4 is not complete: __0_0 has 1 bytes instead of 104\n" in run_command(
        capsys, "checkpoint", "inspect", "run"
    )


def test_json_output_has_same_facts(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "step-00000002" / "__0_0").unlink()
    facts = json.loads(run_command(capsys, "checkpoint", "inspect", "run", "--json"))
    checkpoints = facts["checkpoints"]
    assert [(entry["step"], entry["is_complete"], entry["bytes"]) for entry in checkpoints] == [
        (2, False, 104),
        (4, None, 104),
        (6, None, 104),
    ]
    newest = facts["newest_checkpoint"]
    assert (newest["step"], newest["state"]) == (6, STATE)
    assert newest["tensors"]["weights/up"] == {"shape": [4, 2], "dtype": "bfloat16", "bytes": 16}
    assert newest["totals"]["optimizer"] == {"tensors": 2, "elements": 9, "bytes": 36}
    main(["checkpoint", "inspect", "run", "--json", "--verify"])
    facts = json.loads(capsys.readouterr().out)
    assert [checkpoint["is_complete"] for checkpoint in facts["checkpoints"]] == [False, True, True]


def test_inspect_runs_without_torch_and_with_closed_pipe(saved: Path) -> None:
    code = (
        "import sys; from schedir.__main__ import main; main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "checkpoint", "inspect", "run", "--verify"]
    completed = subprocess.run(command, capture_output=True, text=True, env=ENV)
    assert (completed.returncode, completed.stderr) == (0, "")
    command[1:3] = ["-m", "schedir"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()  # like `| head`
        assert run.stderr.read() == "" and run.wait() == 0


def test_missing_checkpoints_are_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    golden = Path(__file__).parents[1] / "golden" / "checkpoint_inspect.txt"
    outputs = []
    for arguments in (
        "nowhere", "empty", "run --step 5", "run/step-00000006", "empty --step 5", "run --step x",
    ):  # fmt: skip
        error = run_refused_command(capsys, "checkpoint", "inspect", *arguments.split())
        outputs.append(f"{arguments}\n{error}")
    if "UPDATE_GOLDEN" in os.environ:
        golden.write_text("\n".join(outputs))
    assert "\n".join(outputs) == golden.read_text()
