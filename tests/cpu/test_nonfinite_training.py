"""Tests that a run with NaN or infinite values stops and names the origin, or skips steps."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedir.errors import UsageError
from schedir.models import gpt
from schedir.runtime.program_runner import ProgramRunner
from schedir.training.config.train_config import TrainConfig
from schedir.training.train import run
from tests.cases import each_value
from tests.cpu.train_command import run_forked

Poison = Callable[..., str]
GOLDEN = Path(__file__).parents[1] / "golden"

POISON = """\
import math
import os

import torch

from schedir.models import gpt
from schedir.runtime.program_runner import ProgramRunner
from schedir.schedules import {schedule} as mine

build, begin_step, current_step = gpt.build_stage, ProgramRunner.begin_step, [0]


def begin_and_record(self, *arguments):
    if self.program.has_backward:
        current_step[0] = self.state.random_streams.step
    begin_step(self, *arguments)


def build_stage(config, s, stages, **options):
    def spoil(module, inputs, y):
        if current_step[0] in {steps} and s == {stage} and os.environ.get("RANK", "0") in {ranks}:
            {what}
        return y

    module = build(config, s, stages, **options)
    module.register_forward_hook(spoil)
    return module


ProgramRunner.begin_step = begin_and_record
gpt.build_stage = build_stage
"""
FORWARD, BACKWARD = "y = y * math.nan", "y.register_hook(lambda dy: dy * math.inf)"
ONE = ["pipeline.ranks=1", "pipeline.tp=1", "pipeline.stages_per_rank=4", "train.log_every=2",
       "output.record=false"]  # fmt: skip


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Poison:
    """Return a function that writes a schedule file, which spoils a stage in some steps.

    The patches of the file are undone after the test.
    """
    monkeypatch.setattr(gpt, "build_stage", gpt.build_stage)
    monkeypatch.setattr(ProgramRunner, "begin_step", ProgramRunner.begin_step)

    def write(
        what: str, stage: int, *steps: int, ranks: str = "01234567", schedule: str = "interleaved"
    ) -> str:
        path = tmp_path / f"poison{len([*tmp_path.iterdir()])}.py"
        path.write_text(
            POISON.format(what=what, stage=stage, steps=steps, ranks=[*ranks], schedule=schedule)
        )
        return f"pipeline.schedule={path}:mine"

    return write


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "loss.csv").open() as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def run_until_stop(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return a function that runs one process, which stops, and returns its errors."""

    def run_one_process(*sets: str) -> list[str]:
        assert run(config, [*ONE, *sets, f'output.dir="{tmp_path}"']) == 1
        return capsys.readouterr().err.splitlines()

    return run_one_process


@pytest.mark.parametrize(
    ("stage", "more"),
    each_value([0, 2, 3], [[], ["train.precision=bfloat16"], ["train.precision=float16"]]),
)
def test_run_stops_and_names_stage_of_nan_loss(
    tmp_path: Path, poison: Poison, run_until_stop: Any, stage: int, more: list[str]
) -> None:
    err = run_until_stop(*more, poison(FORWARD, stage, 3))
    golden = (GOLDEN / "not_finite.txt").read_text().splitlines()
    assert [re.sub(r" #\d+ +F \d\.0", " #9  F 2.0", line) for line in err] == golden
    assert err[1].split()[3:5] == ["F", f"{stage}.0"]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert all(math.isfinite(float(row["loss"])) for row in rows(tmp_path))
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("stage", "sets", "clip"),
    each_value(
        [
            (1, []),
            (2, ["train.precision=bfloat16"]),
            (1, ["pipeline.stages_per_rank=4", "pipeline.placement=[0,0,0,0]",
                 "pipeline.optimizer_steps=3", "pipeline.weight_delay=1"]),
        ],
        ["1.0", "0"],
    ),
)  # fmt: skip
def test_run_stops_and_names_stage_of_bad_gradient(
    tmp_path: Path, poison: Poison, run_until_stop: Any, stage: int, sets: list[str], clip: str
) -> None:
    err = run_until_stop(*sets, f"train.clip_grad_norm={clip}", poison(BACKWARD, stage, 0))
    assert err[0].startswith("interleaved: a gradient of step 1 is infinite or NaN")
    assert err[1].split()[3:5] == ["B", f"{stage}.0"]
    assert ("only on ranks with finite gradients" in err[0]) == (clip == "0")
    assert rows(tmp_path) == []


def test_origin_search_repeats_random_numbers(poison: Poison, run_until_stop: Any) -> None:
    rare_nan = "y = y / (torch.rand(()) > 0.05)"
    err = run_until_stop("train.steps=400", poison(rare_nan, 1, *range(400)))
    assert err[1].split()[4].startswith("1.")


def test_skipped_steps_are_counted(
    config: str, tmp_path: Path, poison: Poison, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = ["train.on_nonfinite=skip", poison(FORWARD, 1, 1, 2), f'output.dir="{tmp_path}"']
    assert run(config, [*ONE, *skip]) == 0
    step_lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.partition("skipped ")[2][:1] for line in step_lines] == ["1", "1", "0"]
    assert [row["skipped"] for row in rows(tmp_path)] == ["0", "1", "1", "0", "0", "0"]
    finite = [math.isfinite(float(row["loss"])) for row in rows(tmp_path)]
    assert finite == [True, False, False, True, True, True]


@pytest.mark.parametrize(
    ("poisoned", "sets", "where"),
    [
        # The second of two replicas.
        ((FORWARD, 2, "1"), ["pipeline.tp=1", "pipeline.dp=2", "pipeline.ranks=1",
                           "pipeline.stages_per_rank=4"],
         ("process 1 (", "rank 0", "F 2.0", "replica 1")),
        # Without a gradient norm, while all other ranks have finite gradients.
        ((BACKWARD, 0, "0"), ["pipeline.tp=1", "train.clip_grad_norm=0", "train.timeout=10"],
         ("process 0 (", "rank 0", "B 0.0", "")),
        # One tensor-parallel rank. Both ranks get its sums.
        ((BACKWARD, 3, "1"), ["pipeline.ranks=1", "pipeline.stages_per_rank=4",
                            "train.transport=gloo"],
         ("process ", "rank 0", "B 3.0", "")),
    ],
)  # fmt: skip
def test_all_processes_stop_with_one_error(
    config: str, tmp_path: Path, poison: Poison, poisoned: Any, sets: list[str], where: Any
) -> None:
    what, stage, ranks = poisoned
    sets = [*sets, "train.log_every=2", poison(what, stage, 3, ranks=ranks)]
    code, _, err = run_forked(config, tmp_path / "out", *sets)
    process, rank, instr, replica = where
    assert code == 1 and err.startswith(process) and err.count("of step 4 is infinite") == 1
    site = err.splitlines()[1]
    assert site.strip().startswith(rank) and instr in site and site.endswith(replica)
    assert [row["step"] for row in rows(tmp_path / "out")] == ["1", "2", "3"]


def test_skipping_without_gradient_norm_is_refused() -> None:
    message = "needs the gradient norm, which clip_grad_norm = 0 does not compute"
    with pytest.raises(UsageError, match=message):
        TrainConfig(on_nonfinite="skip", clip_grad_norm=0.0)
    with pytest.raises(UsageError, match="nonfinite 'go' is not known"):
        TrainConfig(on_nonfinite="go")
