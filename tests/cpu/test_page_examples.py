"""Tests of examples on pages that need torch: Python code, and runs of `schedir train`."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from schedir.__main__ import main
from tests.cpu.train_command import Run
from tests.pure.test_page_examples import commands
from tests.tutorial import READERS, ROOT, read_steps

BLOCKS = [
    (name, step.text)
    for name in READERS
    for step in read_steps((ROOT / "docs" / f"{name}.md").read_text())
    if step.kind == "python" and step.needs_torch
]


@pytest.mark.parametrize("text", [text for _, text in BLOCKS], ids=[name for name, _ in BLOCKS])
def test_python_block_runs(text: str) -> None:
    exec(compile(text, "page", "exec"), {})


TRAINS = [
    (name, step.text, step.prints)
    for name in READERS
    for step in read_steps((ROOT / "docs" / f"{name}.md").read_text())
    if step.kind == "command" and step.text.startswith("schedir train") and step.prints
]


@pytest.mark.parametrize(("text", "prints"), [train[1:] for train in TRAINS])
def test_training_command_prints_shown_output(text: str, prints: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert prints.endswith(
        "\n...\n"
    )  # it does not show losses, which depend on the number of steps
    words = [*shlex.split(text)[1:], "--set", "train.steps=1"]
    _, out, err = Run(words, tmp_path / "run", cwd=str(tmp_path)).finish()
    shown = ".*".join(map(re.escape, prints.split("...\n")))
    assert re.fullmatch(shown, out, flags=re.S), (out, err)


def test_code_of_save_and_resume_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop saves checkpoints, and then resumes from the newest. The commands read them."""
    page = (ROOT / "docs" / "how-to" / "save-and-resume.md").read_text()
    (loop,) = [step.text for step in read_steps(page) if step.kind == "python"]
    monkeypatch.chdir(tmp_path)
    for first in (0, 20):
        names: dict[str, Any] = {}
        exec(compile(loop, "save-and-resume.md", "exec"), names)
        assert names["first"] == first
    shown_commands = commands(page)
    assert len(shown_commands) == 4
    for command in shown_commands:
        assert main(shlex.split(command, comments=True)[1:]) == 0, command
