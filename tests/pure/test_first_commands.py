"""Tests of a new user's first commands: completion in a shell, and documented examples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs.command_line_page import build_command_parsers
from schedir.__main__ import main
from schedir.commands.common.name_completion import _NAMES
from schedir.planner import cluster_presets
from schedir.schedules import get_built_in_schedules
from tests.commands import ENV, run_command, run_refused_command

needs_argcomplete = pytest.mark.skipif(
    find_spec("argcomplete") is None, reason="argcomplete is an optional package"
)


def make_completion_environment(line: str) -> dict[str, str]:
    """Return the variables that a shell sets when it asks for the completions of a line."""
    return {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip


def complete(line: str) -> list[str]:
    """Return the completions of a shell for a line, from a new process."""
    reader, writer = os.pipe()
    environment = ENV | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= make_completion_environment(line)
    code = (
        f"import os; os.dup2({writer}, 8); "
        "from schedir.__main__ import main; import sys; sys.exit(main([]))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, pass_fds=[writer], capture_output=True,
        timeout=60,
    )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    assert not completed.stdout, completed
    return text.split()


def complete_in_fork(line: str) -> list[str]:
    """Return the completions of a shell for a line, from a fork of this process."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as printed:
        if (child := os.fork()) == 0:
            signal.alarm(60)
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(writer, 8)
                os.environ.update(make_completion_environment(line))
                main([])  # ends the process
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as pipe:
            text = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        printed.seek(0)
        assert not printed.read()
    return text.split()


@needs_argcomplete
def test_shell_completes_commands() -> None:
    assert complete("schedir dr") == ["draw"]
    assert complete("schedir check") == ["check", "checkpoint"]


@needs_argcomplete
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("schedir draw zb", ["zb_h1", "zb_h2", "zb_v"]),
        ("schedir draw zb_v --micro", ["--microbatches"]),
        ("schedir draw zb_v -O zer", ["zero"]),
        ("schedir simulate zb_v --progress-model torch", ["torch_lazy"]),
        ("schedir plan --model gpt-1", ["gpt-175b", "gpt-1t"]),
        ("schedir draw zb_v --palette ", ["plain", "grey", "bright"]),
        ("schedir plan --stack n", ["nanotron"]),
    ],
)
def test_shell_completes_names(line: str, offers: list[str]) -> None:
    assert complete_in_fork(line) == offers


@needs_argcomplete
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_shell_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "_ARGCOMPLETE" in run_command(capsys, "completion", shell)


def test_missing_completion_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedir.extras.find_spec", lambda name: None)
    assert "pip install 'schedir[completion]'" in run_refused_command(capsys, "completion", "bash")


def test_completed_arguments_are_arguments_of_commands() -> None:
    names = {
        action.dest for parser in build_command_parsers().values() for action in parser._actions
    }
    assert {*_NAMES} <= names


def test_examples_command_does_not_overwrite_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run_command(capsys, "examples")
    files = [path for path in Path("examples").iterdir() if path.is_file()]
    clusters = [*Path("examples", "clusters").iterdir()]
    assert {path.stem for path in clusters} == {*cluster_presets()}
    assert text == f"wrote {len(files) + len(clusters)} files to examples\n"
    plan = ["plan", "--model=gpt-175b", "--batch=64", "--nodes=8", "--closed-form-only", "--json"]
    by_name, by_file = (
        json.loads(run_command(capsys, *plan, f"--cluster={cluster}"))
        for cluster in ("a100", "examples/clusters/a100.toml")
    )
    assert by_name == by_file
    originals = Path(__file__).parents[2] / "examples"
    assert {file.name for file in files} == {
        path.name for path in originals.iterdir() if path.is_file()
    }
    Path("examples", "demo.toml").write_text("mine")
    assert "the folder exists already" in run_refused_command(capsys, "examples")
    assert Path("examples", "demo.toml").read_text() == "mine"
    assert "complete and in order" in run_command(capsys, "check", "examples/mine.py:in_pairs")


def test_schedules_command_lists_built_in_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_command(capsys, "schedules")
    names = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert names == [*get_built_in_schedules()]
    assert max(map(len, text.splitlines())) <= 100
    facts = json.loads(run_command(capsys, "schedules", "--json"))
    assert [entry["schedule"] for entry in facts] == names
    assert {"zb_v": (2, "vee"), "gpipe": (1, "loop")}.items() <= {
        entry["schedule"]: (entry["stages_per_rank"], entry["placement"]) for entry in facts
    }.items()
