"""Tests of the tutorials on training and on traces, which start processes."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from schedir.__main__ import main
from tests.cases import ALL
from tests.cpu.train_command import Run, run_script
from tests.tutorial import READ_A_TRACE, ROOT, TRAIN_A_MODEL, Step, read_steps, replace_numbers

# The difference between a prediction and its run depends on the machine.
PREDICTION = (
    r"bubble N%, (predicted N%( and N% unexplained)?"
    r"|not predicted: the simulation takes N% (more|less))(?= |$)"
)


def remove_prediction(text: str) -> str:
    return re.sub(PREDICTION, "bubble", replace_numbers(text))


def test_comparison_ignores_prediction_of_bubble() -> None:
    step = "step 5  loss 4.6  norm 3.4  bubble 45.8%, "
    predicted = remove_prediction(f"{step}predicted 32.2% and 13.8% unexplained\nstep 10")
    for other in ("predicted 32.2%", "not predicted: the simulation takes 12% more"):
        assert remove_prediction(f"{step}{other}\nstep 10") == predicted
    for other in ("predicted", "predicted 3% of it", "not predicted"):
        assert remove_prediction(f"{step}{other}\nstep 10") != predicted


def run_command(step: Step, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command of a page in the current folder, and return what it prints."""
    command = shlex.split(step.text)
    if command[0] == "torchrun":
        assert command[1] == "--nproc-per-node"
        return run_script(folder / command[3], int(command[2]), folder / "by torchrun")
    if command[:2] == ["python", "train.py"]:
        runpy.run_path(command[1], run_name="__main__")
        return capsys.readouterr().out
    if command[0] == "schedir" and command[1] != "train":
        assert main(command[1:]) == 0, step.text
        return capsys.readouterr().out
    argv = [str(folder / command[1]), *command[2:]] if command[0] == "python" else command[1:]
    logs = folder / f"run {command[2:]}".replace("/", " ")
    code, out, err = Run(argv, logs, cwd=str(folder), COLUMNS="80").finish()
    assert code == 0, (step.text, out, err)
    return out


FEWER_STEPS = "steps = 20\nlog_every = 10\n", "steps = 4\nlog_every = 2\n"
SMALLER_MODEL = "WIDTH, ROWS = 4, 8, 768, 128\n", "WIDTH, ROWS = 4, 8, 64, 16\n"


def find_losses(text: str) -> list[str]:
    return re.findall(r"loss ([\d.]+)", text)


def test_train_a_model_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole page runs in an empty folder.

    Without ALL_CASES=1, `schedir train` runs fewer steps, and only one of two schedules.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = list(read_steps(TRAIN_A_MODEL.read_text()))
    assert any(FEWER_STEPS[0] in step.text for step in page if step.kind == "file")
    assert {step.kind for step in page} == {"file", "command"}
    for step in page:
        if step.kind == "file":
            with open(tmp_path / step.named, "a") as file:
                file.write(step.text if ALL else step.text.replace(*FEWER_STEPS))
    commands = [step for step in page if step.kind == "command"]
    shown = [find_losses(step.prints) for step in commands]
    assert shown[0] == 2 * shown[1] and shown[2] == shown[3]
    if not ALL:
        del commands[3]  # the same run with another schedule
    try:
        printed = [run_command(step, tmp_path, capsys) for step in commands]
    finally:
        sys.modules.pop("mine", None)
    for step, out in zip(commands, printed, strict=True):
        assert remove_prediction(out) == remove_prediction(step.prints), step.text
    in_process, in_four, *trained = map(find_losses, printed)
    assert in_process == 2 * in_four and len(in_four) == 3  # the same losses, as the page states
    assert trained and all(losses == trained[0] for losses in trained)
    assert {path.name for path in tmp_path.iterdir()} >= {"schedir-output", *["second"] * ALL}


def test_read_a_trace_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that record and read a run work in order.

    Without ALL_CASES=1, the recorded model is smaller.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    script = (ROOT / "examples" / "traced.py").read_text()
    assert SMALLER_MODEL[0] in script
    text = script if ALL else script.replace(*SMALLER_MODEL)
    (tmp_path / "examples" / "traced.py").write_text(text)
    (tmp_path / "examples" / "traced.timeline").symlink_to(ROOT / "examples" / "traced.timeline")
    page = [step for step in read_steps(READ_A_TRACE.read_text()) if step.kind == "command"]
    commands = [step for step in page if "traced.timeline" not in step.text]
    assert len(commands) == 6
    for step in commands:
        out = run_command(step, tmp_path, capsys)
        if step.text.startswith("schedir compare"):
            # The width of its columns depends on the numbers, and the machine decides whether a
            # line warns that a simulation is far from the run.
            out, shown = (
                re.sub("(?m)^a simulation of .*", "", text) for text in (out, step.prints)
            )
            out, shown = ("".join(re.findall(r"\w+", text)) for text in (out, shown))
            assert re.sub(r"\d", "", out) == re.sub(r"\d", "", shown)
        else:
            assert replace_numbers(out) == replace_numbers(step.prints), step.text
    assert (tmp_path / "again.timeline").stat().st_size > 1000
