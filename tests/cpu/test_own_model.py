"""The page on a model of one's own: its file, its commands, and what it says of both."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.cpu.training import script
from tests.tutorial import OWN_MODEL, ROOT, numbers_apart, steps

PAGE = list(steps(OWN_MODEL.read_text()))


def run(folder: Path, *argv: str) -> str:
    """What a command prints that must go well, and warn of nothing."""
    if argv[:2] == ("torchrun", "--nproc-per-node"):
        return script(folder / argv[3], int(argv[2]), folder / "by torchrun")
    assert argv[0] == "python"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (sys.executable, *argv[1:]), cwd=folder, env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning: " not in done.stderr
    return done.stdout


def test_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {step.kind for step in PAGE} == {"file", "command", "python"}
    (tmp_path / "own.py").write_text("".join(s.text for s in PAGE if s.named == "own.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = import_module("own")
    monkeypatch.delitem(sys.modules, "own")
    commands = [step for step in PAGE if step.kind == "command" and "own.py" in step.text]
    shown = {command.text: numbers_apart(command.prints) for command in commands}
    memory, alone, four, more = shown
    said = {}
    for argv, main in ((memory, own.memory), (alone, lambda: own.alone(5))):  # no process anew
        main()
        said[argv] = capsys.readouterr().out
    said |= {argv: run(tmp_path, *argv.split()) for argv in (four, more)}
    assert {argv: numbers_apart(out) for argv, out in said.items()} == shown

    assert said[four].startswith(said[alone] + "evaluation  loss ")  # the same losses
    own.alone(8)
    steps_more, evaluation = said[more].split("evaluation")
    assert capsys.readouterr().out == said[alone] + steps_more
    inputs, targets = own.batch(1000)
    with torch.no_grad():
        trained = own.whole().eval()
        loss = sum(own.loss(trained(x), y) for x, y in zip(inputs, targets, strict=True))
    assert evaluation == f"  loss {loss / targets.numel():.4f}\n"


def test_several_tensors_pass() -> None:
    (file,) = (step for step in PAGE if step.named == "tables.py")
    exec(file.text, {"__name__": "tables"})
