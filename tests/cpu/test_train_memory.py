"""Tests of training within a memory limit, with refusals or as much recomputation as needed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from schedir.errors import MemoryLimitError
from schedir.training.config.config_file import read_config
from schedir.training.train import run
from tests.cases import campaign, cases
from tests.cpu.train_command import (
    ONE_PROCESS,
    ROOT,
    make_arguments,
    read_losses,
    run_forked,
    run_launched,
    train_in_this_process,
    write_small_config,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_small_config(tmp_path)


def test_recompute_fit_meets_limit_with_same_losses(tmp_path: Path, config: Path) -> None:
    """There are two processes, with dropout and messages in shared memory.

    Without recomputation, the first rank needs 1.151 MB.
    """
    losses = train_in_this_process(str(config), tmp_path / "one")
    limit, refused = "memory.memory_limit=1030kB", tmp_path / "refused"
    code, out, err = run_launched(make_arguments(str(config), refused, limit), refused)
    assert code == 2 and "MemoryLimitError" in err and "\nstep" not in out
    assert not (tmp_path / "refused" / "boxes").exists()
    code, out, err = run_forked(str(config), tmp_path / "fits", limit, "memory.recompute=fit")
    assert code == 0, err
    assert out.startswith("recomputed, to use at most ") and " forwards: mb " in out
    predicted = json.loads((tmp_path / "fits" / "summary.json").read_text())["memory"]["predicted"]
    assert max(predicted) <= 1.03e6
    assert read_losses(tmp_path / "fits") == losses


def test_impossible_memory_limit_is_refused(tmp_path: Path, config: Path) -> None:
    limits = ["memory.memory_limit=1kB", "memory.recompute=fit"]
    with pytest.raises(MemoryLimitError):
        run(str(config), [*ONE_PROCESS, *limits, f"output.dir={tmp_path / 'o'}"])


@pytest.mark.parametrize(
    "settings_of_case", cases([["memory.recompute=all"]], [[], ["train.precision=bfloat16"]])
)
def test_counted_memory_is_near_prediction(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], settings_of_case: list[str]
) -> None:
    """Counted memory may be lower by one activation, which an instruction hands over."""
    settings = [*ONE_PROCESS, "pipeline.stages_per_rank=4", "output.record=false",
                f"output.dir={tmp_path / 'o'}", *settings_of_case]  # fmt: skip
    assert run(str(config), [*settings, "output.memory=true"]) == 0
    assert "counted memory of each rank: 1." in capsys.readouterr().out
    memory = json.loads((tmp_path / "o" / "summary.json").read_text())["memory"]
    (predicted,), (counted,) = memory["predicted"], memory["counted"]
    assert 0 <= predicted - counted <= 4 * 2 * 16 * 32
    assert run(str(config), [*settings, "output.overwrite=true", "train.steps=1"]) == 0
    assert "counted" not in (tmp_path / "o" / "summary.json").read_text()


def test_recompute_example_has_limit_with_and_without_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []

    def read_and_refuse_first(path: str, sets: list[str]) -> int:
        configs.append(read_config(path, sets))
        return 2 if len(configs) == 1 else 0

    monkeypatch.setattr("schedir.training.train.run", read_and_refuse_first)
    monkeypatch.setattr("sys.argv", ["recompute.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(ROOT / "examples" / "recompute.py"), run_name="__main__")
    assert ending.value.code == 0
    assert [config.memory.recompute for config in configs] == [None, "fit"]
    assert {config.memory.memory_limit for config in configs} == {"36MB"}


@campaign
def test_recompute_example_runs(tmp_path: Path) -> None:
    command = [str(ROOT / "examples" / "recompute.py"), str(tmp_path / "out")]
    code, out, err = run_launched(command, tmp_path / "out")
    assert code == 0, err
    assert "rank 0 needs" in err and ": 7 of 16 forwards: mb 1-7 of stage 0" in out
