"""Runs of the trainer through the command line, for tests."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from schedir.training.train import run

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds: enough on any machine, and the end of a hang
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = ["pipeline.ranks=1", "pipeline.stages_per_rank=1", "pipeline.tp=1", "pipeline.dp=1"]

CONFIG = """\
[model]
layers = 4
hidden = 32
heads = 2
context = 16

[pipeline]
schedule = "interleaved"
ranks = 2
stages_per_rank = 2
tp = 2
microbatches = 3

[data]
source = "{text}"
microbatch_size = 2

[train]
steps = 6
warmup = 2
log_every = 4
"""


def arguments(config: str, folder: Path, *sets: str) -> list[str]:
    return ["train", config, *(f"--set={s}" for s in (*sets, f'output.folder="{folder}"'))]


def start(command: list[str], cwd: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was said; a process that hangs is ended, and fails the test."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def train(config: str, folder: Path, *sets: str) -> list[float]:
    """The losses of a run of as many processes as it asks for."""
    command = [sys.executable, "-m", "schedir", *arguments(config, folder, *sets)]
    code, out, err = finish(start(command))
    assert code == 0, err
    assert err == "" and out.startswith("memory ") and "\nstep " in out
    return losses(folder)


def alone(config: str, folder: Path, *sets: str) -> list[float]:
    """The losses of the same run in this process."""
    assert run(config, [*sets, *ALONE, f'output.folder="{folder}"']) == 0
    return losses(folder)


def losses(folder: Path) -> list[float]:
    with (folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
