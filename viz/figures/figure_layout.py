"""Compute the positions of charts, titles and axes on a figure, in inches.

Before any drawing: `layout` says where the boxes of one chart lie, and this how large they become.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, nan
from typing import Final

import numpy as np

from schedir.errors import UsageError, describe
from schedir.predict.timeline import Timeline
from schedir.viz.figures.overlays import BOUND, CURVES, LIMIT, PHASES
from schedir.viz.figures.render import entries
from schedir.viz.layout import ChartRectangles
from schedir.viz.palette import ACCENT
from schedir.viz.style import LEFT, RIGHT, ResolvedStyle
from schedir.viz.time_bins import lower_tiers

# Inches.
_WIDTH: Final = (5.5, 22.0)  # of the axes, at least and at most
_ROW: Final = 0.32  # of a compute lane, unless the ranks are too many for
_TALL: Final = 26.0  # all axes together
_SMALL: Final = (12.0, 12.0)  # width, and all axes together, where no number fits
SLIM: Final = 4.0  # axes of less say less in their titles
_HEAD, _FOOT = 0.34, 0.36  # above and below a chart, where something stands there
_BARE: Final = 0.1  # where nothing does
_LABEL: Final = 8.5 / 72 / 0.9  # that a label wants, for each font size of its width
_ENTRY, _LINE = 1.45, 0.19  # of the legend: a column and a line
_SEEN: Final = 130  # boxes of an inch, if they are to be seen one by one
NOTE: Final = 0.18  # a line under the charts
_SCALED: Final = "Time axes scaled so that the mean busy time of a rank is equally long in each."

Frame = tuple[float, float]  # the time that a chart shows, from and to


@dataclass(frozen=True)
class ChartLayout:
    """One chart: its boxes, the time that it shows, and the room above and below it.

    A `dense` chart has boxes that are too small to be seen one by one.  `last` is the one under
    which its time axis has numbers.  `bound` is the least span that there can be, if it is known.
    """

    sheet: ChartRectangles
    frame: Frame
    dense: bool
    title: str | None
    head: float
    foot: float
    last: bool
    bound: float | None

    @property
    def length(self) -> float:
        """How much time it shows."""
        return self.frame[1] - self.frame[0]


@dataclass(frozen=True)
class FigureLayout:
    """A figure: its charts, how wide their axes are, and how high a compute lane is.

    `notes` stand under the charts; `extra` is what the legend has besides boxes, with its colour.
    """

    charts: Sequence[ChartLayout]
    width: float
    row: float
    notes: Sequence[str]
    extra: dict[str, str]

    @property
    def sheets(self) -> list[ChartRectangles]:
        return [chart.sheet for chart in self.charts]

    @property
    def slim(self) -> bool:
        """Whether there is room for less."""
        return self.width < SLIM

    @property
    def left(self) -> float:
        """Where legend and notes begin."""
        return RIGHT if self.slim else LEFT

    @property
    def columns(self) -> int:
        """How many columns the legend has."""
        return max(int((self.width + LEFT - self.left) / _ENTRY), 1)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the whole figure."""
        lines = ceil(len(entries(self.sheets, self.extra)[0]) / self.columns)
        charts = sum(sheet.height * self.row for sheet in self.sheets)
        around = sum(chart.head for chart in self.charts), sum(chart.foot for chart in self.charts)
        notes = NOTE * len(self.notes) + 0.02 * bool(self.notes)
        height = charts + around[0] + around[1] + (_LINE * lines + 0.08) + notes
        return LEFT + self.width + RIGHT, height


def lay_out(
    timelines: Sequence[Timeline],
    titles: Sequence[str | None],
    bounds: Sequence[float | None],
    look: ResolvedStyle,
) -> FigureLayout:
    """The figure of some Timelines, each with its title and the bound on its span."""
    shared = len({t.unit for t in timelines}) == 1
    frames = _frames(timelines, look, shared=shared)
    lengths = [end - begin for begin, end in frames]
    sheets = [_sheet(t, look, lanes="lanes" in look.show) for t in timelines]
    width, tall = _room(look, sheets, lengths)
    dense = [long / s.narrow > width * _SEEN for long, s in zip(lengths, sheets, strict=True)]
    sheets = [
        _sheet(s.timeline, look, lanes=False) if crowded else s
        for s, crowded in zip(sheets, dense, strict=True)
    ]
    row = min(_ROW, tall / sum(s.height for s in sheets))
    charts = []
    for k, sheet in enumerate(sheets):
        last = not shared or k == len(sheets) - 1
        foot = _FOOT if last and look.axis != "none" else _BARE
        head = _BARE if titles[k] == "" else _HEAD
        charts.append(
            ChartLayout(sheet, frames[k], dense[k], titles[k], head, foot, last, bounds[k])
        )
    notes = [] if shared else [_SCALED]
    notes += [f"{t.program.name:.40}: {t.doubt}" for t in timelines if t.doubt]
    extra = {"critical path": ACCENT} if "path" in look.show else {}
    extra |= PHASES if "phases" in look.show else {}
    extra |= {"no order is shorter": BOUND} if any(bounds) else {}
    extra |= {"limit of memory": LIMIT} if look.limits and "memory" in look.show else {}
    return FigureLayout(charts, width, row, notes, extra)


def _frames(timelines: Sequence[Timeline], look: ResolvedStyle, *, shared: bool) -> list[Frame]:
    """The time that each chart shows: as much in all, by the runs' unit or by their busy time."""
    scale = [1.0 if shared else float(t.busy.mean()) or 1.0 for t in timelines]
    longest = max(t.span / s for t, s in zip(timelines, scale, strict=True)) or 1.0
    if look.time is None:
        return [(0.0, longest * s) for s in scale]
    if not shared:
        raise UsageError("a part of the time is drawn of runs in one unit")
    return [_part(look.time, longest)] * len(timelines)


def _part(given: object, longest: float) -> tuple[float, float]:
    """The part of the time that is drawn, of runs of which the longest takes so long."""
    try:
        begin, end = map(float, given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        begin = end = nan
    if not 0 <= begin < min(end, longest) or end == inf:
        raise UsageError(
            f"the time that is drawn is like (0, {longest:.6g}), all of it, not {describe(given)}"
        )
    return begin, end


def _sheet(timeline: Timeline, look: ResolvedStyle, *, lanes: bool) -> ChartRectangles:
    """Where the boxes of a run lie, with room for what is shown besides."""
    below = len(lower_tiers(timeline)) if "memory" in look.show else 0
    return ChartRectangles(
        timeline,
        lanes=lanes,
        curves=len(CURVES.keys() & look.show) + below,
        gap=0.6 if "arrows" in look.show else 0.2,
        palette=look.palette,
    )


def _room(
    look: ResolvedStyle, sheets: Sequence[ChartRectangles], lengths: Sequence[float]
) -> tuple[float, float]:
    """How wide the axes are, and how high all of them may be together.

    Unless the width is asked for, labels decide it.
    """
    if look.width is not None:
        return look.width, _TALL
    widths = (long / s.narrow * s.label_width for long, s in zip(lengths, sheets, strict=True))
    wanted = max(widths) * _LABEL
    if wanted > _WIDTH[1]:
        return _SMALL  # no number fits: what is seen is seen in less room, too
    return float(np.clip(wanted, *_WIDTH)), _TALL
