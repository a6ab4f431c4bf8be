"""The part of the tutorial that runs: a GPT in processes, and modules of one's own."""

import sys
from pathlib import Path

import pytest

from tests.commands import command
from tests.tutorial import PAGE, ROOT, numbers_apart, steps


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
    assert numbers_apart(done.stdout) == numbers_apart(train.prints)
    try:
        exec(compile(modules.text, str(PAGE), "exec"), {"__name__": "tutorial"})
    finally:
        sys.modules.pop("mine", None)
