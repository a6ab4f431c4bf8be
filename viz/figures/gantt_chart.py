"""Gantt charts of one or several timelines."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, inf
from numbers import Real
from typing import Any, Final, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from schedir.errors import CommandHint, UsageError, describe, format_bytes
from schedir.ir.isa.instructions import TIERS
from schedir.predict.calibrate import SPLIT_BACKWARD
from schedir.predict.possible_saving import compute_saving, describe_saving
from schedir.predict.timeline import Timeline, require_timeline, require_timelines
from schedir.viz.figures import overlays
from schedir.viz.figures.figure_layout import (
    NARROW_WIDTH,
    NOTE_HEIGHT,
    ChartLayout,
    FigureLayout,
    lay_out,
)
from schedir.viz.figures.gantt_boxes import add_legend, draw_boxes
from schedir.viz.layout import BAND_HEIGHT, LANE_HEIGHT
from schedir.viz.style import LEFT_MARGIN, ResolvedStyle, Style, resolve_style

_TIME_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def gantt(
    timeline: Timeline,
    *,
    title: str | None = None,
    bound: float | None = None,
    **style: Unpack[Style],
) -> Figure:
    """Draw a timeline with a row per rank, rank 0 at the top, and time to the right.

    A row has the compute lane, and below it a thin lane for each kind of communication that takes
    time. In a lane of transfers, receives are the upper half and sends the lower half. Boxes have
    the letter and the microbatch, or only the microbatch if there is less space. If a rank has
    several stages, shades and small numbers distinguish them. A pair that runs together is one box
    with two halves. Idle time is hatched.

    If boxes are too small to be visible, the chart shows their mean colours, without communication
    lanes and arrows.

    Args:
        timeline: The timeline.
        title: The title, instead of the name and the kind. "" removes the title line.
        bound: A lower bound on the span (`schedir.lower_bound`), in the unit of the timeline. The
            bound must hold for all orders with the same memory. If the timeline has no split
            backwards, the bound may hold for full backwards only. A line marks the bound, and the
            title has the largest possible saving.
        **style: The options of `schedir.viz.Style`.

    Returns:
        The figure.

    Raises:
        UsageError: The title, the bound or the style is invalid.

    Example:
        >>> import schedir
        >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(4, 8))
        >>> run = schedir.simulate(program, schedir.Costs(F=1, B=2))
        >>> figure = schedir.viz.gantt(run, show="arrows,path", palette="grey")
        >>> figure.axes[0].get_title("left"), figure.axes[0].get_title("right")
        ('one_f_one_b (predicted)', 'bubble 27.3%, peak 4 activations, span 33')
    """
    require_timeline(timeline, "timeline")
    return compare([timeline], titles=None if title is None else [title], bounds=[bound], **style)


def compare(
    timelines: Sequence[Timeline],
    *,
    titles: Sequence[str] | None = None,
    bounds: Sequence[float | None] | None = None,
    **style: Unpack[Style],
) -> Figure:
    """Draw timelines below each other on one time axis, on which each timeline starts at 0.

    The title of each timeline has its bubble and the largest peak memory of a rank, in bytes.
    Without sizes, the peak is a number of activations. The activations of one microbatch in all v
    stages of a rank are counted as 1. So the activations in one stage are counted as 1/v.

    If some timelines are in units of cost and others in seconds, each timeline has its own axis.
    The axes are scaled so that the mean busy time of a rank is equally long in all charts. A note
    in the figure states this.

    Args:
        timelines: The timelines, from the top.
        titles: A title for each timeline, as for `gantt`.
        bounds: A lower bound for each timeline, as for `gantt`.
        **style: The options of `schedir.viz.Style`.

    Returns:
        The figure.

    Raises:
        UsageError: There are no timelines, the number of titles or bounds is not the number of
            timelines, or the style is invalid.

    Example:
        >>> import schedir
        >>> shape = schedir.PipelineShape(ranks=4, microbatches=8)
        >>> schedules = schedir.schedules.gpipe, schedir.schedules.zb_h1
        >>> runs = [schedir.simulate(schedir.compile(schedule, shape)) for schedule in schedules]
        >>> figure = schedir.viz.compare(runs)
        >>> [axes.get_title("right") for axes in figure.axes]
        ['bubble 27.3%, peak 8 activations, span 33', 'bubble 11.1%, peak 4 activations, span 27']
    """
    require_timelines(timelines)
    resolved_style = resolve_style(style)
    titles_and_bounds = (
        _require_titles(titles, len(timelines)),
        _require_bounds(bounds, len(timelines)),
    )
    return _draw_figure(lay_out(timelines, *titles_and_bounds, resolved_style), resolved_style)


def _require_titles(value: object, chart_count: int) -> Sequence[str | None]:
    """Return a title for each chart, or None for each chart."""
    if value is None:
        return [None] * chart_count
    titles = [value] if isinstance(value, str) else value
    if not isinstance(titles, Sequence) or not all(isinstance(title, str) for title in titles):
        raise UsageError(f"titles must be strings, one per chart, not {describe(value)}")
    if len(titles) != chart_count:
        raise UsageError(
            f"titles must have {chart_count} titles, one per chart, not {len(titles)}: "
            f"{list(titles)}",
            hint=CommandHint(
                "titles=None uses the names of the programs",
                f"give --title {chart_count} times, or not at all",
            ),
            fields=["titles"],
        )
    return titles


def _require_bounds(value: object, chart_count: int) -> Sequence[float | None]:
    """Return a lower bound for each chart, or None for each chart."""
    if value is None:
        return [None] * chart_count
    bounds = (
        [_require_bound(bound) for bound in value]
        if isinstance(value, Sequence)
        else [_require_bound(value)]
    )
    if len(bounds) != chart_count:
        raise UsageError(f"there are {len(bounds)} bounds for {chart_count} charts")
    return bounds


def _require_bound(value: object) -> float | None:
    if value is None or (isinstance(value, Real) and 0 < float(value) < inf):
        return None if value is None else float(value)
    raise UsageError(
        f"a bound must be a positive number, a lower bound of the span, not {describe(value)}"
    )


def _draw_figure(layout: FigureLayout, style: ResolvedStyle) -> Figure:
    """Draw all charts below each other, and the notes and the legend at the bottom."""
    width, height = layout.size
    figure, y = Figure(figsize=(width, height)), height
    for chart in layout.charts:
        axes_height = chart.rectangles.height * layout.row_height
        y -= chart.top_margin + axes_height
        axes = figure.add_axes(
            (LEFT_MARGIN / width, y / height, layout.width / width, axes_height / height)
        )
        axes.set_xlim(*chart.time_range)
        inches_per_unit = layout.width / chart.duration
        has_background = "phases" not in style.overlays
        draw_boxes(
            axes,
            chart.rectangles,
            inches_per_unit,
            layout.row_height,
            is_dense=chart.is_dense,
            has_background=has_background,
        )
        _draw_overlays(axes, chart, style, layout.row_height)
        _format_axes(axes, chart, style, layout.row_height)
        _draw_title(axes, chart, layout.width)
        y -= chart.bottom_margin
    for k, text in enumerate(layout.notes):
        figure.text(
            layout.left_margin / width,
            (y - 0.12 - NOTE_HEIGHT * k) / height,
            text,
            fontsize=6.5 if layout.is_narrow else 7.5,
            style="italic",
            parse_math=False,
        )
    add_legend(
        figure,
        layout.chart_rectangles,
        layout.left_margin,
        layout.legend_columns,
        layout.extra_colors,
    )
    return figure


def _draw_overlays(axes: Axes, chart: ChartLayout, style: ResolvedStyle, row_height: float) -> None:
    rectangles = chart.rectangles
    if "phases" in style.overlays:
        overlays.draw_phases(axes, rectangles)
    for k, memory_curve in enumerate(overlays.list_curves(rectangles.timeline, style.overlays)):
        tier = TIERS[0] if memory_curve.name == "memory" else memory_curve.name
        limit = style.memory_limits.get(tier) if memory_curve.unit else None
        overlays.draw_curve(axes, rectangles, memory_curve, k, row_height * 72, limit)
    if "arrows" in style.overlays and not chart.is_dense:
        overlays.draw_arrows(axes, rectangles)
    if "path" in style.overlays:
        overlays.draw_critical_path(axes, rectangles, is_dense=chart.is_dense)
    if chart.bound is not None and chart.time_range[0] <= chart.bound <= chart.time_range[1]:
        overlays.draw_bound(axes, chart.bound)


def _format_axes(axes: Axes, chart: ChartLayout, style: ResolvedStyle, row_height: float) -> None:
    """Set the limits, ticks and labels of a chart. `row_height` is in inches."""
    rectangles, timeline = chart.rectangles, chart.rectangles.timeline
    axes.set_xlim(*chart.time_range)
    axes.set_ylim(rectangles.height, 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    # The number of rows that the label of a rank needs.
    rank_step = ceil(8 / (rectangles.pitch * row_height * 72))
    ranks = np.arange(0, timeline.ranks, rank_step)
    axes.set_yticks(ranks * rectangles.pitch + 0.5, [f"rank {r}" for r in ranks], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    if rank_step == 1 and row_height * LANE_HEIGHT * 72 >= 4.5:
        for lane in rectangles.lanes:
            middle = ranks * rectangles.pitch + rectangles.lane_top(lane) + LANE_HEIGHT / 2
            _draw_lane_names(axes, lane.name.lower(), middle)
        if rectangles.unsharded.row_count:
            middle = (
                ranks * rectangles.pitch
                + rectangles.unsharded_top
                + BAND_HEIGHT * rectangles.unsharded.row_count / 2
            )
            _draw_lane_names(axes, "unsharded", middle)
    unit_time, unit = _choose_time_unit(timeline, chart.duration)
    has_no_axis = style.axis_label == "none"
    axes.spines["bottom"].set_visible(not has_no_axis)
    has_numbers = chart.has_axis_numbers and not has_no_axis
    axes.tick_params(axis="x", labelsize=7.5, length=3 * (not has_no_axis), labelbottom=has_numbers)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit_time:g}"))
    if has_numbers:
        label = f"time in {unit}" if style.axis_label is None else style.axis_label
        axes.set_xlabel(label, fontsize=7.5, labelpad=2, parse_math=False)


def _draw_lane_names(axes: Axes, name: str, positions: NDArray[np.floating[Any]]) -> None:
    """Write the name of a lane to the left of the lane of each rank."""
    for y in positions.tolist():
        axes.annotate(
            name, (0, y), (-4, 0), textcoords="offset points",
            xycoords=("axes fraction", "data"),
            ha="right", va="center", fontsize=5.5, color="#555555",
        )  # fmt: skip


def _draw_title(axes: Axes, chart: ChartLayout, width_inches: float) -> None:
    """Write the name of a chart above its left end, and its numbers above its right end."""
    timeline, title, is_narrow = chart.rectangles.timeline, chart.title, width_inches < NARROW_WIDTH
    if title == "":
        return
    font_size = 7 if is_narrow else 9
    unit_time, unit = _choose_time_unit(timeline, chart.duration)
    activations = timeline.peak_activations
    peak = f"{activations:.4g} activation{'s' * (activations != 1)}"
    if timeline.sizes is not None:
        peak = format_bytes(float(timeline.peak_memory.max()))
    facts = [f"bubble {timeline.bubble:.1%}", f"peak {peak}"]
    if not is_narrow:
        facts.append(f"span {timeline.span / unit_time:.4g} {timeline.unit and unit}".rstrip())
    if chart.bound is not None:
        saving = compute_saving(timeline.span, chart.bound)
        scope = " with full B" * timeline.program.used_opcodes.isdisjoint(SPLIT_BACKWARD)
        facts[1] = (
            f"{f'{describe_saving(saving)} to gain' if saving else 'shortest'}{scope} in {peak}"
        )
    v, name = timeline.program.unsegmented_shape.stages_per_rank, timeline.program.name
    kind = "" if is_narrow else f" ({timeline.kind}{f', v={v}' * (v > 1)})"
    if title is not None:
        name, kind = " ".join(title.split()), ""
    # If the space is too small, numbers are dropped first. Next to a title that the user chose, all
    # numbers may be dropped. Next to a name, the first number (the bubble) stays, and the name is
    # cut.
    summary, visible_name = ", ".join(facts), name[:300]
    while (
        len(facts) > (title is None)
        and _measure_inches(f"{name}{kind}  {summary}", font_size) > width_inches
    ):
        facts.pop()
        summary = ", ".join(facts)
    if _measure_inches(f"{name}{kind}  {summary}", font_size) > width_inches:
        num_letters = bisect_left(
            range(1, len(visible_name)), True, key=lambda length: (
                _measure_inches(f"{visible_name[:length]}…{kind}  {summary}", font_size)
                > width_inches
            ),
        )  # fmt: skip
        name = f"{visible_name[:num_letters]}…"
    title_style: dict[str, Any] = {
        "fontsize": font_size,
        "pad": 5,
        "parse_math": False,  # a name may contain a dollar sign
    }
    axes.set_title(f"{name}{kind}", loc="left", **title_style)
    axes.set_title(summary, loc="right", **title_style)


def _measure_inches(text: str, size: float) -> float:
    """Return the width of a text in inches, plus 6% because drawing rounds letters to pixels."""
    with warnings.catch_warnings():  # ignored for the same reason as in `save`
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        font = FontProperties(size=size)
        points = text_to_path.get_text_width_height_descent(text, font, False)[0]
    return 1.06 * float(points) / 72


def _choose_time_unit(timeline: Timeline, longest: float) -> tuple[float, str]:
    """Return the time of one unit of the axis, and the name of this unit."""
    if timeline.unit != "s":
        return 1.0, timeline.unit or "units of cost"
    return next((s for s in _TIME_UNITS if longest >= 2 * s[0]), _TIME_UNITS[-1])
