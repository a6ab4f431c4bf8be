"""Tests that commands print the bound on all schedules, and no bound where it is unknown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

import schedir
from schedir import Costs, PipelineShape, Sizes, Timeline, load_timeline
from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.predict.calibrate import calibrate, fill_missing_backwards
from schedir.predict.simulate import simulate
from schedir.predict.what_if import advise
from schedir.schedule_search.bounds.program_bound import compute_program_bound
from schedir.schedule_search.search import search_schedule
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import get_placement_mark, get_weight_delay_mark, has_free_v
from schedir.viz import compare, gantt
from tests.cases import cases, each_value
from tests.commands import run_command

TIMELINE_FILE = Path(__file__).parents[2] / "examples" / "traced.timeline"
UNEVEN = Costs(F=(1, 1.2, 0.9, 1.4), I=(1.1, 1, 1.3, 1), W=(0.5, 0.7, 0.6, 0.9), send=0.1)
LEGEND = "lower bound at this peak"
UNEVEN_OPTION = "--costs=F=1:1.2:0.9:1.4,I=1.1:1:1.3:1,W=0.5:0.7:0.6:0.9,send=0.1"


def simulate_built_in(name: str, costs: Costs | None = None, v: int | None = None) -> Timeline:
    schedule = get_built_in_schedules()[name]
    placement, fixed = get_placement_mark(schedule)
    v = v or fixed or (2 if has_free_v(schedule) else 1)
    program = compile(schedule, PipelineShape(4, 8, v, placement or "loop"), costs=costs)
    return simulate(program, costs)


def read_json_output(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run_command(capsys, *argv, "--json"))


# ---------------------------------------------------------------- in tables and lines


@pytest.mark.parametrize("name", cases(["one_f_one_b", "zb_h1"], ["gpipe", "zb_h2"]))
def test_simulate_prints_bound_and_gain(capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = simulate_built_in(name, UNEVEN)
    bound = compute_program_bound(run.program, UNEVEN)
    assert bound is not None and bound.value <= run.span * (1 + 1e-9)
    row = read_json_output(capsys, "simulate", name, UNEVEN_OPTION)
    assert row["bound"] == bound.value and row["gap_to_bound"] == max(run.span / bound.value - 1, 0)
    (line,) = (
        line
        for line in run_command(capsys, "simulate", name, UNEVEN_OPTION).splitlines()
        if "shorter" in line
    )
    assert f"is shorter than {bound.value:.6g}: " in line
    assert ("with full backwards" in line) == (name in ("one_f_one_b", "gpipe"))
    gain = 1 - bound.value / run.span
    assert line.endswith(f"at most {gain:.1%} can be gained" if gain > 1e-9 else "proved shortest")


def test_proved_shortest_schedule_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A single rank is never idle."""
    output = run_command(capsys, "simulate", "gpipe", "--ranks=1")
    assert "is shorter than 6: proved shortest\n" in output
    assert read_json_output(capsys, "simulate", "gpipe", "--ranks=1")["gap_to_bound"] == 0
    assert "to gain" in run_command(capsys, "compare", "gpipe", "--ranks=1").splitlines()[0]
    assert run_command(capsys, "explain", "gpipe", "--ranks=1").endswith(
        "activations saves nothing\n"
    )
    assert run_command(capsys, "compare", "gpipe", "--ranks=1").split("%")[1].split()[0] == "none"


def test_no_bound_is_printed_for_unknown_bound(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("dualpipe", "forward_only"):
        assert "no schedule" not in run_command(capsys, "simulate", source)
        assert read_json_output(capsys, "simulate", source)["bound"] is None
    # A measured run has no bound, since the costs of its instructions are unknown.
    assert "no schedule" not in run_command(capsys, "simulate", str(TIMELINE_FILE))
    assert read_json_output(capsys, "simulate", str(TIMELINE_FILE))["gap_to_bound"] is None
    # Its program at given costs is a prediction.
    run = load_timeline(TIMELINE_FILE)
    row = read_json_output(capsys, "simulate", str(TIMELINE_FILE), "--costs=F=1,B=2")
    bound = compute_program_bound(run.program, Costs(F=1, B=2))
    assert bound is not None and row["bound"] == bound.value <= row["span"]


def test_compare_and_recommend_tables_have_bound_column(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("compare", "zb_h1", "zb_v", str(TIMELINE_FILE), "--costs=F=1,I=1,W=1")
    rows, output = read_json_output(capsys, *arguments), run_command(capsys, *arguments)
    assert [row["bound"] is None for row in rows] == [False, False, True]
    for row, line in zip(rows, output.splitlines()[2:], strict=False):
        cells = re.split(r" {2,}", line.strip())
        gain = None if row["bound"] is None else 1 - row["bound"] / row["span"]
        assert cells[6] == ("-" if gain is None else f"{gain:.1%}" if gain > 1e-9 else "none")
    half_costs = Costs(F=0.5, I=0.5, W=0.5)  # zb_v has two stages per rank
    bound_of_zb_v = compute_program_bound(simulate_built_in("zb_v").program, half_costs)
    assert bound_of_zb_v is not None and rows[1]["bound"] == bound_of_zb_v.value
    for row in read_json_output(
        capsys, "recommend", "--ranks=4", "--microbatches=8", UNEVEN_OPTION
    ):
        assert (row["bound"] is None) == (row["parameter_copies"] > 1)
        assert row["bound"] is None or row["bound"] <= row["span"] * (1 + 1e-9)
    assert " to gain " in run_command(capsys, "recommend", "--ranks=4").splitlines()[1]


def test_sizes_option_enters_bound(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = Sizes(saved=1e9, deferred_wgrad=0.25e9)
    row = read_json_output(
        capsys, "simulate", "zb_h1", UNEVEN_OPTION, "--sizes=saved=1GB,deferred_wgrad=0.25GB"
    )
    bound = compute_program_bound(simulate_built_in("zb_h1", UNEVEN).program, UNEVEN, sizes)
    assert bound is not None and row["bound"] == bound.value


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_bound_is_below_searched_span_within_same_memory(name: str) -> None:
    """A search within a run's peak memory finds no span below the bound of that run."""
    shape = PipelineShape(ranks=2, microbatches=7)
    costs = Costs(F=(1.7, 1.65), I=(0.94, 0.73), W=1)
    sizes = Sizes(activation=0.1, saved=1, deferred_wgrad=0.5, model_states=(0, 0.2))
    run = simulate(compile(get_built_in_schedules()[name], shape), costs, sizes=sizes)
    bound = compute_program_bound(run.program, costs, sizes, split_backward=True)
    limit = float(run.peak_memory.max())
    result = search_schedule(shape, costs, sizes, limit, max_evaluations=60)
    assert bound is not None and bound.value <= result.span * (1 + 1e-9) < run.span


# ---------------------------------------------------------------- advice


def list_schedules_without_weight_delay() -> list[str]:
    return [
        name
        for name, schedule in get_built_in_schedules().items()
        if get_weight_delay_mark(schedule) is None
    ]


SCHEDULES_WITH_ADVICE = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "v_half"]


@pytest.mark.parametrize(
    ("name", "costs"),
    each_value(
        cases(
            SCHEDULES_WITH_ADVICE,
            sorted({*list_schedules_without_weight_delay()} - {*SCHEDULES_WITH_ADVICE}),
        ),
        [Costs(F=1, B=2), Costs(F=2, I=2, W=1, send=0.3)],
    ),
)
def test_advice_saves_no_more_than_bound_allows(name: str, costs: Costs) -> None:
    """The bound limits only advice that changes the order, but not stages, costs or memory."""
    run = simulate_built_in(name, costs)
    shape, program = run.program.shape, run.program
    full_costs = fill_missing_backwards(costs, program)
    bound = compute_program_bound(program, full_costs, split_backward=True)
    if bound is None:
        return
    order_changes = [
        f"{other} with {shape.stages_per_rank} stage"
        for other in get_built_in_schedules()
        if get_placement_mark(get_built_in_schedules()[other])[0] is None
        and shape.placement == "loop"
    ]
    order_changes += ["a greedy order, with", "the same compute", "the same program"]
    changes = advise(run, costs).changes
    relevant = [change for change in changes if change.description.startswith(tuple(order_changes))]
    assert relevant or not changes
    for change in relevant:
        assert change.saved_share <= 1 - bound.value / run.span + 1e-9, change.description


def test_explain_prints_largest_saving_of_another_order(capsys: pytest.CaptureFixture[str]) -> None:
    costs = fill_missing_backwards(UNEVEN, simulate_built_in("one_f_one_b").program)
    run = simulate_built_in("one_f_one_b", UNEVEN)
    bounds = [
        compute_program_bound(run.program, costs, split_backward=split) for split in (False, True)
    ]
    savings = [1 - bound.value / run.span for bound in bounds if bound is not None]
    line = run_command(capsys, "explain", "one_f_one_b", UNEVEN_OPTION).splitlines()[-1]
    assert abs(savings[0]) < 1e-9 < savings[1]
    assert line == (
        "another order of these stages with no more activations saves nothing with full "
        f"backwards, at most {savings[1]:.1%} with split backwards"
    )
    row = read_json_output(capsys, "explain", "one_f_one_b", UNEVEN_OPTION)
    assert row["bound"] == bounds[0][0] and row["split_backward_bound"] == bounds[1][0]  # type: ignore[index]
    assert row["gap_to_bound"] == pytest.approx(run.span / row["bound"] - 1)


def test_explain_of_run_bounds_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_timeline(TIMELINE_FILE)
    row = read_json_output(capsys, "explain", str(TIMELINE_FILE))
    costs = fill_missing_backwards(calibrate(run), run.program)
    bound = compute_program_bound(run.program, costs, split_backward=False)
    assert bound is not None and row["bound"] == bound.value
    assert row["gap_to_bound"] == pytest.approx(row["simulated_span"] / bound.value - 1)
    spans = run.spans.copy()
    spans["end"][run.critical_path[-1]] += 1  # a delay that mean costs do not explain
    schedir.save_timeline(replace(run, spans=spans), tmp_path / "x.timeline")
    output = run_command(capsys, "explain", str(tmp_path / "x.timeline"))
    assert "no advice: a simulation" in output and "another order" not in output
    assert read_json_output(capsys, "explain", str(tmp_path / "x.timeline"))["bound"] is None


# ---------------------------------------------------------------- pictures


def read_mark_positions(axes: Any) -> list[float]:
    lines = [np.asarray(line.get_xdata()) for line in axes.lines if isinstance(line, Line2D)]
    return [float(x[0]) for x in lines]


def test_chart_marks_bound() -> None:
    run = simulate_built_in("one_f_one_b", UNEVEN)
    bound = compute_program_bound(run.program, UNEVEN, split_backward=True)
    assert bound is not None and bound.value < 0.99 * run.span
    (axes,) = gantt(run, bound=bound.value).axes
    assert read_mark_positions(axes) == [bound.value]
    gain = 1 - bound.value / run.span
    within = " with full B in 4 activations, span "
    assert f", at most {gain:.1%} to gain{within}" in axes.get_title("right")
    (axes,) = gantt(run).axes
    assert not read_mark_positions(axes) and "peak 4 activations" in axes.get_title("right")
    (axes,) = gantt(run, bound=run.span).axes
    assert f", shortest{within}" in axes.get_title("right")
    assert read_mark_positions(axes) == [run.span]
    split = simulate_built_in("zb_h1")
    (axes,) = gantt(split, bound=split.span).axes
    assert ", shortest in 4 activations, span " in axes.get_title("right")
    (axes,) = gantt(run, bound=bound.value, time_range=(0, bound.value / 2)).axes
    assert not read_mark_positions(axes)
    figure = compare([run, run], bounds=[None, bound.value])
    assert [len(read_mark_positions(axes)) for axes in figure.axes] == [0, 1]
    assert LEGEND in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("bound", [0, -1, float("nan"), float("inf"), "24", [1.0, 2.0]])
def test_invalid_bound_is_refused(bound: Any) -> None:
    run = simulate_built_in("zb_h1")
    with pytest.raises(UsageError, match="bound"):
        gantt(run, bound=bound)
    with pytest.raises(UsageError, match="bound"):
        compare([run], bounds=[bound])
    with pytest.raises(UsageError, match="2 bounds for 1"):
        compare([run], bounds=[1.0, 2.0])


def test_draw_output_and_picture_have_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_command(capsys, "draw", "zb_h1", UNEVEN_OPTION)
    bound = compute_program_bound(simulate_built_in("zb_h1", UNEVEN).program, UNEVEN)
    assert bound is not None and f"is shorter than {bound.value:.6g}: " in output.splitlines()[-1]
    for argv in (
        ("draw", "zb_h1", UNEVEN_OPTION),
        ("compare", "zb_h1", "--ranks=4", UNEVEN_OPTION),
    ):
        run_command(capsys, *argv, "-o", str(tmp_path / "x.svg"))
        assert LEGEND in (tmp_path / "x.svg").read_text()
    run_command(capsys, "draw", str(TIMELINE_FILE), "-o", str(tmp_path / "x.svg"))
    assert LEGEND not in (tmp_path / "x.svg").read_text()
