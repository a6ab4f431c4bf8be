"""Overlays of a chart: arrows, the critical path, memory curves and phases."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from numpy.typing import NDArray

from schedir.errors import format_bytes
from schedir.ir.isa.instructions import (
    BOUNDARY_GRAD_OPS,
    COMPUTE_OPS,
    FORWARD_OPS,
    OPTIMIZER_STEP_OPS,
    SEND_OPS,
    Lane,
)
from schedir.predict.bubble_causes import find_steady_phase
from schedir.predict.timeline import Timeline
from schedir.viz.layout import CURVE_HEIGHT, LANE_INSET, ChartRectangles, Floats, compute_corners
from schedir.viz.palette import ACCENT_COLOR
from schedir.viz.time_bins import (
    MemoryCurve,
    compute_in_flight_curve,
    compute_memory_curve,
    compute_tier_curves,
)

OVERLAYS: Final = {
    "lanes": "a thin lane for each kind of communication that takes time",
    "arrows": "messages, from sender to receiver",
    "path": "the critical path, outlined",
    "in_flight": "the (stage, mb) pairs in flight on each rank, below its row",
    "memory": "the bytes on each rank (activations, without sizes), below its row; then those on "
    "the host and on its disk",
    "phases": "warmup and cooldown, shaded",
}
PHASE_COLORS: Final = {"warmup": "#d6e8f5", "cooldown": "#fde3cf"}
LIMIT_COLOR: Final = "#1a1a1a"  # the memory limit of a rank
BOUND_COLOR: Final = "#d55e00"  # the lower bound on the span
CURVE_FUNCTIONS: Final[dict[str, Callable[[Timeline], list[MemoryCurve]]]] = {
    "in_flight": lambda timeline: [compute_in_flight_curve(timeline)],
    "memory": lambda timeline: [compute_memory_curve(timeline), *compute_tier_curves(timeline)],
}

_MAX_ARROWS: Final = 4000  # more arrows would hide the chart
_FONT_SIZE: Final = 5  # points
_CURVE_COLORS: Final = {
    "in flight": "#0072b2", "memory": "#a0522d", "host": "#8c6d31", "disk": "#4a3728",
}  # fmt: skip


def list_curves(timeline: Timeline, overlays: Collection[str]) -> list[MemoryCurve]:
    """Return the curves below each rank, from the top.

    Args:
        timeline: The timeline.
        overlays: Names in `OVERLAYS`. The overlays in `CURVE_FUNCTIONS` have curves.
    """
    return [
        curve
        for name, make_curves in CURVE_FUNCTIONS.items()
        if name in overlays
        for curve in make_curves(timeline)
    ]


def find_messages(timeline: Timeline) -> NDArray[np.int64]:
    """Return the indices of the spans of each send and its receive, shape (n, 2).

    Args:
        timeline: The timeline.
    """
    graph, spans = timeline.graph, timeline.spans
    sends = np.flatnonzero(np.isin(spans["op"], SEND_OPS) & (graph.partner >= 0))
    return np.stack([sends, graph.partner[sends]], 1).astype(np.int64)


def draw_arrows(axes: Axes, rectangles: ChartRectangles) -> None:
    """Draw an arrow for each message, from the start of its send to the end of its receive.

    A chart with more than `_MAX_ARROWS` messages gets no arrows, because they would hide the chart.

    Args:
        axes: The axes.
        rectangles: The rectangles of the chart.
    """
    sends, receives = find_messages(rectangles.timeline).T
    if not 0 < len(sends) <= _MAX_ARROWS:
        return
    x0, x1 = rectangles.left[sends], rectangles.right[receives]
    rank = rectangles.timeline.spans["rank"]
    is_downward = rank[receives] > rank[sends]
    lanes_bottom = rectangles.curve_top - 0.06  # the lower edge of the lanes
    y0 = rank[sends] * rectangles.pitch + np.where(is_downward, lanes_bottom, 0)
    y1 = rank[receives] * rectangles.pitch + np.where(is_downward, 0, lanes_bottom)
    is_activation = np.isin(
        rectangles.op[sends],
        (*FORWARD_OPS, *(op for op in SEND_OPS if op not in BOUNDARY_GRAD_OPS)),
    )
    colours = np.where(
        is_activation,
        rectangles.palette.lane_colors[Lane.ACT],
        rectangles.palette.lane_colors[Lane.GRAD],
    )
    axes.quiver(
        x0, y0, x1 - x0, y1 - y0, color=colours, angles="xy", scale_units="xy", scale=1,
        units="inches", width=0.011, headwidth=5, headlength=6, headaxislength=5.5,
        minlength=0, zorder=3,
    )  # fmt: skip


def draw_critical_path(axes: Axes, rectangles: ChartRectangles, *, is_dense: bool) -> None:
    """Outline the boxes of the critical path, and connect them with lines.

    Args:
        axes: The axes.
        rectangles: The rectangles of the chart.
        is_dense: True to draw a line through each box instead of an outline.
    """
    path = rectangles.timeline.critical_path
    path = path[rectangles.right[path] > rectangles.left[path]]
    is_transfer = ~np.isin(rectangles.op[path], [*COMPUTE_OPS, *OPTIMIZER_STEP_OPS])
    path = path[~(is_transfer & (not rectangles.lanes))]
    middle = (rectangles.top[path] + rectangles.bottom[path]) / 2
    if is_dense:
        left, right = (np.stack([x[path], middle], 1) for x in (rectangles.left, rectangles.right))
        lines = np.stack([left, right], 1)
        axes.add_collection(
            LineCollection(list(lines), colors=ACCENT_COLOR, linewidths=2, zorder=4)
        )
    else:
        boxes = list(rectangles.compute_box_corners(path))
        axes.add_collection(
            PolyCollection(boxes, fc="none", ec=ACCENT_COLOR, linewidth=1.3, zorder=4)
        )
    link_starts = np.stack([rectangles.right[path], middle], 1)[:-1]
    link_ends = np.stack([rectangles.left[path], middle], 1)[1:]
    links = np.stack([link_starts, link_ends], 1)
    links = links[link_starts[:, 1] != link_ends[:, 1]]
    axes.add_collection(LineCollection(list(links), colors=ACCENT_COLOR, linewidths=1.0, zorder=4))


def draw_bound(axes: Axes, min_span: float) -> None:
    """Mark the lower bound on the span by an arrow, and by a line under the boxes.

    Args:
        axes: The axes.
        min_span: The lower bound, in the unit of the timeline.
    """
    axes.axvline(min_span, color=BOUND_COLOR, linewidth=1.0, zorder=0, clip_on=False)
    axes.annotate(
        "", (min_span, 0), (0, 4), textcoords="offset points", annotation_clip=False,
        arrowprops={"arrowstyle": "-|>", "color": BOUND_COLOR, "shrinkA": 0, "shrinkB": 0,
                    "mutation_scale": 6, "linewidth": 0},
    )  # fmt: skip


def draw_phases(axes: Axes, rectangles: ChartRectangles) -> None:
    """Shade the warmup and the cooldown in the row of each rank.

    Args:
        axes: The axes.
        rectangles: The rectangles of the chart.
    """
    for name, (begin, end) in find_phase_times(rectangles.timeline).items():
        top = np.arange(rectangles.timeline.ranks, dtype=np.float64) * rectangles.pitch
        corners = compute_corners(begin, end, top - 0.09, top + 1.09)
        axes.add_collection(
            PolyCollection(list(corners), facecolor=PHASE_COLORS[name], linewidth=0, zorder=0)
        )


def find_phase_times(timeline: Timeline) -> dict[str, tuple[Floats, Floats]]:
    """Return the start and end of the warmup and the cooldown of each rank.

    These phases are before and after the steady phase (`bubble_causes.find_steady_phase`). For a
    rank without a backward, both have length 0.

    Args:
        timeline: The timeline.

    Returns:
        For "warmup" and "cooldown", the starts and the ends, each of shape (ranks,), from the start
        of the timeline.
    """
    begins, ends = (times - timeline.start_time for times in find_steady_phase(timeline))
    has_no_phase = np.isinf(begins)
    warmup_ends = np.where(has_no_phase, 0, begins)
    cooldown_begins = np.where(has_no_phase, timeline.span, ends)
    ranks = timeline.ranks
    return {
        "warmup": (np.zeros(ranks), warmup_ends),
        "cooldown": (cooldown_begins, np.full(ranks, timeline.span)),
    }


def draw_curve(
    axes: Axes,
    rectangles: ChartRectangles,
    memory_curve: MemoryCurve,
    curve_index: int,
    row_points: float,
    limit: float | None,
) -> None:
    """Draw a memory curve below each rank, with one scale for all ranks, and the limit as a line.

    The areas of `static_layers`, such as weights, are separated by dotted lines. The peak and the
    names of these areas are written if there is enough space.

    Args:
        axes: The axes.
        rectangles: The rectangles of the chart.
        memory_curve: The curve.
        curve_index: The number of the curve below the rank, from 0 at the top.
        row_points: The height of a compute lane, in points.
        limit: The memory limit of a rank in the unit of the curve, or None.
    """
    span, colour = rectangles.timeline.span, _CURVE_COLORS[memory_curve.name]
    peaks = [float(values.max(initial=0)) for _, values in memory_curve.steps]
    scale = CURVE_HEIGHT / (max([*peaks, limit or 0.0]) or 1.0)
    fills, lines, layers = [], [], []
    for rank, (times, values) in enumerate(memory_curve.steps):
        base = (
            rank * rectangles.pitch
            + rectangles.curve_top
            + CURVE_HEIGHT
            + curve_index * (CURVE_HEIGHT + LANE_INSET)
        )
        x = np.concatenate([[0], np.repeat(times, 2), [span]])
        y = base - scale * np.repeat(np.concatenate([[0], values]), 2)
        lines.append(np.stack([x, y], 1))
        fills.append(np.concatenate([lines[-1], [[span, base], [0, base]]]))
        if row_points * CURVE_HEIGHT >= _FONT_SIZE:
            peak = format_bytes(peaks[rank]) if memory_curve.unit else f"{peaks[rank]:g}"
            axes.annotate(
                f"{memory_curve.name}\n≤ {peak}", (0, base - CURVE_HEIGHT / 2), (-4, 0), ha="right",
                xycoords=("axes fraction", "data"), va="center", textcoords="offset points",
                fontsize=5.5, color=colour,
            )  # fmt: skip
        if limit is not None:
            axes.hlines(
                base - scale * limit, 0, span, color=LIMIT_COLOR, linewidth=0.8, linestyle="--"
            )
        bottom = 0.0
        for name, layer_tops in memory_curve.static_layers.items():
            top = float(layer_tops[rank])
            layers.append([(0, base - scale * top), (span, base - scale * top)])
            if row_points * scale * (top - bottom) >= _FONT_SIZE:
                axes.annotate(
                    name, (0, base - scale * (top + bottom) / 2), (2, 0), ha="left", va="center",
                    xycoords=("axes fraction", "data"), textcoords="offset points",
                    fontsize=_FONT_SIZE, color=colour,
                )  # fmt: skip
            bottom = top
    if layers:
        layer_lines = LineCollection(layers, colors=colour, linewidths=0.4, linestyles="dotted")
        axes.add_collection(layer_lines)
    axes.add_collection(PolyCollection(fills, facecolor=colour, alpha=0.16, linewidth=0))
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.8))
