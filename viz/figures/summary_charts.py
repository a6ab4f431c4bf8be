"""Summary charts: bubble against memory, and causes of idle time."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.predict.timeline import Timeline, require_timeline, require_timelines
from schedir.viz.figures.chart_axes import add_axes_with_margins, draw_grid
from schedir.viz.palette import ACCENT_COLOR, choose_text_color

if TYPE_CHECKING:
    from schedir.schedule_search.memory_frontier import MemoryFrontier

_POINT_COLOR: Final = "#0072b2"
_INFEASIBLE_COLOR: Final = "#e4e4e4"
# Inches: the width and the height of a cell, and the largest total height of the cells.
_CELL_SIZE: Final = (0.95, 0.26, 11.0)
_MIN_FONT_SIZE: Final = 4.5  # points of a number in a cell


def bubble_vs_memory(timelines: Sequence[Timeline]) -> Figure:
    """Draw bubble against memory, with a point per timeline.

    A line joins the Pareto-optimal timelines. Memory is the largest peak of a rank, in GB. If a
    timeline has no sizes, memory is `Timeline.peak_activations` for all timelines.

    Args:
        timelines: The timelines.

    Returns:
        The figure.

    Raises:
        UsageError: There are no timelines.

    Example:
        >>> import schedir
        >>> shape = schedir.PipelineShape(ranks=4, microbatches=8)
        >>> built_in = schedir.schedules
        >>> figure = schedir.viz.bubble_vs_memory(
        ...     [
        ...         schedir.simulate(schedir.compile(schedule, shape))
        ...         for schedule in (built_in.gpipe, built_in.one_f_one_b, built_in.zb_h1)
        ...     ]
        ... )
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['zb_h1', 'one_f_one_b', 'gpipe']
    """
    require_timelines(timelines)
    has_sizes = all(t.sizes is not None for t in timelines)
    x = np.array(
        [t.peak_memory.max() / 1e9 if has_sizes else t.peak_activations for t in timelines]
    )
    y = np.array([t.bubble for t in timelines])
    scale = max(1.0, min(len(timelines) / 12, 1.6))  # many names need more space
    figure = Figure(figsize=(5.2 * scale, 3.7 * scale), layout="constrained")
    axes = figure.subplots()
    order = np.lexsort((y, x))
    frontier = order[y[order] <= np.minimum.accumulate(y[order])]
    axes.plot(
        x[frontier],
        y[frontier],
        color=ACCENT_COLOR,
        alpha=0.45,
        linewidth=1,
        drawstyle="steps-post",
        zorder=1,
    )
    _draw_points(axes, x, y)
    axes.set_xlim(0, float(x.max()) * 1.3 or 1)
    axes.set_ylim(0, max(float(y.max()) * 1.15, 0.01))
    _draw_names(axes, x, y, [t.program.name for t in timelines], scale)
    if notes := [
        f"{t.program.name}: {t.causality_warning}" for t in timelines if t.causality_warning
    ]:
        axes.set_title("\n".join(notes), fontsize=7, style="italic", loc="left", parse_math=False)
    _format_axes(axes, in_bytes=has_sizes)
    return figure


def memory_frontier(frontier: MemoryFrontier) -> Figure:
    """Draw the bubble that a search found at each memory limit, above the lower bounds.

    A line shows the shortest run that the search found within each limit. No schedule of these
    stages can be in the filled region. Each point is one of `frontier.timelines`. Memory is the
    largest peak of a rank, in GB. Without sizes, memory is a number of activations. One microbatch
    in all stages of a rank is counted as 1. The chart leaves out the area far above all points.

    Args:
        frontier: The result of `schedir.memory_frontier`.

    Returns:
        The figure.

    Example:
        >>> import schedir
        >>> shape = schedir.PipelineShape(ranks=4, microbatches=8)
        >>> costs = schedir.Costs(F=1, I=1, W=1)
        >>> frontier = schedir.memory_frontier(shape, costs, max_evaluations=500)
        >>> figure = schedir.viz.memory_frontier(frontier)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['zb_h1', 'zb_h2', 'one_f_one_b', 'eager_1f1b', 'gpipe']
    """
    unit = 1e9 if frontier.is_in_bytes else frontier.shape.stages / frontier.shape.ranks
    points = np.array([[frontier.measure_memory(t) / unit, t.bubble] for t in frontier.timelines])
    search_curve = np.array([[k.limit / unit, k.timeline.bubble] for k in frontier.levels])
    bound = np.array(
        [[limit / unit, frontier.compute_bubble(span)] for limit, span in frontier.bounds]
    )
    points = points.reshape(-1, 2)
    bound = np.vstack([[0, 1], [bound[0, 0], 1], bound])  # nothing fits below the first limit
    right = max(points[:, 0].max(initial=0), search_curve[-1, 0]) * 1.3
    search_curve = np.vstack([search_curve, [right, search_curve[-1, 1]]])
    bound[-1, 0] = right
    figure = Figure(figsize=(6.2, 4.2), layout="constrained")
    axes = figure.subplots()
    # A limit between two numbers of activations allows as much as the lower number: step "post". A
    # bound for a limit in bytes is also valid for all smaller limits: step "pre".
    step: Literal["pre", "post"] = "pre" if frontier.is_in_bytes else "post"
    axes.fill_between(
        bound[:, 0], bound[:, 1], step=step, color=_INFEASIBLE_COLOR, linewidth=0, zorder=0.5,
        label="no schedule of these stages can be here",
    )  # fmt: skip
    axes.plot(
        search_curve[:, 0], search_curve[:, 1],
        color=ACCENT_COLOR, linewidth=1.4, drawstyle="steps-post", zorder=1,
        label="the shortest schedule of the search",
    )  # fmt: skip
    _draw_points(axes, points[:, 0], points[:, 1])
    top = 1.6 * points[:, 1].max() if len(points) else search_curve[0, 1] * 1.15
    axes.set_xlim(0, right)
    axes.set_ylim(0, max(min(top, 1.0), 0.01))
    _draw_names(
        axes, points[:, 0], points[:, 1], [t.program.name for t in frontier.timelines], 6.2 / 5.2
    )
    axes.legend(loc="upper right", fontsize=7.5, frameon=False)
    _format_axes(axes, in_bytes=frontier.is_in_bytes)
    return figure


def _draw_points(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    axes.scatter(x, y, s=34, color=_POINT_COLOR, edgecolor="white", linewidth=0.8, zorder=2)


def _format_axes(axes: Axes, *, in_bytes: bool) -> None:
    """Format the axes of bubble against memory."""
    axes.yaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g}%"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    x_label = "peak in flight on a rank, in activations of all its stages"
    if in_bytes:
        x_label = "peak memory of a rank, in GB"
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel("bubble", fontsize=8)
    draw_grid(axes)


def _draw_names(
    axes: Axes, x: np.ndarray, y: np.ndarray, names: Sequence[str], scale: float
) -> None:
    """Write each name near its point, where it covers no other name and no point.

    If a name is not directly above its point, a line connects it with the point.
    """
    x_limit, y_limit = axes.get_xlim()[1], axes.get_ylim()[1]
    axes_size = 320 * scale, 210 * scale  # typographic points
    points = np.stack([x / x_limit * axes_size[0], y / y_limit * axes_size[1]], 1).tolist()
    occupied = [(left - 4, left + 4, up) for left, up in points]  # occupied: left, right, height
    for k in np.lexsort((x, y)).tolist():
        name = names[k] if len(names[k]) <= 30 else f"{names[k][:29]}…"
        left, y_point = points[k]
        right = left + 4 + 4.2 * len(name)
        # Positions to try: above the point, then further up or down, and also further to the right.
        candidates = [
            (left + 5 + shift, y_point + up + 6)
            for step in range(len(names) + 1)
            for shift in (0, 9 * step)
            for up in (9.5 * step, -9.5 * step)
        ]
        free_places = [
            (b, t) for b, t in candidates
            if t > -4
            and all(abs(t - c) >= 9 or right + b - left < a or b > e for a, e, c in occupied)
        ]  # fmt: skip
        others = [point for point in points if point != points[k]]
        nearest = [  # positions whose nearest point is the named point
            (b, t) for b, t in free_places[:8]
            if all(hypot(b - x, t - y) >= hypot(b - left, t - y_point) for x, y in others)
        ]  # fmt: skip
        begin, y_name = (nearest or free_places)[0]
        occupied.append((begin, right + begin - left, y_name))
        is_moved = abs(y_name - y_point - 6) > 3
        line_style = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5}
        axes.annotate(
            name, (float(x[k]), float(y[k])), (begin - left, y_name - y_point),
            textcoords="offset points", va="center_baseline", fontsize=7, parse_math=False,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops=line_style if is_moved else None,
        )  # fmt: skip


def idle_map(timeline: Timeline) -> Figure:
    """Draw a heat map of idle time, with a row per rank and a column per cause.

    The cells are shares of the span. `schedir.predict.bubble_causes` defines the causes. A cause
    that does not occur has no column. The last column is the sum, and the last row is the mean of
    all ranks.

    Args:
        timeline: The timeline.

    Returns:
        The figure.

    Example:
        >>> import schedir
        >>> run = schedir.simulate(schedir.compile(schedir.schedules.one_f_one_b,
        ...     schedir.PipelineShape(4, 8)))
        >>> figure = schedir.viz.idle_map(run)
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['warmup', 'cooldown', 'all']
    """
    require_timeline(timeline, "timeline")
    share = sum_by_cause(idleness(timeline), timeline.ranks) / (timeline.span or 1.0)
    causes = np.flatnonzero(share.sum(0) > 0)
    columns = np.column_stack([share[:, causes], share.sum(1)])
    cells = np.vstack([columns, columns.mean(0)])
    width, height, max_height = _CELL_SIZE
    height = min(height, max_height / len(cells))
    left, top, bottom = 0.7, 0.75 + 0.15 * bool(timeline.causality_warning), 0.15
    figure, axes, size = add_axes_with_margins(
        (width * cells.shape[1], height * len(cells)), left, top, 0.15, bottom
    )
    max_share = float(cells.max(initial=0)) or 1.0
    axes.imshow(cells, cmap="YlOrBr", vmin=0, vmax=max_share, aspect="auto")
    names = [IdleCause(k).text for k in causes.tolist()]
    axes.set_xticks(range(cells.shape[1]), [*names, "all"], fontsize=7.5)
    axes.xaxis.tick_top()
    rank_step = -(-9 // max(int(height * 72), 1))
    ranks = range(0, timeline.ranks, rank_step)
    axes.set_yticks([*ranks, timeline.ranks], [*(f"rank {r}" for r in ranks), "mean"], fontsize=7.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.axhline(timeline.ranks - 0.5, color="white", linewidth=3)
    axes.axvline(cells.shape[1] - 1.5, color="white", linewidth=3)
    points = min(7.0, height * 72 * 0.6)
    if points >= _MIN_FONT_SIZE:
        image = axes.images[0]
        for (row, column), value in np.ndenumerate(cells):
            face = tuple(float(part) for part in image.to_rgba(value)[:3])
            text = f"{value:.1%}" if value else "0"
            axes.text(column, row, text, ha="center", va="center_baseline", fontsize=points,
                      color=choose_text_color((face[0], face[1], face[2])))  # fmt: skip
    name = timeline.program.name
    name = name if len(name) <= 40 else f"{name[:39]}…"
    title = f"{name} ({timeline.description}): idle share of the span, by cause"
    figure.text(0.1 / size[0], 1 - 0.22 / size[1], title, fontsize=9, parse_math=False)
    figure.text(
        0.1 / size[0], 1 - 0.4 / size[1], timeline.causality_warning, fontsize=7.5, style="italic"
    )
    return figure
