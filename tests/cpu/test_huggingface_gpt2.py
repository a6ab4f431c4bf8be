"""Tests of Hugging Face's GPT-2 in stages: the example, and a comparison with the whole model."""

import runpy
from importlib import import_module
from pathlib import Path

import pytest

from tests.cases import campaign
from tests.cpu.train_command import ROOT, run_in_forks, run_launched, run_script

pytest.importorskip("transformers")
EXAMPLE = ROOT / "examples/gpt2.py"


@campaign
def test_example_on_four_processes_prints_same_losses(tmp_path: Path) -> None:
    code, single_output, err = run_launched([str(EXAMPLE)], tmp_path / "alone")
    assert code == 0, err
    check_losses(single_output, run_script(EXAMPLE, 4, tmp_path / "four"))


def test_main_of_example_on_two_processes_prints_same_losses() -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__.update(MICROBATCHES=4, CONTEXT=16)
    import_module("torch._dynamo")  # Each process would import it for the optimizer.
    check_losses(run_in_forks(main, 1), run_in_forks(main, 2))


def check_losses(single_output: str, output: str) -> None:
    assert single_output == output
    losses = [float(line.split()[-1]) for line in single_output.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
