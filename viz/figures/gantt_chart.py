"""Gantt charts of one or several timelines."""

from __future__ import annotations

import warnings
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

from schedir.errors import UsageError, describe, format_bytes
from schedir.ir.isa.instructions import TIERS
from schedir.predict.possible_saving import at_most, gain_of
from schedir.predict.timeline import Timeline, expect_runs
from schedir.viz.figures import overlays
from schedir.viz.figures.figure_layout import NOTE, SLIM, ChartLayout, FigureLayout, lay_out
from schedir.viz.figures.render import legend, render
from schedir.viz.layout import BAND, LANE
from schedir.viz.style import LEFT, ResolvedStyle, Style, look_of

_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def gantt(
    timeline: Timeline,
    *,
    title: str | None = None,
    bound: float | None = None,
    **style: Unpack[Style],
) -> Figure:
    """Draw a Timeline: a row per rank, rank 0 on top, time to the right.

    A row is the compute lane, and below it a thin lane for each kind of communication that
    takes any time; of a transfer's lane, receives are the upper half and sends the lower.
    Boxes bear letter and microbatch where they fit, or the microbatch alone.  Where a rank holds
    several stages, their shades and the small numbers tell them apart.  A pair run together is
    one box cut in two.  Hatching is idle time.

    `title` stands for name and kind; "" leaves out the whole line above the chart.  `bound` is the
    least span that a schedule can have (`schedir.lower_bound`), in the run's unit: a line marks it,
    and the most that could be gained is told above.  `style` is any of `schedir.viz.Style`.  Boxes
    too small to be seen are mixed to the colour that they have from afar, without their lanes and
    arrows.

    >>> import schedir
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(4, 8))
    >>> run = schedir.simulate(program, schedir.Costs(F=1, B=2))
    >>> figure = schedir.viz.gantt(run, show="arrows,path", palette="grey")
    >>> figure.axes[0].get_title("left"), figure.axes[0].get_title("right")
    ('one_f_one_b (predicted)', 'bubble 27.3%, peak 4 activations, span 33')
    """
    return compare([timeline], titles=None if title is None else [title], bounds=[bound], **style)


def compare(
    timelines: Sequence[Timeline],
    *,
    titles: Sequence[str] | None = None,
    bounds: Sequence[float | None] | None = None,
    **style: Unpack[Style],
) -> Figure:
    """Draw Timelines under each other, each from its own start, on one time axis.

    Beside each stand its bubble and the most that a rank holds: bytes, or without sizes
    activations of a whole rank, where a stage of half a rank counts half.  `titles` and `bounds`
    have one for each, as `gantt` takes it, and `style` is that of `gantt`.

    Units of cost and seconds have no common axis: where both are there, each Timeline has its
    own, scaled so that the mean busy time of a rank is equally long in all, and the figure
    says so.

    Raises UsageError for no Timelines, another number of titles or bounds, and a style that cannot
    be.

    >>> import schedir
    >>> shape = schedir.PipelineShape(ranks=4, microbatches=8)
    >>> schedules = schedir.schedules.gpipe, schedir.schedules.zb_h1
    >>> runs = [schedir.simulate(schedir.compile(schedule, shape)) for schedule in schedules]
    >>> figure = schedir.viz.compare(runs)
    >>> [axes.get_title("right") for axes in figure.axes]
    ['bubble 27.3%, peak 8 activations, span 33', 'bubble 11.1%, peak 4 activations, span 27']
    """
    expect_runs(timelines)
    look = look_of(style)
    told = _titles(titles, len(timelines)), _bounds(bounds, len(timelines))
    return _drawn(lay_out(timelines, *told, look), look)


def _titles(given: object, charts: int) -> Sequence[str | None]:
    """A title for each chart, or none."""
    if given is None:
        return [None] * charts
    titles = [given] if isinstance(given, str) else given
    if not isinstance(titles, Sequence) or not all(isinstance(title, str) for title in titles):
        raise UsageError(f"titles are texts, one for each chart, not {describe(given)}")
    if len(titles) != charts:
        raise UsageError(f"there are {len(titles)} titles for {charts} charts")
    return titles


def _bounds(given: object, charts: int) -> Sequence[float | None]:
    """A bound for each chart, or none."""
    if given is None:
        return [None] * charts
    bounds = [_bound(one) for one in given] if isinstance(given, Sequence) else [_bound(given)]
    if len(bounds) != charts:
        raise UsageError(f"there are {len(bounds)} bounds for {charts} charts")
    return bounds


def _bound(given: object) -> float | None:
    """The least span that there can be, if it is known."""
    if given is None or (isinstance(given, Real) and 0 < float(given) < inf):
        return None if given is None else float(given)
    raise UsageError(f"a bound is a positive number, the least span, not {describe(given)}")


def _drawn(paper: FigureLayout, look: ResolvedStyle) -> Figure:
    """All charts under each other, notes and legend at the foot."""
    across, height = paper.size
    figure, y = Figure(figsize=(across, height)), height
    for chart in paper.charts:
        tall = chart.sheet.height * paper.row
        y -= chart.head + tall
        axes = figure.add_axes((LEFT / across, y / height, paper.width / across, tall / height))
        axes.set_xlim(*chart.frame)
        inches = paper.width / chart.length
        ground = "phases" not in look.show
        render(axes, chart.sheet, inches, paper.row, dense=chart.dense, ground=ground)
        _overlay(axes, chart, look, paper.row)
        _frame(axes, chart, look, paper.row)
        _head(axes, chart, paper.width)
        y -= chart.foot
    for k, text in enumerate(paper.notes):
        figure.text(
            paper.left / across,
            (y - 0.12 - NOTE * k) / height,
            text,
            fontsize=6.5 if paper.slim else 7.5,
            style="italic",
            parse_math=False,
        )
    legend(figure, paper.sheets, paper.left, paper.columns, paper.extra)
    return figure


def _overlay(axes: Axes, chart: ChartLayout, look: ResolvedStyle, row: float) -> None:
    """What is shown besides boxes."""
    sheet = chart.sheet
    if "phases" in look.show:
        overlays.phases(axes, sheet)
    for nth, held in enumerate(overlays.curves_of(sheet.timeline, look.show)):
        tier = TIERS[0] if held.name == "memory" else held.name
        limit = look.limits.get(tier) if held.unit else None
        overlays.curve(axes, sheet, held, nth, row * 72, limit)
    if "arrows" in look.show and not chart.dense:
        overlays.arrows(axes, sheet)
    if "path" in look.show:
        overlays.path(axes, sheet, dense=chart.dense)
    if chart.bound is not None and chart.frame[0] <= chart.bound <= chart.frame[1]:
        overlays.bound(axes, chart.bound)


def _frame(axes: Axes, chart: ChartLayout, look: ResolvedStyle, row: float) -> None:
    """Limits, ticks and names of one chart; `row` is a lane's height."""
    sheet, timeline = chart.sheet, chart.sheet.timeline
    axes.set_xlim(*chart.frame)
    axes.set_ylim(sheet.height, 0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    every = ceil(8 / (sheet.pitch * row * 72))  # rows that one rank's number takes
    ranks = np.arange(0, timeline.ranks, every)
    axes.set_yticks(ranks * sheet.pitch + 0.5, [f"rank {r}" for r in ranks], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    if every == 1 and row * LANE * 72 >= 4.5:
        for lane in sheet.lanes:
            middle = ranks * sheet.pitch + sheet.lane_top(lane) + LANE / 2
            _names(axes, lane.name.lower(), middle)
        if sheet.whole.rows:
            middle = ranks * sheet.pitch + sheet.whole_top + BAND * sheet.whole.rows / 2
            _names(axes, "whole", middle)
    one, unit = _clock(timeline, chart.length)
    bare = look.axis == "none"
    axes.spines["bottom"].set_visible(not bare)
    numbered = chart.last and not bare
    axes.tick_params(axis="x", labelsize=7.5, length=3 * (not bare), labelbottom=numbered)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / one:g}"))
    if numbered:
        label = f"time in {unit}" if look.axis is None else look.axis
        axes.set_xlabel(label, fontsize=7.5, labelpad=2, parse_math=False)


def _names(axes: Axes, name: str, middle: NDArray[np.floating[Any]]) -> None:
    """The name of a lane, left of it in each rank."""
    for y in middle.tolist():
        axes.annotate(
            name, (0, y), (-4, 0), textcoords="offset points",
            xycoords=("axes fraction", "data"),
            ha="right", va="center", fontsize=5.5, color="#555555",
        )  # fmt: skip


def _head(axes: Axes, chart: ChartLayout, inches: float) -> None:
    """What stands above a chart: its name on the left, its figures on the right."""
    timeline, title, slim = chart.sheet.timeline, chart.title, inches < SLIM
    if title == "":
        return
    size = 7 if slim else 9
    one, unit = _clock(timeline, chart.length)
    most = timeline.peak_activations
    peak = f"{most:.4g} activation{'s' * (most != 1)}"
    if timeline.sizes is not None:
        peak = format_bytes(float(timeline.peak_memory.max()))
    facts = [f"bubble {timeline.bubble:.1%}", f"peak {peak}"]
    facts += [] if slim else [f"span {timeline.span / one:.4g} {timeline.unit and unit}".rstrip()]
    if chart.bound is not None:
        gain = gain_of(timeline.span, chart.bound)
        of_orders = f"another order gains {at_most(gain)}" if gain else "no order is shorter"
        facts.insert(1, of_orders)
    v, name = timeline.program.whole.stages_per_rank, timeline.program.name
    kind = "" if slim else f" ({timeline.kind}{f', v={v}' * (v > 1)})"
    if title is not None:
        name, kind = " ".join(title.split()), ""
    # A title that somebody chose is whole before any figure; of a name the bubble is told first.
    about, left = ", ".join(facts), name[:300]
    while len(facts) > (title is None) and _inches(f"{name}{kind}  {about}", size) > inches:
        facts.pop()
        about = ", ".join(facts)
    while left and _inches(f"{name}{kind}  {about}", size) > inches:
        left = left[:-1]
        name = f"{left}…"
    plain: dict[str, Any] = {
        "fontsize": size,
        "pad": 5,
        "parse_math": False,
    }  # a name may hold a dollar sign
    axes.set_title(f"{name}{kind}", loc="left", **plain)
    axes.set_title(about, loc="right", **plain)


def _inches(text: str, size: float) -> float:
    """How wide a text is, with some room: letters are drawn at whole pixels."""
    with warnings.catch_warnings():  # as `save` says
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        font = FontProperties(size=size)
        points = text_to_path.get_text_width_height_descent(text, font, False)[0]
    return 1.06 * float(points) / 72


def _clock(timeline: Timeline, end: float) -> tuple[float, str]:
    """What one tick of the axis counts, and its name."""
    if timeline.unit != "s":
        return 1.0, timeline.unit or "units of cost"
    return next((s for s in _SECONDS if end >= 2 * s[0]), _SECONDS[-1])
