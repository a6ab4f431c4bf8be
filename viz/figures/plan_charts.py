"""Charts of parallel plans: step time, memory and scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from schedir.errors import UsageError, describe
from schedir.ir.isa.instructions import FORWARD, Lane
from schedir.planner.parallel_plan import PlanEstimate, StepBreakdown
from schedir.viz.figures.chart_axes import add_axes_with_margins, draw_grid
from schedir.viz.palette import (
    ACCENT_COLOR,
    IDLE_COLOR,
    LANE_COLORS,
    LIGHT_PALETTE,
    RGB,
    TONES,
    choose_text_color,
    mix_to_lightness,
)

_FORWARD_COLOR: Final = TONES[FORWARD].hue
# Part of a step -> its name in the legend, its colour and its hatching.
STEP_PARTS: Final[dict[str, tuple[str, str | RGB, str]]] = {
    "compute": ("compute", _FORWARD_COLOR, ""),
    "recompute": ("recompute", mix_to_lightness(_FORWARD_COLOR, 62), "////"),
    "layer_collectives": ("collectives of layers", LANE_COLORS[Lane.TP], ""),
    "transfers": ("messages", LANE_COLORS[Lane.ACT], ""),
    "bubble": ("bubble", "white", "xxxx"),
    "data_parallel": ("collectives of replicas", LANE_COLORS[Lane.DP], ""),
    "optimizer": ("optimizer", LIGHT_PALETTE.step_color, ""),
    "host_copies": ("copies to the host", LANE_COLORS[Lane.D2H], ""),
    "data_loading": ("data loading", "#999999", "...."),
}
# The columns to the left and to the right of the bar of a plan: the heading, the width in inches,
# and the alignment. Columns on the right are right-aligned.
_LEFT_COLUMNS: Final = (
    ("", 0.22, "right"), ("pp", 0.28, "right"), ("tp", 0.26, "right"), ("dp", 0.36, "right"),
    ("v", 0.22, "right"), ("b", 0.26, "right"), ("SP", 0.32, "right"), ("schedule", 1.06, "left"),
    ("recompute", 0.74, "left"), ("ZeRO", 0.36, "right"),
)  # fmt: skip
_RIGHT_COLUMNS: Final = (("step", 0.6), ("TFLOP/s", 0.62), ("memory", 0.66))
_ROW_HEIGHT: Final = 0.27  # inches of a bar and the gap around it
_BARS_WIDTH: Final = 5.4  # inches of the longest bar
_RECOMPUTE_COLORS: Final = {"none": "#0072b2", "selective": "#e6ab02", "full": "#d55e00"}
_STRONG_COLOR, _WEAK_COLOR = "#0072b2", "#d55e00"


def plan_times(plans: Sequence[PlanEstimate]) -> Figure:
    """Draw the time of a step as a bar per plan, divided into parts, the first plan at the top.

    To the left of a bar are the degrees and the options of the plan. To the right are the step
    time, the TFLOP/s of a GPU for the model's operations, and the memory of the fullest GPU. If a
    part is wide enough, a number in it is its share of the step.

    Args:
        plans: The plans.

    Returns:
        The figure.

    Raises:
        UsageError: There are no plans.

    Example:
        >>> import schedir
        >>> from schedir.planner import GpuMemory, StepBreakdown, PlanEstimate
        >>> plan = PlanEstimate(pp=8, tp=8, dp=16, microbatches=96, step_time=30.0,
        ...     breakdown=StepBreakdown(24, 0, 2, 0, 3, 1, 0),
        ...     memory=GpuMemory(5e9, 5e9, 30e9, 20e9, 3e9), flops_per_second=150e12, mfu=0.48)
        >>> figure = schedir.viz.plan_times([plan])
        >>> [text.get_text() for text in figure.axes[0].texts if "%" in text.get_text()]
        ['80%', '7%', '10%', '3%']
    """
    plans = _require_plans(plans)
    left = sum(width for _, width, _ in _LEFT_COLUMNS) + 0.2
    right = sum(width for _, width in _RIGHT_COLUMNS) + 0.1
    top, bottom = 0.28, 0.78
    figure, axes, size = add_axes_with_margins(
        (_BARS_WIDTH, _ROW_HEIGHT * len(plans)), left, top, right, bottom
    )
    longest = max(plan.step_time for plan in plans)
    unit_time, unit = _choose_time_unit(longest)
    axes.set_xlim(0, longest / unit_time * 1.001)
    axes.set_ylim(len(plans) - 0.5, -0.5)
    for row, plan in enumerate(plans):
        _draw_bar(axes, row, plan, unit_time)
        _draw_cells(axes, row, plan)
    headings = [name for name, *_ in (*_LEFT_COLUMNS, *_RIGHT_COLUMNS)]
    _draw_row(axes, -0.95, headings, "#555555")
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.set_xlabel(f"time of a step, in {unit}", fontsize=8)
    draw_grid(axes, hidden_sides=("top", "right", "left"))
    parts = [
        name for name in StepBreakdown._fields if any(getattr(p.breakdown, name) > 0 for p in plans)
    ]
    figure.legend(
        [_make_legend_patch(name) for name in parts], [STEP_PARTS[name][0] for name in parts],
        loc="lower left", bbox_to_anchor=(left / size[0], 0.06 / size[1]), ncols=len(parts),
        fontsize=7.5, frameon=False, borderpad=0, borderaxespad=0,
        handlelength=1.4, handleheight=0.9, columnspacing=1.1,
    )  # fmt: skip
    return figure


def _require_plans(plans: Sequence[PlanEstimate]) -> Sequence[PlanEstimate]:
    """Return the plans. Raise UsageError if there are none, or if one is no PlanEstimate."""
    if not plans or not all(isinstance(plan, PlanEstimate) for plan in plans):
        raise UsageError(
            f"plans must be a list of one or more PlanEstimates, not {describe(plans)}",
            hint="schedir.planner.plan(model, cluster, batch)",
        )
    return plans


def _choose_time_unit(longest: float) -> tuple[float, str]:
    """Return a unit for times up to `longest` seconds: its length in seconds, and its name."""
    return (1.0, "s") if longest >= 1 else (1e-3, "ms")


def _make_legend_patch(name: str) -> Patch:
    """Return the legend entry of a part of a step."""
    _, colour, hatch = STEP_PARTS[name]
    edge = IDLE_COLOR if hatch else "white"
    return Patch(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.4)


def _draw_bar(axes: Axes, row: int, plan: PlanEstimate, unit_time: float) -> None:
    """Draw the parts of a step. Write the share of the step on each part that is wide enough."""
    begin, scale = 0.0, _BARS_WIDTH / axes.get_xlim()[1]
    for name, seconds in zip(StepBreakdown._fields, plan.breakdown, strict=True):
        width, (_, colour, hatch) = seconds / unit_time, STEP_PARTS[name]
        if width <= 0:
            continue
        axes.barh(
            row, width, left=begin, height=0.74, color=colour, hatch=hatch,
            edgecolor=IDLE_COLOR if hatch else "white", linewidth=0.4,
        )  # fmt: skip
        share = f"{seconds / plan.step_time:.0%}"
        if width * scale > 0.075 * len(share):
            is_bubble = name == "bubble"
            # The number on a hatched part has a white outline.
            axes.text(
                begin + width / 2, row, share, ha="center", va="center_baseline", fontsize=6.5,
                color="black" if is_bubble or hatch else choose_text_color(colour),
                path_effects=[withStroke(linewidth=2.4, foreground="white")] if hatch else None,
            )  # fmt: skip
        begin += width


def _draw_cells(axes: Axes, row: int, plan: PlanEstimate) -> None:
    """Write the degrees and options of a plan, and its time, TFLOP/s and memory."""
    cells = [
        str(row + 1), *(str(n) for n in (plan.pp, plan.tp, plan.dp, plan.stages_per_rank,
                                         plan.microbatch_size)),
        "yes" if plan.sequence_parallel else "-", plan.schedule, plan.recompute, str(plan.zero),
    ]  # fmt: skip
    excess = "" if plan.fits else " too much"
    cells += [_format_seconds(plan.step_time), f"{plan.flops_per_second / 1e12:.1f}",
            f"{plan.memory.total / 1e9:.1f} GB{excess}"]  # fmt: skip
    _draw_row(axes, row, cells, "black")


def _draw_row(axes: Axes, row: float, cells: Sequence[str], colour: str) -> None:
    """Write the cells of a row to the left and to the right of the bars."""
    offset = -sum(width for _, width, _ in _LEFT_COLUMNS) - 0.1
    for cell, (_, width, alignment) in zip(cells, _LEFT_COLUMNS, strict=False):
        _draw_cell(axes, row, offset, width, alignment, cell, colour)
        offset += width
    offset = _BARS_WIDTH
    for cell, (_, width) in zip(cells[len(_LEFT_COLUMNS) :], _RIGHT_COLUMNS, strict=True):
        _draw_cell(axes, row, offset, width, "right", cell, colour)
        offset += width


def _draw_cell(
    axes: Axes,
    row: float,
    offset: float,
    width: float,
    alignment: str,
    text: str,
    colour: str,
) -> None:
    """Write a text in a column that begins `offset` inches from the left edge of the bars."""
    x = offset + (width if alignment == "right" else 0.14)
    axes.annotate(
        text, (0, row), (72 * x, 0), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha=alignment, va="center_baseline", fontsize=7, color=colour,
        annotation_clip=False, parse_math=False,
    )  # fmt: skip


def _format_seconds(time: float) -> str:
    """Return a time with its unit, with one or two decimals."""
    unit_time, unit = _choose_time_unit(time)
    return f"{time / unit_time:.{2 if time / unit_time < 100 else 1}f} {unit}"


# ---------------------------------------------------------------- time against memory


def plan_memory(
    plans: Sequence[PlanEstimate], limit: float | None = None, best: PlanEstimate | None = None
) -> Figure:
    """Draw the time of a step against the memory of a plan, with a point per plan.

    A line joins the Pareto-optimal plans. Colours show the recomputation.

    Args:
        plans: The plans.
        limit: The memory of a GPU, in bytes. The chart marks the area of plans that need more.
        best: The plan to mark. The default is the plan with the shortest step that fits.

    Returns:
        The figure.

    Raises:
        UsageError: There are no plans.

    Example:
        >>> import schedir
        >>> from schedir.planner import GpuMemory, StepBreakdown, PlanEstimate
        >>> plans = [
        ...     PlanEstimate(pp=p, tp=8, dp=128 // p, microbatches=p, step_time=40 - p,
        ...     breakdown=StepBreakdown(40 - p, 0, 0, 0, 0, 0, 0),
        ...     memory=GpuMemory(320e9 / p, 0, 0, 0, 0), flops_per_second=1e14, mfu=0.4, fits=p > 4)
        ...     for p in (4, 8, 16)
        ... ]
        >>> figure = schedir.viz.plan_memory(plans, limit=80e9)
        >>> [text.get_text().split(",")[0] for text in figure.axes[0].texts]
        ['pp 16', '80 GB: does not fit']
    """
    plans = _require_plans(plans)
    memory = np.array([plan.memory.total for plan in plans]) / 1e9
    unit_time, unit = _choose_time_unit(max(plan.step_time for plan in plans))
    step_times = np.array([plan.step_time for plan in plans]) / unit_time
    figure = Figure(figsize=(6.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    for mode, colour in _RECOMPUTE_COLORS.items():
        has_mode = np.array([plan.recompute == mode for plan in plans])
        if has_mode.any():
            has_many = int(has_mode.sum()) > 2000
            axes.scatter(
                memory[has_mode], step_times[has_mode], s=5 if has_many else 14, color=colour,
                linewidth=0, alpha=0.35 if has_many else 0.8, rasterized=has_many, zorder=2,
                label="recompute none" if mode == "none" else mode,
            )  # fmt: skip
    x, y = _find_frontier(memory, step_times)
    axes.plot(
        [*x, 1e3 * memory.max()], [*y, y[-1]],
        color=ACCENT_COLOR, linewidth=1.4, drawstyle="steps-post", zorder=3,
        label="shortest within each memory",
    )  # fmt: skip
    _set_axis_limits(axes, memory, step_times, limit)
    candidates = [plan for plan in plans if plan.fits]
    best = min(candidates, key=lambda plan: plan.step_time) if best is None and candidates else best
    if best is not None:
        _mark_plan(axes, best, unit_time)
    if limit is not None:
        _draw_limit(axes, limit / 1e9)
    axes.set_xlabel("memory of the fullest GPU, in GB", fontsize=8)
    axes.set_ylabel(f"time of a step, in {unit}", fontsize=8)
    _format_axes(axes)
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=7.5, frameon=False,
        borderaxespad=0.2, columnspacing=1.0, handletextpad=0.4, markerscale=2,
    )  # fmt: skip
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return figure


def _find_frontier(
    memory: NDArray[np.float64], step_times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the memory and the step time of the Pareto-optimal points, ascending by memory."""
    order = np.lexsort((step_times, memory))
    lowest = np.minimum.accumulate(step_times[order])
    frontier = order[np.r_[True, lowest[1:] < lowest[:-1]]]
    return memory[frontier], step_times[frontier]


def _set_axis_limits(
    axes: Axes, memory: NDArray[np.float64], step_times: NDArray[np.float64], limit: float | None
) -> None:
    """Set the ranges of the axes, so that they contain the relevant points.

    The memory axis ends at about 8 times the limit or earlier. The time axis ends at about 12 times
    the shortest step or earlier.
    """
    right = float(memory.max())
    if limit is not None:
        right = max(min(right, 8 * limit / 1e9), limit / 1e9)
    axes.set_xlim(float(memory.min()) / 1.15, right * 1.3)
    visible_times = step_times[memory <= right * 1.3]
    shortest = float(visible_times.min())
    axes.set_ylim(shortest / 1.25, min(float(visible_times.max()), 12 * shortest) * 1.25)


def _mark_plan(axes: Axes, best: PlanEstimate, unit_time: float) -> None:
    x = best.memory.total / 1e9
    y = best.step_time / unit_time
    axes.scatter(
        [x], [y], s=64, marker="o", facecolor="none", edgecolor="black", linewidth=1.3, zorder=5
    )
    axes.annotate(
        label_plan(best), (x, y), (-9, -11), textcoords="offset points", ha="right",
        fontsize=7, zorder=6, path_effects=[withStroke(linewidth=2.4, foreground="white")],
        parse_math=False,
    )  # fmt: skip


def label_plan(plan: PlanEstimate) -> str:
    """Return the degrees and the schedule of a plan in a few words.

    Args:
        plan: The plan.

    Example:
        >>> from schedir.planner import GpuMemory, StepBreakdown, PlanEstimate
        >>> label_plan(PlanEstimate(pp=8, tp=4, stages_per_rank=2, step_time=1.0,
        ...     breakdown=StepBreakdown(1, 0, 0, 0, 0, 0, 0),
        ...                memory=GpuMemory(0, 0, 0, 0, 0), flops_per_second=1e14, mfu=0.4))
        'pp 8, tp 4, dp 1, v 2, b 1, one_f_one_b'
    """
    v = f", v {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    return f"pp {plan.pp}, tp {plan.tp}, dp {plan.dp}{v}, b {plan.microbatch_size}, {plan.schedule}"


def _draw_limit(axes: Axes, limit: float) -> None:
    """Draw the memory limit, and shade the area to the right of it."""
    axes.axvspan(limit, axes.get_xlim()[1], color="#e4e4e4", linewidth=0, zorder=0.5)
    axes.axvline(limit, color="#555555", linewidth=1, zorder=1)
    axes.annotate(
        f"{limit:.4g} GB: does not fit", (limit, 0.015), (4, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7,
        color="#555555",
    )  # fmt: skip


def _format_axes(axes: Axes) -> None:
    """Write numbers without exponents on logarithmic axes, and draw a light grid."""
    formatter = FuncFormatter(lambda value, _: f"{value:g}")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            linear_locator = MaxNLocator(nbins=8, steps=[1, 2, 5, 10])
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 8 * low else linear_locator)
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(formatter)
    draw_grid(axes)


# ---------------------------------------------------------------- over the number of GPUs


def plan_scaling(strong: Sequence[PlanEstimate], weak: Sequence[PlanEstimate] = ()) -> Figure:
    """Draw the step time and the TFLOP/s per GPU of plans, by the number of GPUs.

    The left chart has the step time. A label at each of its points has the numbers of pipeline
    ranks, tensor-parallel ranks and replicas. The right chart has the model's operations per second
    of a GPU.

    Args:
        strong: Plans with the same batch size (strong scaling). A thin line shows the step times
            for ideal scaling from the plan with the fewest GPUs.
        weak: Plans whose batch grows with the number of GPUs (weak scaling).

    Returns:
        The figure.

    Raises:
        UsageError: There are no plans.

    Example:
        >>> import schedir
        >>> from schedir.planner import GpuMemory, StepBreakdown, PlanEstimate
        >>> plans = [
        ...     PlanEstimate(pp=8, dp=d, microbatches=64 // d, step_time=32 / d,
        ...     breakdown=StepBreakdown(32 / d, 0, 0, 0, 0, 0, 0),
        ...            memory=GpuMemory(1e9, 0, 0, 0, 0), flops_per_second=1e14, mfu=0.4)
        ...     for d in (1, 2, 4)
        ... ]
        >>> figure = schedir.viz.plan_scaling(plans)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['8 x 1 x 1', '8 x 1 x 2', '8 x 1 x 4']
    """
    all_plans = _require_plans([*strong, *weak])
    unit_time, unit = _choose_time_unit(max(plan.step_time for plan in all_plans))
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    time_axes, flops_axes = figure.subplots(1, 2)
    lines = [
        ("strong: one batch", _STRONG_COLOR, "o", strong),
        ("weak: the batch grows with the GPUs", _WEAK_COLOR, "s", weak),
    ]
    for name, colour, marker, plans in lines:
        if not plans:
            continue
        plans = sorted(plans, key=lambda plan: plan.gpus)
        gpus = [plan.gpus for plan in plans]
        style = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.4}
        time_axes.plot(
            gpus,
            [plan.step_time / unit_time for plan in plans],
            label=name,
            zorder=3,
            **style,
        )
        flops_axes.plot(gpus, [plan.flops_per_second / 1e12 for plan in plans], zorder=3, **style)
        if marker == "o":
            ideal = [plans[0].step_time / unit_time * gpus[0] / n for n in gpus]
            time_axes.plot(gpus, ideal, color=IDLE_COLOR, linewidth=0.8, zorder=2,
                      label="ideal: the speed of the first for all GPUs")  # fmt: skip
        for plan in plans:
            time_axes.annotate(
                f"{plan.pp} x {plan.tp} x {plan.dp}", (plan.gpus, plan.step_time / unit_time),
                (4, 5 if marker == "o" else -10), textcoords="offset points",
                fontsize=6.5, color=colour, zorder=4,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )  # fmt: skip
    time_axes.set_yscale("log")
    time_axes.set_ylabel(f"time of a step, in {unit}", fontsize=8)
    flops_axes.set_ylabel("model TFLOP/s of a GPU", fontsize=8)
    flops_axes.set_ylim(0, 1.12 * max(plan.flops_per_second for plan in all_plans) / 1e12)
    gpu_counts = sorted({plan.gpus for plan in all_plans})
    for axes in (time_axes, flops_axes):
        axes.set_xscale("log")
        axes.set_xlim(gpu_counts[0] / 1.2, gpu_counts[-1] * 1.8)
        axes.set_xlabel("GPUs", fontsize=8)
        _format_axes(axes)
        axes.xaxis.set_major_locator(FixedLocator(gpu_counts))
    time_axes.legend(loc="best", fontsize=7.5, frameon=False)
    return figure
