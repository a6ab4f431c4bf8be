"""Overlays of a chart: arrows, the critical path, memory curves, phases."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from numpy.typing import NDArray

from schedir.errors import format_bytes
from schedir.ir.isa.instructions import COMPUTE, FORWARDS, OF_GRADIENTS, SENDS, STEPS, Lane
from schedir.predict.bubble_causes import steady
from schedir.predict.timeline import Timeline
from schedir.viz.layout import CURVE, INSET, ChartRectangles, Floats, corners
from schedir.viz.palette import ACCENT
from schedir.viz.time_bins import MemoryCurve, below, in_flight, memory

OVERLAYS: Final = {
    "lanes": "a thin lane for each kind of communication that takes time",
    "arrows": "messages, from sender to receiver",
    "path": "the critical path, outlined",
    "in_flight": "how many (stage, mb) each rank holds, under its row",
    "memory": "the bytes that each rank holds (activations, without sizes), under its row; below "
    "it those on the host and on its disk",
    "phases": "warmup and cooldown, shaded",
}
PHASES: Final = {"warmup": "#d6e8f5", "cooldown": "#fde3cf"}
LIMIT: Final = "#1a1a1a"  # of what a rank may hold
BOUND: Final = "#d55e00"  # of the mark at the least span that there can be
CURVES: Final[dict[str, Callable[[Timeline], list[MemoryCurve]]]] = {
    "in_flight": lambda timeline: [in_flight(timeline)],
    "memory": lambda timeline: [memory(timeline), *below(timeline)],
}

_MOST: Final = 4000  # arrows
_TEXT: Final = 5  # points
_COLOURS: Final = {
    "in flight": "#0072b2", "memory": "#a0522d", "host": "#8c6d31", "disk": "#4a3728",
}  # fmt: skip


def curves_of(timeline: Timeline, show: Collection[str]) -> list[MemoryCurve]:
    """The curves under each rank, from above."""
    return [curve for name, of in CURVES.items() if name in show for curve in of(timeline)]


def messages(timeline: Timeline) -> NDArray[np.int64]:
    """Who sends to whom: pairs of spans, shape (n, 2)."""
    graph, spans = timeline.graph, timeline.spans
    sends = np.flatnonzero(np.isin(spans["op"], SENDS) & (graph.partner >= 0))
    return np.stack([sends, graph.partner[sends]], 1).astype(np.int64)


def arrows(axes: Axes, sheet: ChartRectangles) -> None:
    """An arrow per message: from when it leaves the sender's row to when it is at the receiver's.

    More than some thousands would hide the chart, and are not drawn.
    """
    sent, got = messages(sheet.timeline).T
    if not 0 < len(sent) <= _MOST:
        return
    x0, x1 = sheet.left[sent], sheet.right[got]
    rank = sheet.timeline.spans["rank"]
    down = rank[got] > rank[sent]
    floor = sheet.curve_top - 0.06  # below the lanes
    y0 = rank[sent] * sheet.pitch + np.where(down, floor, 0)
    y1 = rank[got] * sheet.pitch + np.where(down, 0, floor)
    act = np.isin(sheet.op[sent], (*FORWARDS, *(op for op in SENDS if op not in OF_GRADIENTS)))
    colours = np.where(act, sheet.palette.lanes[Lane.ACT], sheet.palette.lanes[Lane.GRAD])
    axes.quiver(
        x0, y0, x1 - x0, y1 - y0, color=colours, angles="xy", scale_units="xy", scale=1,
        units="inches", width=0.011, headwidth=5, headlength=6, headaxislength=5.5,
        minlength=0, zorder=3,
    )  # fmt: skip


def path(axes: Axes, sheet: ChartRectangles, *, dense: bool) -> None:
    """The chain that decides the span: its boxes outlined, or struck through, its links joined."""
    chain = sheet.timeline.critical_path
    chain = chain[sheet.right[chain] > sheet.left[chain]]
    hidden = ~np.isin(sheet.op[chain], [*COMPUTE, *STEPS])
    chain = chain[~(hidden & (not sheet.lanes))]
    middle = (sheet.top[chain] + sheet.bottom[chain]) / 2
    if dense:
        left, right = (np.stack([x[chain], middle], 1) for x in (sheet.left, sheet.right))
        struck = np.stack([left, right], 1)
        axes.add_collection(LineCollection(list(struck), colors=ACCENT, linewidths=2, zorder=4))
    else:
        boxes = list(sheet.quads(chain))
        axes.add_collection(PolyCollection(boxes, fc="none", ec=ACCENT, linewidth=1.3, zorder=4))
    leave = np.stack([sheet.right[chain], middle], 1)[:-1]
    enter = np.stack([sheet.left[chain], middle], 1)[1:]
    links = np.stack([leave, enter], 1)
    links = links[leave[:, 1] != enter[:, 1]]
    axes.add_collection(LineCollection(list(links), colors=ACCENT, linewidths=1.0, zorder=4))


def bound(axes: Axes, least: float) -> None:
    """The least span that there can be: a mark above the rows, and a line that no box is under."""
    axes.axvline(least, color=BOUND, linewidth=1.0, zorder=0, clip_on=False)
    axes.annotate(
        "", (least, 0), (0, 4), textcoords="offset points", annotation_clip=False,
        arrowprops={"arrowstyle": "-|>", "color": BOUND, "shrinkA": 0, "shrinkB": 0,
                    "mutation_scale": 6, "linewidth": 0},
    )  # fmt: skip


def phases(axes: Axes, sheet: ChartRectangles) -> None:
    """Shade each rank before its first backward, and after its last forward."""
    for name, (lo, hi) in phase_times(sheet.timeline).items():
        top = np.arange(sheet.timeline.ranks, dtype=np.float64) * sheet.pitch
        shade = corners(lo, hi, top - 0.09, top + 1.09)
        axes.add_collection(
            PolyCollection(list(shade), facecolor=PHASES[name], linewidth=0, zorder=0)
        )


def phase_times(timeline: Timeline) -> dict[str, tuple[Floats, Floats]]:
    """When each rank's warmup and cooldown begin and end, from the timeline's begin.

    Before and after the steady phase (`bubble_causes.steady`); a rank without a backward has
    neither.
    """
    begins, ends = (times - timeline.begin for times in steady(timeline))
    none = np.isinf(begins)
    warm, cool = np.where(none, 0, begins), np.where(none, timeline.span, ends)
    ranks = timeline.ranks
    return {"warmup": (np.zeros(ranks), warm), "cooldown": (cool, np.full(ranks, timeline.span))}


def curve(
    axes: Axes,
    sheet: ChartRectangles,
    held: MemoryCurve,
    nth: int,
    points: float,
    limit: float | None,
) -> None:
    """Under each rank, what it holds: a step curve, all to one scale, and the limit as a line.

    A row has so many points: where there is room for it, the peak is said, and layers are named.
    """
    span, colour = sheet.timeline.span, _COLOURS[held.name]
    peaks = [float(values.max(initial=0)) for _, values in held.steps]
    high = CURVE / (max([*peaks, limit or 0.0]) or 1.0)
    fills, lines, layers = [], [], []
    for rank, (times, values) in enumerate(held.steps):
        foot = rank * sheet.pitch + sheet.curve_top + CURVE + nth * (CURVE + INSET)
        x = np.concatenate([[0], np.repeat(times, 2), [span]])
        y = foot - high * np.repeat(np.concatenate([[0], values]), 2)
        lines.append(np.stack([x, y], 1))
        fills.append(np.concatenate([lines[-1], [[span, foot], [0, foot]]]))
        if points * CURVE >= _TEXT:
            peak = format_bytes(peaks[rank]) if held.unit else f"{peaks[rank]:g}"
            axes.annotate(
                f"{held.name}\n≤ {peak}", (0, foot - CURVE / 2), (-4, 0), ha="right",
                xycoords=("axes fraction", "data"), va="center", textcoords="offset points",
                fontsize=5.5, color=colour,
            )  # fmt: skip
        if limit is not None:
            axes.hlines(foot - high * limit, 0, span, color=LIMIT, linewidth=0.8, linestyle="--")
        below = 0.0
        for name, tops in held.floors.items():
            top = float(tops[rank])
            layers.append([(0, foot - high * top), (span, foot - high * top)])
            if points * high * (top - below) >= _TEXT:
                axes.annotate(
                    name, (0, foot - high * (top + below) / 2), (2, 0), ha="left", va="center",
                    xycoords=("axes fraction", "data"), textcoords="offset points",
                    fontsize=_TEXT, color=colour,
                )  # fmt: skip
            below = top
    if layers:
        dotted = LineCollection(layers, colors=colour, linewidths=0.4, linestyles="dotted")
        axes.add_collection(dotted)
    axes.add_collection(PolyCollection(fills, facecolor=colour, alpha=0.16, linewidth=0))
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.8))
