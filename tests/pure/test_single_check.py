"""Tests that a command or training run loads its source once and checks its program once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import schedir
from schedir.training.config.config_file import read_config
from schedir.training.train import build_program
from tests.check_calls import record_checks
from tests.commands import run_command

SCHEDULE_SOURCE = """
import pickle
from pathlib import Path
from schedir import B, F

with Path("loaded").open("a") as file:
    file.write("once\\n")

def mine(rank, ranks, microbatches):
    return microbatches * F + microbatches * B
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCHEDULE_SOURCE)
    vee = schedir.PipelineShape(2, 4, placement="vee")
    program = schedir.compile(schedir.schedules.zb_v, vee, progress_model="per_edge", overlap=True)
    Path("f.sched").write_text(schedir.to_text(program))
    return tmp_path


@pytest.fixture
def check_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    return record_checks(monkeypatch)


COMMANDS = (
    "print mine.py:mine", "check mine.py:mine",
    "simulate mine.py:mine --costs F=1,B=2", "draw mine.py:mine", "draw mine.py:mine -o x.svg",
    "compare mine.py:mine", "export mine.py:mine --to torch -o x.csv",
    "export mine.py:mine --to perfetto -o x.json", "simulate mine.py:mine -o x.timeline",
)  # fmt: skip


@pytest.mark.parametrize("argv", COMMANDS)
def test_command_checks_once(
    argv: str, capsys: pytest.CaptureFixture[str], check_calls: list[tuple[str, str]]
) -> None:
    run_command(capsys, *argv.split())
    # A schedule that is proved shortest is compared with built-in ones, which are checked too.
    assert [proof for proof in check_calls if proof[1] == "mine"] == [
        ("complete", "mine"),
        ("proof", "mine"),
    ]
    assert Path("loaded").read_text() == "once\n"


@pytest.mark.parametrize(
    "argv",
    ["simulate f.sched --progress-model per_edge", "draw f.sched --progress-model per_edge",
     "print f.sched",
     "export f.sched --progress-model per_edge --to torch -o x.csv",
     "simulate f.sched --progress-model per_edge --sizes saved=1MB --memory-limit 1GB"],
)  # fmt: skip
def test_program_file_is_checked_once(
    argv: str, capsys: pytest.CaptureFixture[str], check_calls: list[tuple[str, str]]
) -> None:
    run_command(capsys, *argv.split())
    checked_once = [("complete", "zb_v"), ("proof", "zb_v")]
    assert check_calls == ([] if argv.startswith("print") else checked_once)


def test_explain_loads_file_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` also compiles changed versions of the schedule."""
    run_command(capsys, "explain", "mine.py:mine")
    assert Path("loaded").read_text() == "once\n"


@pytest.mark.parametrize(
    "sets",
    [
        ["schedule=mine.py:mine", "ranks=2"],
        ["schedule=zb_v", "ranks=2"],
        ["schedule=zb_v", "ranks=2", "buffer_sharing=minimal"],
        ["schedule=f.sched"],
    ],
)
def test_training_run_checks_once(sets: list[str], check_calls: list[tuple[str, str]]) -> None:
    """The program is checked once, for its transport. Executor and reports do not repeat it."""
    Path("run.toml").write_text("[model]\ntied = false\n[train]\nclip_grad_norm = 0\n")
    config = read_config("run.toml", [f"pipeline.{setting}" for setting in sets])
    program = build_program(config)
    schedir.check(program, config.train.progress_model, blocking_hosts=True)
    schedir.simulate(program, progress_model=config.train.progress_model, blocking_hosts=True)
    assert check_calls == [("complete", program.name), ("proof", program.name)]
    if "mine" in sets[0]:
        assert Path("loaded").read_text() == "once\n"


def test_config_is_pickled_without_schedule_file() -> None:
    Path("run.toml").write_text("[pipeline]\nschedule = 'mine.py:mine'\n")
    config = read_config("run.toml")
    assert pickle.loads(pickle.dumps(config)) == config
    assert Path("loaded").read_text() == "once\n"
