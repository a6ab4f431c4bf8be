"""Tests that scripts of benchmarks/ run all their code on small sizes with `--smoke`.

A few run by default, and all with ALL_CASES=1, as in `make campaign`.
"""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import compute_median_interval, parse, report_missing
from tests.cases import cases
from tests.cpu.train_command import ROOT, run_launched

TEXTS = {path.stem: path.read_text() for path in sorted((ROOT / "benchmarks").glob("*.py"))}
SCRIPTS = [name for name, text in TEXTS.items() if '__name__ == "__main__":\n    ' in text]
# One runs kernels, one compares programs, and one ends early without a GPU.  `make lint` checks
# the types of all scripts.
QUICK = ["alignment", "gpu", "kernels"]


@pytest.mark.parametrize("name", cases(QUICK, [name for name in SCRIPTS if name not in QUICK]))
def test_script_runs_with_smoke(name: str, tmp_path: Path) -> None:
    """The script succeeds and prints something, even if this machine lacks a requirement."""
    path = ROOT / "benchmarks" / f"{name}.py"
    code, out, err = run_launched([str(path), "--smoke"], tmp_path / name)
    assert code == 0, out + err
    assert out or err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "kernels"])
def test_benchmark_needs_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    assert import_module(f"benchmarks.{name}").main() == 2
    out, err = capsys.readouterr()
    assert "GPU" not in out and "needs a GPU" in err


def test_every_script_parses_shared_options() -> None:
    """A script that ignored `--smoke` would run in full."""
    assert {*SCRIPTS} >= {*QUICK} and len(SCRIPTS) > 10
    assert not [name for name in SCRIPTS if not re.search(r"\bparse\(", TEXTS[name])]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["all"])
    parser.add_argument("--rounds", type=int, default=20)
    return parser


@pytest.mark.parametrize(
    ("words", "names", "rounds"),
    [
        ("", ["all"], 20),
        ("--smoke", ["one"], 1),
        ("--smoke --rounds 3", ["one"], 3),
        ("--smoke two", ["two"], 1),
    ],
)
def test_smoke_replaces_only_defaults(words: str, names: list[str], rounds: int) -> None:
    args = parse(make_parser(), words.split(), names=["one"], rounds=1)
    assert (args.names, args.rounds, args.smoke) == (names, rounds, "--smoke" in words)


def test_smoke_value_of_unknown_option_is_refused() -> None:
    with pytest.raises(AssertionError):
        parse(make_parser(), [], round=1)


def test_missing_requirement_fails_measurement_but_not_smoke(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [report_missing("needs a GPU", smoke) for smoke in (False, True)] == [2, 0]
    assert capsys.readouterr() == ("", "needs a GPU\n" * 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_median_interval_contains_median_and_two_samples(values: list[float]) -> None:
    low, high = compute_median_interval(values)
    assert {low, high} <= {*values}
    assert sum(v <= low for v in values) <= sum(v <= high for v in values)
    assert low <= sorted(values)[len(values) // 2] <= high
