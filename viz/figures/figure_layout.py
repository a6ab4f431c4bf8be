"""Compute the positions of charts, titles and axes on a figure, in inches.

`schedir.viz.layout` places the boxes of one chart, in units of time and of lanes. This module
decides the size of these boxes on the figure, before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, nan
from typing import Final

import numpy as np

from schedir.errors import UsageError, describe
from schedir.predict.timeline import Timeline
from schedir.viz.figures.gantt_boxes import list_legend_entries
from schedir.viz.figures.overlays import BOUND_COLOR, CURVE_FUNCTIONS, LIMIT_COLOR, PHASE_COLORS
from schedir.viz.layout import ChartRectangles
from schedir.viz.palette import ACCENT_COLOR
from schedir.viz.style import LEFT_MARGIN, RIGHT_MARGIN, ResolvedStyle
from schedir.viz.time_bins import list_lower_tiers

# Inches.
_WIDTH_RANGE: Final = (5.5, 22.0)  # the smallest and largest default width of the axes
_ROW_HEIGHT: Final = 0.32  # the height of a compute lane; many ranks make it smaller
_MAX_HEIGHT: Final = 26.0  # the height of all axes together
_DENSE_SIZE: Final = (12.0, 12.0)  # the width and the height of all axes if no label fits
NARROW_WIDTH: Final = 4.0  # narrower axes have shorter titles
_TITLE_HEIGHT, _AXIS_HEIGHT = 0.34, 0.36  # margins above and below a chart with a title and axis
_EMPTY_MARGIN: Final = 0.1  # the margin without a title or an axis
_INCHES_PER_LABEL: Final = 8.5 / 72 / 0.9  # per unit of label width, for a font of 8.5 points
_LEGEND_COLUMN_WIDTH, _LEGEND_LINE_HEIGHT = 1.45, 0.19
_MAX_BOXES_PER_INCH: Final = 130  # with more, single boxes are not visible
NOTE_HEIGHT: Final = 0.18  # a line of notes below the charts
_SCALED_NOTE: Final = (
    "Time axes scaled so that the mean busy time of a rank is equally long in each."
)

TimeRange = tuple[float, float]  # the start and end of the time that a chart shows


@dataclass(frozen=True)
class ChartLayout:
    """One chart of a figure, with its time range and its margins.

    Args:
        rectangles: The rectangles of the chart.
        time_range: The time that the chart shows, in the unit of its timeline.
        is_dense: True if single boxes are too small to be visible.
        title: The title. None means the name and the kind, and "" means no title line.
        top_margin: Inches above the axes.
        bottom_margin: Inches below the axes.
        has_axis_numbers: True if the time axis has numbers below this chart.
        bound: The lower bound on the span, or None.
    """

    rectangles: ChartRectangles
    time_range: TimeRange
    is_dense: bool
    title: str | None
    top_margin: float
    bottom_margin: float
    has_axis_numbers: bool
    bound: float | None

    @property
    def duration(self) -> float:
        """The length of the time range."""
        return self.time_range[1] - self.time_range[0]


@dataclass(frozen=True)
class FigureLayout:
    """The layout of a figure.

    Args:
        charts: The charts, from the top.
        width: The width of the axes, in inches.
        row_height: The height of a compute lane, in inches.
        notes: Lines of text below the charts.
        extra_colors: Legend entries besides the boxes, with their colours.
    """

    charts: Sequence[ChartLayout]
    width: float
    row_height: float
    notes: Sequence[str]
    extra_colors: dict[str, str]

    @property
    def chart_rectangles(self) -> list[ChartRectangles]:
        """The rectangles of each chart."""
        return [chart.rectangles for chart in self.charts]

    @property
    def is_narrow(self) -> bool:
        """Return whether the axes are narrower than `NARROW_WIDTH`."""
        return self.width < NARROW_WIDTH

    @property
    def left_margin(self) -> float:
        """The left edge of the legend and the notes, in inches."""
        return RIGHT_MARGIN if self.is_narrow else LEFT_MARGIN

    @property
    def legend_columns(self) -> int:
        """The number of columns of the legend."""
        return max(int((self.width + LEFT_MARGIN - self.left_margin) / _LEGEND_COLUMN_WIDTH), 1)

    @property
    def size(self) -> tuple[float, float]:
        """The width and the height of the figure, in inches."""
        legend_lines = ceil(
            len(list_legend_entries(self.chart_rectangles, self.extra_colors)[0])
            / self.legend_columns
        )
        chart_heights = sum(
            rectangles.height * self.row_height for rectangles in self.chart_rectangles
        )
        top_margins = sum(chart.top_margin for chart in self.charts)
        bottom_margins = sum(chart.bottom_margin for chart in self.charts)
        legend_height = _LEGEND_LINE_HEIGHT * legend_lines + 0.08
        notes_height = NOTE_HEIGHT * len(self.notes) + 0.02 * bool(self.notes)
        height = chart_heights + top_margins + bottom_margins + legend_height + notes_height
        return LEFT_MARGIN + self.width + RIGHT_MARGIN, height


def lay_out(
    timelines: Sequence[Timeline],
    titles: Sequence[str | None],
    bounds: Sequence[float | None],
    style: ResolvedStyle,
) -> FigureLayout:
    """Lay out the figure of some timelines.

    Args:
        timelines: The timelines, from the top.
        titles: The title of each timeline, as in `ChartLayout`.
        bounds: The lower bound on the span of each timeline, or None.
        style: The style.

    Raises:
        UsageError: The time range of the style is invalid, or the runs have different units.
    """
    has_shared_unit = len({t.unit for t in timelines}) == 1
    time_ranges = _find_time_ranges(timelines, style, has_shared_unit=has_shared_unit)
    durations = [end - begin for begin, end in time_ranges]
    chart_rectangles = [
        _make_rectangles(t, style, with_lanes="lanes" in style.overlays) for t in timelines
    ]
    width, max_height = _choose_axes_size(style, chart_rectangles, durations)
    is_dense = [
        duration / s.short_box_width > width * _MAX_BOXES_PER_INCH
        for duration, s in zip(durations, chart_rectangles, strict=True)
    ]
    chart_rectangles = [
        _make_rectangles(s.timeline, style, with_lanes=False) if chart_is_dense else s
        for s, chart_is_dense in zip(chart_rectangles, is_dense, strict=True)
    ]
    row_height = min(_ROW_HEIGHT, max_height / sum(s.height for s in chart_rectangles))
    charts = []
    for k, rectangles in enumerate(chart_rectangles):
        has_axis_numbers = not has_shared_unit or k == len(chart_rectangles) - 1
        bottom_margin = (
            _AXIS_HEIGHT if has_axis_numbers and style.axis_label != "none" else _EMPTY_MARGIN
        )
        top_margin = _EMPTY_MARGIN if titles[k] == "" else _TITLE_HEIGHT
        charts.append(
            ChartLayout(
                rectangles,
                time_ranges[k],
                is_dense[k],
                titles[k],
                top_margin,
                bottom_margin,
                has_axis_numbers,
                bounds[k],
            )
        )
    notes = [] if has_shared_unit else [_SCALED_NOTE]
    notes += [
        f"{t.program.name:.40}: {t.causality_warning}" for t in timelines if t.causality_warning
    ]
    extra_colors = {"critical path": ACCENT_COLOR} if "path" in style.overlays else {}
    extra_colors |= PHASE_COLORS if "phases" in style.overlays else {}
    if any(bounds):
        scope = "" if width < NARROW_WIDTH else " at this peak"
        extra_colors[f"lower bound{scope}"] = BOUND_COLOR
    extra_colors |= (
        {"memory limit": LIMIT_COLOR} if style.memory_limits and "memory" in style.overlays else {}
    )
    return FigureLayout(charts, width, row_height, notes, extra_colors)


def _find_time_ranges(
    timelines: Sequence[Timeline], style: ResolvedStyle, *, has_shared_unit: bool
) -> list[TimeRange]:
    """Return the time range of each chart.

    All ranges have the same length if the runs have one unit. Otherwise, the length of each range
    is the mean busy time of its run, times a factor that is the same for all runs.
    """
    scales = [1.0 if has_shared_unit else float(t.busy.mean()) or 1.0 for t in timelines]
    longest = max(t.span / s for t, s in zip(timelines, scales, strict=True)) or 1.0
    if style.time_range is None:
        return [(0.0, longest * s) for s in scales]
    if not has_shared_unit:
        raise UsageError("a time range needs runs that all have the same time unit")
    return [_require_time_range(style.time_range, longest)] * len(timelines)


def _require_time_range(value: object, longest: float) -> tuple[float, float]:
    """Return the time range of the style, which must begin before the end of the longest run."""
    try:
        begin, end = map(float, value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        begin = end = nan
    if not 0 <= begin < min(end, longest) or end == inf:
        raise UsageError(
            "a time range is (begin, end) with 0 <= begin < end, and begins before the end of the "
            f"run ({longest:.6g}), not {describe(value)}"
        )
    return begin, end


def _make_rectangles(
    timeline: Timeline, style: ResolvedStyle, *, with_lanes: bool
) -> ChartRectangles:
    """Return the rectangles of a run, with space for curves and arrows."""
    lower_curves = len(list_lower_tiers(timeline)) if "memory" in style.overlays else 0
    return ChartRectangles(
        timeline,
        lanes=with_lanes,
        curves=len(CURVE_FUNCTIONS.keys() & style.overlays) + lower_curves,
        gap=0.6 if "arrows" in style.overlays else 0.2,
        palette=style.palette,
    )


def _choose_axes_size(
    style: ResolvedStyle, chart_rectangles: Sequence[ChartRectangles], durations: Sequence[float]
) -> tuple[float, float]:
    """Return the width of the axes, and the largest height of all axes together, in inches.

    If the style has no width, the labels determine it.
    """
    if style.width is not None:
        return style.width, _MAX_HEIGHT
    widths = (
        duration / s.short_box_width * s.label_width
        for duration, s in zip(durations, chart_rectangles, strict=True)
    )
    readable_width = max(widths) * _INCHES_PER_LABEL
    if readable_width > _WIDTH_RANGE[1]:
        return _DENSE_SIZE  # no label fits, so a larger figure would not show more
    return float(np.clip(readable_width, *_WIDTH_RANGE)), _MAX_HEIGHT
