"""Tests that pictures of plans show the plans' numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from schedir.errors import UsageError
from schedir.planner import GpuMemory, PlanEstimate, StepBreakdown
from schedir.viz import plan_memory, plan_scaling, plan_times, save

PARTS = StepBreakdown(20, 4, 2, 1, 5, 0.25, 0.125, 0.25, 0.125)
PLAN = PlanEstimate(
    pp=8, tp=8, dp=16, microbatches=96, stages_per_rank=2, schedule="interleaved",
    recompute="selective", zero=1,
    step_time=sum(PARTS), breakdown=PARTS, memory=GpuMemory(5e9, 6e9, 7e9, 20e9, 3e9),
    flops_per_second=150e12,
    mfu=0.48,
)  # fmt: skip


def make_plan(step: float, held: float, **fields: object) -> PlanEstimate:
    breakdown, memory = StepBreakdown(step, 0, 0, 0, 0, 0, 0), GpuMemory(held, 0, 0, 0, 0)
    return replace(PLAN, step_time=step, breakdown=breakdown, memory=memory, **fields)  # type: ignore[arg-type]


def list_texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bar_shows_step_breakdown() -> None:
    """Each part has the length of its time, and together they are the step."""
    figure = plan_times([PLAN, make_plan(16, 1e9)])
    axes = figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]
    begins = np.cumsum([0, *PARTS])[:-1]
    assert np.allclose(bars[:9], np.column_stack([begins, PARTS])) and bars[9:] == [(0, 16)]
    labels = list_texts(axes)
    for word in ("8", "16", "2", "interleaved", "selective", "32.75 s", "150.0", "41.0 GB", "61%"):
        assert word in labels
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == 9 and legend[0] == "compute"
    short_step = plan_times([make_plan(0.016, 1e9)])
    assert [text.get_text() for text in short_step.legends[0].get_texts()] == ["compute"]
    assert short_step.axes[0].get_xlabel() == "time of a step, in ms"


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30),
)
def test_memory_frontier_has_undominated_plans(points: list[tuple[int, int]]) -> None:
    plans = [make_plan(step, held * 1e9) for step, held in points]
    (line,) = [line for line in plan_memory(plans).axes[0].lines if len(line.get_xdata())]  # type: ignore[arg-type]
    drawn_points = [*zip(line.get_xdata(), line.get_ydata(), strict=True)][:-1]  # type: ignore[arg-type]
    best = {
        (held, step)
        for step, held in points
        if not any((h <= held and s < step) or (h < held and s <= step) for s, h in points)
    }
    assert drawn_points == sorted(best)


def test_memory_picture_marks_limit_and_chosen_plan() -> None:
    plans = [
        make_plan(10, 90e9, fits=False, pp=16),
        make_plan(20, 40e9),
        make_plan(30, 10e9, recompute="full"),
    ]
    axes = plan_memory(plans, limit=80e9).axes[0]
    assert list_texts(axes) == ["pp 8, tp 8, dp 16, v 2, b 1, interleaved", "80 GB: does not fit"]
    assert list_texts(plan_memory(plans, 80e9, plans[2]).axes[0])[0].startswith("pp 8")
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["selective", "full", "shortest within each memory"]
    assert list_texts(plan_memory(plans[:1], limit=80e9).axes[0]) == ["80 GB: does not fit"]


def test_scaling_has_point_per_gpu_count() -> None:
    strong = [make_plan(32 / d, 1e9, dp=d, flops_per_second=1e14 / d) for d in (4, 1, 2)]
    weak = [make_plan(32, 1e9, dp=d) for d in (1, 2, 4)]
    time_axes, efficiency_axes = plan_scaling(strong, weak).axes
    lines = [line.get_xydata().tolist() for line in time_axes.lines]  # type: ignore[union-attr]
    assert lines[0] == lines[1] == [[64, 32], [128, 16], [256, 8]]
    assert lines[2] == [[64, 32], [128, 32], [256, 32]]
    assert efficiency_axes.lines[0].get_xydata().tolist() == [[64, 100], [128, 50], [256, 25]]  # type: ignore[union-attr]
    assert len(plan_scaling(strong).axes[0].lines) == 2


@pytest.mark.parametrize("draw", [plan_times, plan_memory, plan_scaling])
def test_empty_plan_list_is_refused(draw: object) -> None:
    for nothing in ([], [3]):
        with pytest.raises(UsageError, match="plans must be a list of one or more PlanEstimates"):
            draw(nothing)  # type: ignore[operator]


def test_equal_pictures_have_equal_bytes(tmp_path: Path) -> None:
    for letter in "ab":
        for draw in (plan_times, plan_memory, plan_scaling):
            save(draw([PLAN]), tmp_path / f"{draw.__name__}_{letter}.svg")
    for picture in tmp_path.glob("*_a.svg"):
        second_picture = picture.with_stem(picture.stem[:-1] + "b")
        assert picture.read_bytes() == second_picture.read_bytes()
