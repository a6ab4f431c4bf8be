"""The tutorial's commands print what it shows; what needs torch is in tests/cpu."""

from pathlib import Path

import pytest

from schedir.__main__ import main
from tests.tutorial import PAGE, ROOT, steps


def test_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    refused = 0
    for step in steps(PAGE.read_text()):
        if step.kind == "file":
            with open("mine.py", "a") as file:
                file.write(step.text)
        elif step.kind == "command" and step.argv[0] != "train":
            refused += main(step.argv) != 0
            out, err = capsys.readouterr()
            assert out + err == step.prints, step.text
    assert refused == 2
    assert (tmp_path / "mine.png").stat().st_size > 100_000
