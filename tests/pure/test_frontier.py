"""Tests of the memory frontier: its levels, built-in schedules, lower bounds and picture."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PathCollection, PolyCollection

import schedir
from schedir import Costs, PipelineShape, Sizes, compile, schedules, simulate, viz
from schedir.errors import ShapeError, UsageError
from schedir.schedule_search.memory_frontier import MemoryFrontier, memory_frontier
from tests.cases import ALL, campaign
from tests.commands import run_command, run_refused_command

SIZES = Sizes(saved=1e9, deferred_wgrad=4e8, activation=1e8, model_states=5e9)
UNEVEN_PAIR = Costs(F=(1, 1.5), I=(1, 1.5), W=(1, 1.5))
UNEVEN = Costs(F=(1, 1, 1.5), I=(1, 1, 1.5), W=(1, 1, 1.5))
CASES: dict[str, dict[str, Any]] = {
    "counts": {"shape": PipelineShape(3, 6), "costs": Costs(F=2, I=2, W=1, send=0.1)},
    "bytes": {
        "shape": PipelineShape(2, 4),
        "costs": UNEVEN_PAIR,
        "sizes": SIZES,
        "levels": 16 if ALL else 6,
    },
    "whole": {"shape": PipelineShape(3, 5), "costs": UNEVEN, "split_backward": False},
    "vee": {"shape": PipelineShape(2, 4, 2, "vee"), "costs": Costs()},
    "one rank": {"shape": PipelineShape(1, 3), "costs": Costs()},
    "one microbatch": {"shape": PipelineShape(3, 1), "costs": Costs(send=0.5)},
}


@pytest.fixture(params=CASES.values(), ids=[*CASES], scope="module")
def frontier(request: pytest.FixtureRequest) -> MemoryFrontier:
    return memory_frontier(**request.param, max_evaluations=30)


def test_levels_keep_limits_and_spans_decrease(frontier: MemoryFrontier) -> None:
    limits = [level.limit for level in frontier.levels]
    assert limits == sorted(set(limits))
    spans = [level.timeline.span for level in frontier.levels]
    assert spans == sorted(spans, reverse=True)
    for level in frontier.levels:
        assert frontier.measure_memory(level.timeline) <= level.limit * (1 + 1e-9)
        assert 0 < level.bound <= level.timeline.span
    assert frontier.is_complete


def test_bounds_decrease_and_are_below_all_spans(frontier: MemoryFrontier) -> None:
    limits, bounds = zip(*frontier.bounds, strict=True)
    assert limits[-1] == inf and list(limits) == sorted(set(limits))
    assert list(bounds) == sorted(bounds, reverse=True)
    runs = [*frontier.timelines, *(level.timeline for level in frontier.levels)]
    for run in runs:
        for limit, bound in frontier.bounds:
            if frontier.measure_memory(run) <= limit * (1 - 1e-9):
                assert run.span >= bound * (1 - 1e-9)


def test_built_in_schedules_are_no_shorter_than_frontier(frontier: MemoryFrontier) -> None:
    for run in frontier.timelines:
        spans = [
            v.timeline.span
            for v in frontier.levels
            if v.limit <= frontier.measure_memory(run) * (1 + 1e-9)
        ]
        assert not spans or min(spans) <= run.span * (1 + 1e-9), run


def test_frontier_compares_built_in_schedules() -> None:
    shape, costs = PipelineShape(4, 8), Costs(F=2, I=2, W=1)
    frontier = memory_frontier(shape, costs, max_evaluations=200)
    assert {t.program.name: t.span for t in frontier.timelines} == {
        name: simulate(compile(getattr(schedules, name), shape, costs=costs), costs).span
        for name in ("eager_1f1b", "gpipe", "one_f_one_b", "zb_h1", "zb_h2")
    }
    assert (
        frontier.levels[-1].timeline.span == schedir.lower_bound(shape, costs).value
    )  # the last level reaches the bound
    program = compile(schedules.interleaved, PipelineShape(2, 4, 2))
    with_program = memory_frontier(program.shape, max_evaluations=20, initial_schedules=[program])
    assert with_program.timelines[0].program.digest == program.digest
    full_backward = memory_frontier(shape, costs, max_evaluations=20, split_backward=False)
    assert {"zb_h1", "zb_h2"}.isdisjoint(t.program.name for t in full_backward.timelines)
    # The frontier leaves out schedules with full backwards if B is cheaper than I and W.
    cheap_backward = memory_frontier(shape, Costs(F=2, I=2, W=1, B=2.5), max_evaluations=20)
    assert {t.program.name for t in cheap_backward.timelines} == {"zb_h1", "zb_h2"}


@campaign
@settings(max_examples=8)
@given(st.integers(2, 4), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_frontier_is_deterministic(ranks: int, microbatches: int, seed: int, sized: bool) -> None:
    shape, sizes = (
        PipelineShape(ranks, microbatches),
        Sizes(saved=2, deferred_wgrad=1) if sized else None,
    )
    first, second = (
        memory_frontier(shape, Costs(W=0.5), sizes, max_evaluations=50, seed=seed, levels=3)
        for _ in "ab"
    )
    assert first.bounds == second.bounds
    assert [(v.limit, v.timeline.program.digest) for v in first.levels] == [
        (v.limit, v.timeline.program.digest) for v in second.levels
    ]


def test_invalid_frontier_arguments_are_refused() -> None:
    for arguments in ({"levels": 0}, {"time_limit": 0}, {"max_evaluations": 0}):
        with pytest.raises(UsageError):
            memory_frontier(PipelineShape(2, 2), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        memory_frontier(PipelineShape(2, 2, placement="mirror"))


def test_frontier_picture_shows_schedules_and_bounds(frontier: MemoryFrontier) -> None:
    (axes,) = viz.memory_frontier(frontier).axes
    (points,) = (c for c in axes.collections if isinstance(c, PathCollection))
    unit = 1e9 if frontier.is_in_bytes else frontier.shape.stages / frontier.shape.ranks
    assert np.asarray(points.get_offsets()).tolist() == [
        [frontier.measure_memory(t) / unit, t.bubble] for t in frontier.timelines
    ]
    assert {text.get_text() for text in axes.texts} == {t.program.name for t in frontier.timelines}
    (line,) = axes.lines
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (np.diff(y) <= 0).all() and x[-1] == axes.get_xlim()[1]
    # The region is below the line everywhere.
    (region,) = (c for c in axes.collections if type(c) is not PathCollection)
    assert isinstance(region, PolyCollection)
    (path,) = region.get_paths()
    midpoints = (x[1:] + x[:-1]) / 2
    for middle, height in zip(midpoints, y, strict=False):
        assert not path.contains_point((middle, height + 1e-6))
        assert path.contains_point((middle, -1e-9 + min(height / 2, 0.001))) or height < 1e-6
    assert ("GB" in axes.get_xlabel()) == frontier.is_in_bytes


SEARCH = ("search", "--ranks=4", "--microbatches=8", "--costs=F=2,I=2,W=1", "--max-evaluations=30")


def test_search_frontier_prints_and_draws_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run_command(capsys, *SEARCH, "--frontier", "-o", "x.svg")
    assert "4 in flight" in output and "zb_h1 49 (4 in flight)" in output and Path("x.svg").exists()
    facts = json.loads(run_command(capsys, *SEARCH, "--frontier", "--json"))
    frontier = memory_frontier(PipelineShape(4, 8), Costs(F=2, I=2, W=1), max_evaluations=30)
    assert facts["levels"] == [
        {"limit": v.limit, "span": v.timeline.span, "bubble": v.timeline.bubble, "bound": v.bound}
        for v in frontier.levels
    ]
    assert facts["is_complete"] and facts["memory_unit"] == "in flight"
    small = ("--ranks=2", "--microbatches=2", "--max-evaluations=5", "--frontier")
    sized = run_command(capsys, "search", *small, "--sizes=saved=1GB,deferred_wgrad=0.4GB")
    assert "1 GB" in sized and "in flight" not in sized
    for options in (
        ("--memory-limit=4GB", "--sizes=saved=1GB"),
        ("--max-in-flight=4",),
        ("--objective=active_span",),
        ("--bound=solver",),
        ("-o", "x.sched"),
    ):
        run_refused_command(capsys, *SEARCH, "--frontier", *options)
    assert not Path("x.sched").exists()
