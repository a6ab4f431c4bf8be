"""Tests of training within a memory limit, with refusals or as much recomputation as needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedir.training.train import run
from tests.cases import cases
from tests.cpu.train_command import (
    ONE_PROCESS,
    ROOT,
    make_arguments,
    read_losses,
    run_forked,
    run_launched,
    write_small_config,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_small_config(tmp_path)


def test_recompute_fit_meets_limit_with_same_losses(tmp_path: Path, config: Path) -> None:
    """There are two processes, with dropout and messages in shared memory."""
    plain_folder = tmp_path / "own"
    assert run_forked(str(config), plain_folder)[0] == 0
    plain_memory = json.loads((plain_folder / "summary.json").read_text())["memory"]["predicted"]
    limit, refused = f"memory.memory_limit={int(0.9 * max(plain_memory))}B", tmp_path / "refused"
    code, out, err = run_launched(make_arguments(str(config), refused, limit), refused)
    assert code == 2 and "MemoryLimitError" in err and "\nstep" not in out
    assert not (tmp_path / "refused" / "boxes").exists()
    code, out, err = run_forked(str(config), tmp_path / "fits", limit, "memory.recompute=fit")
    assert code == 0, err
    assert out.startswith("recomputed, to use at most ") and " forwards: mb " in out
    predicted = json.loads((tmp_path / "fits" / "summary.json").read_text())["memory"]["predicted"]
    assert max(predicted) <= 0.9 * max(plain_memory)
    assert read_losses(tmp_path / "fits") == read_losses(plain_folder)


def test_impossible_memory_limit_is_refused(tmp_path: Path, config: Path) -> None:
    limits = ["memory.memory_limit=1kB", "memory.recompute=fit"]
    code, _, err = run_forked(str(config), tmp_path / "o", *limits)
    assert code == 2 and "MemoryLimitError" in err


@pytest.mark.parametrize(
    "settings_of_case", cases([["memory.recompute=all"]], [[], ["train.precision=bfloat16"]])
)
def test_counted_memory_is_near_prediction(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], settings_of_case: list[str]
) -> None:
    """Counted memory may be lower by one activation, which an instruction hands over."""
    settings = [
        *ONE_PROCESS,
        "pipeline.stages_per_rank=4",
        *settings_of_case,
        f"output.dir={tmp_path / 'o'}",
    ]
    assert run(str(config), [*settings, "output.record=false", "output.memory=true"]) == 0
    assert "counted memory of each rank: 1." in capsys.readouterr().out
    memory = json.loads((tmp_path / "o" / "summary.json").read_text())["memory"]
    (predicted,), (counted,) = memory["predicted"], memory["counted"]
    assert 0 <= predicted - counted <= 4 * 2 * 16 * 32
    assert run(str(config), [*settings, "output.record=false", "output.overwrite=true"]) == 0
    assert "counted" not in (tmp_path / "o" / "summary.json").read_text()


def test_recompute_example_runs(tmp_path: Path) -> None:
    command = [str(ROOT / "examples" / "recompute.py"), str(tmp_path / "out")]
    code, out, err = run_launched(command, tmp_path / "out")
    assert code == 0, err
    assert "rank 0 needs" in err and ": 7 of 16 forwards: mb 1-7 of stage 0" in out
