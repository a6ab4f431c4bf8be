"""Tests that the planner's errors on published figures are those in docs/results/planner.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import planner as tables
from tests import published_runs as published
from tests.cases import cases

PAGE = Path(__file__).parents[2] / "docs" / "results" / "planner.md"
SUMMARY_LINE = re.compile(r"^([a-z][a-z ,]+): ([\d.]+)% in the mean.* ([+-][\d.]+)% at worst", re.M)


@pytest.mark.parametrize("name", cases(["layers", "stages", "node"], ["sc21"]))
def test_errors_are_at_most_documented(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = re.split(rf"`python\s+benchmarks/planner.py\s+{name}`", PAGE.read_text(), maxsplit=1)
    documented = SUMMARY_LINE.search(text)
    assert documented
    tables.TABLES[name]()
    printed = SUMMARY_LINE.search(capsys.readouterr().out)
    assert printed and printed[1] == documented[1]
    assert float(printed[2]) <= float(documented[2])
    assert abs(float(printed[3])) <= abs(float(documented[3]))


def test_memory_matches_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare all cells of ZeRO's Table 1, and all rows of Table 2 of arXiv 2205.05198."""
    tables.print_memory()
    output = capsys.readouterr().out
    assert "54 of 54 cells" in output
    assert output.count("+0.0%") + output.count("-0.0%") == 6


def test_published_rows_are_consistent() -> None:
    """The rows are consistent: GPUs, batches, and parameters by SC21's equation 2."""
    for row, run in zip(
        published.read_table("sc21_table1_weak_scaling"),
        published.read_weak_scaling_runs(),
        strict=True,
    ):
        assert run.choice.gpus == int(row["gpus"])
        assert run.model.params / 1e9 == pytest.approx(float(row["params_billion"]), rel=0.03)
        total = float(row["tflops_per_gpu"]) * run.choice.gpus / 1e3
        assert total == pytest.approx(float(row["aggregate_pflops"]), rel=0.03)
    rows = published.read_table("vtrain_one_node_sample")
    for row, run in zip(rows, published.read_one_node_runs(), strict=True):
        assert run.choice.gpus == int(row["GPUs"])
        assert run.choice.batch == int(row["global batch"])
    assert len(rows) == 144
