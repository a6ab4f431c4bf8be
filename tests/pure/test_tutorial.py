"""Tests that the tutorials' commands have the shown output. tests/cpu runs those with torch."""

import re
from pathlib import Path

import pytest

from schedir.__main__ import main
from tests.tutorial import FIRST_SCHEDULE, READ_A_TRACE, ROOT, Step, read_steps


def test_first_schedule_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands of the page run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    num_refused = 0
    for step in read_steps(FIRST_SCHEDULE.read_text()):
        if step.kind == "file":
            with open(step.named, "a") as file:
                file.write(step.text)
            continue
        assert step.kind == "command" and step.prints, step
        num_refused += main(step.argv) != 0
        out, err = capsys.readouterr()
        assert out + err == step.prints, step.text
    assert num_refused == 1
    assert (tmp_path / "mine.png").stat().st_size > 100_000
    assert (tmp_path / "split.html").stat().st_size > 10_000


def uses_recorded_run(step: Step) -> bool:
    """Return whether a command needs no run on this machine."""
    return "examples/traced.timeline" in step.text or step.argv[0] == "export"


def test_read_a_trace_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands that read the recorded run. The text of the page has their numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = READ_A_TRACE.read_text()
    printed = ""
    for step in filter(uses_recorded_run, read_steps(page)):
        argv = step.argv
        for k, word in enumerate(argv):
            if word.startswith("$(schedir "):
                assert main(word[2:-1].split()[1:]) == 0
                argv[k] = capsys.readouterr().out.strip()
        assert main(argv) == 0, step.text
        out, err = capsys.readouterr()
        assert (out, err) == (step.prints, ""), step.text
        printed += out
    text = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    shares = re.findall(r"\d+\.\d+%", text)
    seconds = re.findall(r"\d+\.\d+(?= s\b)", text)
    rounded = {f"{float(number):.3f}" for number in re.findall(r"\d\.\d{3,}", printed)}
    assert len(shares) > 8 and all(share in printed for share in shares), shares
    assert len(seconds) > 3 and rounded.issuperset(seconds), seconds
    assert {path.name for path in tmp_path.iterdir()} == {
        "examples", "idle.svg", "run.html", "zb.csv",
    }  # fmt: skip
