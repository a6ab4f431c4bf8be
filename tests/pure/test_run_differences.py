"""Tests of the differences of two runs, which add up, and of costs from a run."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Program
from schedir.commands.common.schedule_options import parse_costs
from schedir.compiler.compile import lower
from schedir.errors import UsageError
from schedir.predict.calibrate import calibrate, fill_missing_backwards, format_costs
from schedir.predict.timeline_diff import compare_timelines
from schedir.schedules import gpipe, interleaved, one_f_one_b
from tests.commands import run_command, run_refused_command
from tests.strategies import compute_programs, costs

PROGRAM = schedir.compile(one_f_one_b, PipelineShape(3, 4))


@given(compute_programs(), st.data())
def test_differences_of_rank_sum_to_span_difference(draft: Program, data: st.DataObject) -> None:
    program = lower(draft)
    first_run, second_run = (
        schedir.simulate(program, data.draw(costs(draft.shape))) for _ in range(2)
    )
    increases: dict[int, float] = defaultdict(float)
    for difference in compare_timelines(first_run, second_run):
        increases[difference.rank] += difference.increase
    assert {*increases.values()} <= {second_run.span - first_run.span}


def test_largest_difference_is_first() -> None:
    even_run = schedir.simulate(PROGRAM, Costs(F=1, B=2, send=0.5))
    slow_run = schedir.simulate(PROGRAM, Costs(F=(1, 1, 2), B=2, send=0.5))
    largest = compare_timelines(even_run, slow_run)[0]
    assert (largest.rank, largest.activity, largest.first_time, largest.second_time) == (
        2,
        "F 2",
        4,
        8,
    )
    assert all(d.increase == 0 for d in compare_timelines(even_run, even_run))


def test_incomparable_runs_are_refused() -> None:
    run = schedir.simulate(PROGRAM)
    with pytest.raises(UsageError, match="different programs"):
        compare_timelines(run, schedir.simulate(schedir.compile(gpipe, PipelineShape(3, 4))))
    with pytest.raises(UsageError, match="costs' units and s"):
        compare_timelines(run, replace(run, unit="s"))


def test_calibrate_adds_host_delay_to_instruction() -> None:
    """A run with small delays before its instructions is predicted with the same time."""
    true_costs = Costs(F=1, B=2, send=0.5, step=1)
    delayed_costs = Costs(F=1.25, B=2.25, send=0.5, step=1.25)
    program = schedir.compile(interleaved, PipelineShape(2, 4, 2))
    timeline = schedir.simulate(program, delayed_costs)
    spans = timeline.spans.copy()
    spans["start"] += np.where(spans["lane"] == 0, 0.25, 0)
    calibrated = calibrate(replace(timeline, spans=spans, kind="measured"))
    for name in ("F", "B", "send", "step"):
        # The first instruction begins the run, so its delay is unknown.
        assert np.allclose(getattr(calibrated, name), getattr(delayed_costs, name), atol=0.07), name
        assert getattr(calibrated, name) != getattr(true_costs, name) or name == "send"


def test_formatted_costs_parse() -> None:
    costs = Costs(F=(1.5, 2), B=3, send=1e-5, FB=(1, 2))
    assert parse_costs(format_costs(costs)) == costs
    assert fill_missing_backwards(Costs(F=1, B=3, I=0, W=0), PROGRAM) == Costs(
        F=1, B=(3, 3, 3), I=(1.5,) * 3, W=(1.5,) * 3
    )


def test_calibrate_simulate_and_compare_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--costs", "F=1:1:1.5,B=2:2:3,send=0.25,step=1")
    shape = ("one_f_one_b", "--ranks=3", "--microbatches=4", "-o")
    first_output = run_command(capsys, "simulate", *shape, "first.timeline", *options)
    calibrated = run_command(capsys, "calibrate", "first.timeline").strip()
    second_output = run_command(
        capsys, "simulate", "first.timeline", "--costs", calibrated, "-o", "again.timeline"
    )
    assert second_output == first_output
    out = run_command(capsys, "compare", "first.timeline", "again.timeline")
    assert "the instructions of both runs take the same times" in out
    run_command(
        capsys, "simulate", "first.timeline", "--costs=F=1,B=2,step=1", "-o", "even.timeline"
    )
    out = run_command(capsys, "compare", "even.timeline", "first.timeline")
    assert "span of the second run: +" in out and "B 2" in out and "idle: imbalance" in out
    assert "differ" not in run_command(capsys, "compare", "first.timeline", "gpipe", "--ranks=3",
                                "--microbatches=4")  # fmt: skip
    assert "must end in .timeline" in run_refused_command(capsys, "calibrate", "one_f_one_b")
    assert "must end in .timeline" in run_refused_command(
        capsys, "simulate", "gpipe", "-o", "x.json"
    )
    assert not Path("x.json").exists()


def test_compare_uses_times_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prediction has the shape, the mean times and the unit of the run, unless options differ."""
    monkeypatch.chdir(tmp_path)
    costs = Costs(F=(1, 1, 1.5), B=(2, 2, 3), send=0.25, step=1)
    program = schedir.compile("one_f_one_b", ranks=3, microbatches=4)
    schedir.save_timeline(replace(schedir.simulate(program, costs), unit="s"), "run.timeline")
    calibrated = run_command(capsys, "calibrate", "run.timeline").strip()
    compare = ("compare", "run.timeline", "eager_1f1b", "zb_h1", "--json")
    rows = json.loads(run_command(capsys, *compare))
    assert rows == json.loads(run_command(capsys, *compare, f"--costs={calibrated}"))
    assert [(row["ranks"], row["microbatches"], row["unit"]) for row in rows] == [(3, 4, "s")] * 3
    eager = schedir.simulate(schedir.compile("eager_1f1b", ranks=3, microbatches=4), costs)
    assert rows[1]["span"] == pytest.approx(eager.span, rel=1e-4)
    doubled_rows = json.loads(run_command(capsys, *compare, "--costs=F=2,B=4"))
    assert doubled_rows[1]["span"] == 2 * schedir.simulate(eager.program, Costs(F=1, B=2)).span
