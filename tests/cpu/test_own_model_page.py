"""Tests that files and commands of the page about your own model have the shown output."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from schedir.checkpoints import load
from schedir.runtime import GradientOptions, InProcessExecutor
from tests.cpu.train_command import Run, run_script
from tests.tutorial import OWN_MODEL, read_steps, replace_numbers

PAGE = list(read_steps(OWN_MODEL.read_text()))


def run(folder: Path, *argv: str) -> str:
    """Return the output of a command of the page, which must succeed without a warning."""
    if argv[:2] == ("torchrun", "--nproc-per-node"):
        script_path, *script_argv = argv[3:]
        return run_script(
            folder / script_path, int(argv[2]), folder / f"run {script_argv}", *script_argv
        )
    assert argv[0] == "python"
    words = [str(folder / argv[1]), *argv[2:]]
    code, out, err = Run(words, folder / "alone", cwd=str(folder)).finish()
    assert code == 0 and "Warning: " not in err, err
    return out


def test_commands_of_page_print_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {step.kind for step in PAGE} == {"file", "command"}
    (tmp_path / "own.py").write_text("".join(s.text for s in PAGE if s.named == "own.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = import_module("own")
    monkeypatch.delitem(sys.modules, "own")
    commands = [step for step in PAGE if step.kind == "command" and "own.py" in step.text]
    shown = {command.text: replace_numbers(command.prints) for command in commands}
    one_process, four_processes, resumed = shown
    printed = {one_process: run(tmp_path, *one_process.split())}
    printed |= {argv: run(tmp_path, *argv.split()) for argv in (four_processes, resumed)}
    assert {argv: replace_numbers(out) for argv, out in printed.items()} == shown

    # Four processes print the losses of one, also after the resume.
    assert printed[four_processes].startswith(printed[one_process] + "evaluation  loss ")
    module.train_in_one_process(8)
    more_steps, evaluation = printed[resumed].split("evaluation")
    assert capsys.readouterr().out == printed[one_process] + more_steps

    model = module.build_model()
    arguments = {"loss": module.loss, "boundary": module.BOUNDARY, "tied_weights": module.TIES}
    executor = InProcessExecutor(
        module.PROGRAM, module.split(model), gradients=GradientOptions(max_norm=1.0), seed=7,
        **arguments,
    )  # fmt: skip
    assert load(executor, "checkpoints") is not None
    inputs, targets = module.batch(1000)
    model.eval()
    with torch.no_grad():
        loss = sum(module.loss(model(x), y) for x, y in zip(inputs, targets, strict=True))
    assert evaluation == f"  loss {loss / targets.numel():.4f}\n"


def test_file_with_several_boundary_tensors_runs() -> None:
    (file,) = (step for step in PAGE if step.named == "tables.py")
    exec(file.text, {"__name__": "tables"})
