"""Gantt charts: who did what when, or will."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from schedir.errors import UsageError
from schedir.timeline import Timeline
from schedir.viz.paint import entries, legend, paint
from schedir.viz.sheet import LANE, Sheet

# Inches.
_WIDTH: Final = (5.5, 22.0)  # of the axes, at least and at most
_ROW: Final = 0.32  # of a compute lane, unless the ranks are too many for
_TALL: Final = 26.0  # all axes together
_LEFT, _RIGHT, _HEAD, _FOOT = 0.62, 0.12, 0.34, 0.36
_LABEL: Final = 8.5 / 72 / 0.9  # that a label wants, for each font size of its width
_ENTRY, _LINE = 1.45, 0.19  # of the legend: a column and a line
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def gantt(timeline: Timeline, *, width: float | None = None) -> Figure:
    """Draw a Timeline: a row per rank, rank 0 on top, time to the right.

    A row is the compute lane, and below it a thin lane for each kind of communication that
    takes any time; of a transfer's lane, receives are the upper half and sends the lower.
    Boxes bear letter and microbatch where they fit.  Where a rank holds several stages, their
    shades and the small numbers tell them apart.  A pair run together is one box cut in two.
    Hatching is idle time.

    `width` is that of the axes in inches; without it, wide enough for the labels, within
    bounds.
    """
    return compare([timeline], width=width)


def compare(timelines: Sequence[Timeline], *, width: float | None = None) -> Figure:
    """Draw Timelines under each other, each from its own start, on one time axis.

    Units of cost and seconds have no common axis: where both are there, each Timeline has its
    own, scaled so that the mean busy time of a rank is equally long in all, and the figure
    says so.

    Raises UsageError for no Timelines.
    """
    if not timelines:
        raise UsageError("a picture needs a timeline or more, not none")
    shared = len({t.unit for t in timelines}) == 1
    sheets = [Sheet(t) for t in timelines]
    scale = [1.0 if shared else float(t.busy.mean()) or 1.0 for t in timelines]
    longest = max(t.span / s for t, s in zip(timelines, scale, strict=True)) or 1.0
    ends = [longest * s for s in scale]
    if width is None:
        wanted = max(e / s.narrow * s.label_width for e, s in zip(ends, sheets, strict=True))
        width = float(np.clip(wanted * _LABEL, *_WIDTH))
    row = min(_ROW, _TALL / sum(s.height for s in sheets))

    columns = max(int(width / _ENTRY), 1)
    foot = _LINE * ceil(len(entries(sheets)[0]) / columns) + 0.08
    feet = [_FOOT if not shared or k == len(sheets) - 1 else 0.1 for k in range(len(sheets))]
    note = 0.0 if shared else 0.2
    across = _LEFT + width + _RIGHT
    height = sum(s.height * row + _HEAD for s in sheets) + sum(feet) + foot + note
    figure = Figure(figsize=(across, height))
    y = height
    for sheet, end, below in zip(sheets, ends, feet, strict=True):
        y -= _HEAD + sheet.height * row
        axes = figure.add_axes(
            (_LEFT / across, y / height, width / across, sheet.height * row / height)
        )
        paint(axes, sheet, width / end, row)
        _frame(axes, sheet, end, width, row, ticks=below == _FOOT)
        y -= below
    if not shared:
        figure.text(
            _LEFT / across,
            (y - 0.12) / height,
            "Time axes scaled so that the mean busy time of a rank is equally long in each.",
            fontsize=7.5,
            style="italic",
        )
    legend(figure, sheets, _LEFT, columns)
    return figure


def _frame(axes: Axes, sheet: Sheet, end: float, inches: float, row: float, *, ticks: bool) -> None:
    """Limits, ticks and title of one chart; `inches` are its width, `row` a lane's height."""
    timeline = sheet.timeline
    axes.set_xlim(0, end)
    axes.set_ylim(sheet.height, 0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    every = ceil(8 / (sheet.pitch * row * 72))  # rows that one rank's number takes
    ranks = np.arange(0, timeline.ranks, every)
    axes.set_yticks(ranks * sheet.pitch + 0.5, [f"rank {r}" for r in ranks], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    if every == 1 and row * LANE * 72 >= 4.5:
        for lane in sheet.lanes:
            for y in ranks * sheet.pitch + sheet.lane_top(lane) + LANE / 2:
                axes.annotate(
                    lane.name.lower(), (0, y), (-4, 0), textcoords="offset points",
                    ha="right", va="center", fontsize=5.5, color="#555555",
                )  # fmt: skip
    axes.tick_params(axis="x", labelsize=7.5, length=3, labelbottom=ticks)
    one, unit = _clock(timeline, end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / one:g}"))
    if ticks:
        axes.set_xlabel(f"time in {unit}", fontsize=7.5, labelpad=2)
    about = f"bubble {timeline.bubble:.1%}, span {timeline.span / one:.4g} {unit}"
    name, room = timeline.program.name, int(inches * 72 / (0.6 * 9)) - len(about) - 14
    name = name if len(name) <= room else name[: max(room - 1, 1)] + "…"
    plain: dict[str, Any] = {
        "fontsize": 9,
        "pad": 5,
        "parse_math": False,
    }  # a name may hold a dollar sign
    axes.set_title(f"{name} ({timeline.kind})", loc="left", **plain)
    axes.set_title(about, loc="right", **plain)


def _clock(timeline: Timeline, end: float) -> tuple[float, str]:
    """What one tick of the axis counts, and its name."""
    if timeline.unit != "s":
        return 1.0, timeline.unit or "units of cost"
    return next((s for s in _SECONDS if end >= 2 * s[0]), _SECONDS[-1])
