"""The part of the tutorial that runs: a GPT in processes, and modules of one's own."""

import re
import sys
from pathlib import Path

import pytest

from tests.commands import command
from tests.tutorial import PAGE, ROOT, numbers_apart, steps

# How near a prediction is to its run, the machine decides.
NEAR = (
    r"bubble N%, (predicted N%( and N% unexplained)?"
    r"|not predicted: at its mean times it takes N% (more|less))(?= |$)"
)


def said(text: str) -> str:
    return re.sub(NEAR, "bubble", numbers_apart(text))


def test_a_run_may_be_predicted_or_not() -> None:
    step = "step 5  loss 4.6  norm 3.4  bubble 45.8%, "
    predicted = said(f"{step}predicted 32.2% and 13.8% unexplained\nstep 10")
    for other in ("predicted 32.2%", "not predicted: at its mean times it takes 12% more"):
        assert said(f"{step}{other}\nstep 10") == predicted
    for other in ("predicted", "predicted 3% of it", "not predicted"):
        assert said(f"{step}{other}\nstep 10") != predicted


def test_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = list(steps(PAGE.read_text()))
    (tmp_path / "mine.py").write_text("".join(s.text for s in page if s.kind == "file"))
    (train,) = (s for s in page if s.kind == "command" and s.argv[0] == "train")
    (modules,) = (s for s in page if s.kind == "python")
    done = command(*train.argv)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == said(train.prints)
    try:
        exec(compile(modules.text, str(PAGE), "exec"), {"__name__": "tutorial"})
    finally:
        sys.modules.pop("mine", None)
