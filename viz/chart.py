"""Gantt charts: who did what when, or will."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import ceil, inf, nan
from numbers import Real
from typing import Any, Final, TypedDict, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from schedir.errors import UsageError, expect, in_bytes, said
from schedir.predict.timeline import Timeline, expect_runs
from schedir.viz import overlays
from schedir.viz.layout import CURVE, LANE, Sheet
from schedir.viz.overlays import MARKS, PHASES
from schedir.viz.palette import ACCENT, KINDS, PALETTES, Palette, recoloured
from schedir.viz.raster import in_flight, memory
from schedir.viz.render import entries, legend, paint

# Inches.
_WIDTH: Final = (5.5, 22.0)  # of the axes, at least and at most
_ROW: Final = 0.32  # of a compute lane, unless the ranks are too many for
_TALL: Final = 26.0  # all axes together
_SMALL: Final = (12.0, 12.0)  # width, and all axes together, where no number fits
_SLIM: Final = 4.0  # axes of less say less in their titles
_LEFT, _RIGHT, _HEAD, _FOOT = 0.62, 0.12, 0.34, 0.36
_LABEL: Final = 8.5 / 72 / 0.9  # that a label wants, for each font size of its width
_ENTRY, _LINE = 1.45, 0.19  # of the legend: a column and a line
_SEEN: Final = 130  # boxes of an inch, if they are to be seen one by one
CURVES: Final = {"in_flight": in_flight, "memory": memory}
PAPER: Final = {"column": 3.35, "page": 7.0}  # whole figures, as journals set them
_NOTE: Final = 0.18  # a line under the charts
_SCALED: Final = "Time axes scaled so that the mean busy time of a rank is equally long in each."
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Style(TypedDict, total=False):
    """How charts look.

    `width` is that of the axes in inches, or "column" or "page" for a figure as wide as those of
    a paper (3.35 and 7 inches); without it, wide enough for the labels, within bounds.

    `show` names what there is besides boxes (`schedir.viz.overlays.MARKS`), between commas or in a
    collection: "lanes", "arrows" for messages, "path" for the critical path, "in_flight" and
    "memory" for curves of them under each rank, and "phases" to shade warmup and cooldown.

    `palette` is one of `schedir.viz.palette.PALETTES`: "plain" holds for colour-blind readers and
    on a grey print, "grey" is that print, "bright" is Okabe and Ito's.  `colours` has others for
    some of F, B, I, W, act, grad, tp, dp and step, as matplotlib knows them.

    `axis` is what stands under the time axis, or "none" for no numbers and no words.  `time` is
    the part that is drawn, from and to, in the runs' unit from their begin.

    >>> import schedir
    >>> paper = schedir.viz.Style(width="column", palette="grey", show="path", axis="time in ms")
    >>> run = schedir.simulate(schedir.compile(schedir.schedules.zb_h1, schedir.Plan(4, 8)))
    >>> f"{schedir.viz.gantt(run, **paper).get_figwidth():g} inches"
    '3.35 inches'
    """

    width: float | str | None
    show: str | Collection[str]
    palette: str
    colours: Mapping[str, str]
    axis: str | None
    time: tuple[float, float] | None


def gantt(timeline: Timeline, *, title: str | None = None, **style: Unpack[Style]) -> Figure:
    """Draw a Timeline: a row per rank, rank 0 on top, time to the right.

    A row is the compute lane, and below it a thin lane for each kind of communication that
    takes any time; of a transfer's lane, receives are the upper half and sends the lower.
    Boxes bear letter and microbatch where they fit, or the microbatch alone.  Where a rank holds
    several stages, their shades and the small numbers tell them apart.  A pair run together is
    one box cut in two.  Hatching is idle time.

    `title` stands for name and kind; "" leaves out the whole line above the chart.  `style` is
    any of `schedir.viz.Style`.  Boxes too small to be seen are mixed to the colour that
    they have from afar, without their lanes and arrows.

    >>> import schedir
    >>> program = schedir.compile(schedir.schedules.one_f_one_b, schedir.Plan(4, 8))
    >>> run = schedir.simulate(program, schedir.Costs(F=1, B=2))
    >>> figure = schedir.viz.gantt(run, show="arrows,path", palette="grey")
    >>> figure.axes[0].get_title("left"), figure.axes[0].get_title("right")
    ('one_f_one_b (predicted)', 'bubble 27.3%, peak 4 activations, span 33')
    """
    return compare([timeline], titles=None if title is None else [title], **style)


def compare(
    timelines: Sequence[Timeline],
    *,
    titles: Sequence[str] | None = None,
    **style: Unpack[Style],
) -> Figure:
    """Draw Timelines under each other, each from its own start, on one time axis.

    Beside each stand its bubble and the most that a rank holds: bytes, or without sizes
    activations of a whole rank, where a stage of half a rank counts half.  `titles` has one for
    each, as `gantt` takes it, and `style` is that of `gantt`.

    Units of cost and seconds have no common axis: where both are there, each Timeline has its
    own, scaled so that the mean busy time of a rank is equally long in all, and the figure
    says so.

    Raises UsageError for no Timelines, another number of titles, and a style that cannot be.

    >>> import schedir
    >>> plan = schedir.Plan(ranks=4, microbatches=8)
    >>> schedules = schedir.schedules.gpipe, schedir.schedules.zb_h1
    >>> runs = [schedir.simulate(schedir.compile(schedule, plan)) for schedule in schedules]
    >>> figure = schedir.viz.compare(runs)
    >>> [axes.get_title("right") for axes in figure.axes]
    ['bubble 27.3%, peak 8 activations, span 33', 'bubble 11.1%, peak 4 activations, span 27']
    """
    expect_runs(timelines)
    shared = len({t.unit for t in timelines}) == 1
    show, palette = _shown(style.get("show", "lanes")), _palette(style)
    named, axis = _titles(titles, len(timelines)), style.get("axis")
    if axis is not None:
        expect(axis, str, '"time in ms"')
    scale = [1.0 if shared else float(t.busy.mean()) or 1.0 for t in timelines]
    longest = max(t.span / s for t, s in zip(timelines, scale, strict=True)) or 1.0
    frames = [(0.0, longest * s) for s in scale]
    if (time := style.get("time")) is not None:
        if not shared:
            raise UsageError("a part of the time is drawn of runs in one unit")
        frames = [_part(time, longest)] * len(timelines)
    ends = [end - begin for begin, end in frames]
    lay = partial(
        Sheet,
        curves=len(CURVES.keys() & {*show}),
        gap=0.6 if "arrows" in show else 0.2,
        palette=palette,
    )
    sheets = [lay(t, lanes="lanes" in show) for t in timelines]
    tall, width = _TALL, _width(style.get("width"))
    if width is None:
        wanted = max(e / s.narrow * s.label_width for e, s in zip(ends, sheets, strict=True))
        width = float(np.clip(wanted * _LABEL, *_WIDTH))
        if wanted * _LABEL > _WIDTH[1]:
            width, tall = _SMALL  # no number fits: what is seen is seen in less room, too
    dense = [e / s.narrow > width * _SEEN for e, s in zip(ends, sheets, strict=True)]
    for k, crowded in enumerate(dense):
        if crowded:
            sheets[k] = lay(timelines[k], lanes=False)
    row = min(_ROW, tall / sum(s.height for s in sheets))

    slim = width < _SLIM
    left = _RIGHT if slim else _LEFT  # of the legend
    columns = max(int((width + _LEFT - left) / _ENTRY), 1)
    extra = {"critical path": ACCENT} if "path" in show else {}
    extra |= PHASES if "phases" in show else {}
    foot = _LINE * ceil(len(entries(sheets, extra)[0]) / columns) + 0.08
    last = [not shared or k == len(sheets) - 1 for k in range(len(sheets))]
    feet = [_FOOT if has and axis != "none" else 0.1 for has in last]
    heads = [_HEAD if title != "" else 0.1 for title in named]
    notes = [] if shared else [_SCALED]
    notes += [f"{t.program.name:.40}: {t.doubt}" for t in timelines if t.doubt]
    note = _NOTE * len(notes) + 0.02 * bool(notes)
    across = _LEFT + width + _RIGHT
    height = sum(s.height * row for s in sheets) + sum(heads) + sum(feet) + foot + note
    figure = Figure(figsize=(across, height))
    y = height
    for k, (sheet, (begin, end)) in enumerate(zip(sheets, frames, strict=True)):
        y -= heads[k] + sheet.height * row
        axes = figure.add_axes(
            (_LEFT / across, y / height, width / across, sheet.height * row / height)
        )
        axes.set_xlim(begin, end)
        paint(axes, sheet, width / ends[k], row, dense=dense[k], ground="phases" not in show)
        _mark(axes, sheet, show, row, dense=dense[k])
        _frame(axes, sheet, (begin, end), row, axis, last=last[k])
        _head(axes, sheet.timeline, ends[k], width, named[k])
        y -= feet[k]
    for k, text in enumerate(notes):
        figure.text(
            left / across,
            (y - 0.12 - _NOTE * k) / height,
            text,
            fontsize=6.5 if slim else 7.5,
            style="italic",
            parse_math=False,
        )
    legend(figure, sheets, left, columns, extra)
    return figure


def _mark(axes: Axes, sheet: Sheet, show: Collection[str], row: float, *, dense: bool) -> None:
    """What is shown besides boxes."""
    if "phases" in show:
        overlays.phases(axes, sheet)
    for nth, name in enumerate(name for name in CURVES if name in show):
        held = CURVES[name](sheet.timeline)
        overlays.curve(axes, sheet, held, nth, named=row * CURVE * 72 >= 5)
    if "arrows" in show and not dense:
        overlays.arrows(axes, sheet)
    if "path" in show:
        overlays.path(axes, sheet, dense=dense)


def _shown(show: str | Collection[str]) -> Collection[str]:
    """The marks that are asked for, between commas or in a collection."""
    if isinstance(show, str):
        show = [mark.strip() for mark in show.split(",") if mark.strip()]
    expect(show, Collection, '"lanes,arrows"')
    for mark in show:
        if not isinstance(mark, str) or mark not in MARKS:
            raise UsageError(f"a chart shows {', '.join(MARKS)}, not {said(mark)}")
    return show


def _titles(given: object, charts: int) -> Sequence[str | None]:
    """A title for each chart, or none."""
    if given is None:
        return [None] * charts
    titles = [given] if isinstance(given, str) else given
    if not isinstance(titles, Sequence) or not all(isinstance(title, str) for title in titles):
        raise UsageError(f"titles are texts, one for each chart, not {said(given)}")
    if len(titles) != charts:
        raise UsageError(f"there are {len(titles)} titles for {charts} charts")
    return titles


def _width(given: object) -> float | None:
    """The width of the axes, in inches, if one is asked for."""
    if isinstance(given, str) and given in PAPER:
        return PAPER[given] - _LEFT - _RIGHT
    if given is None:
        return None
    if isinstance(given, Real) and 0 < float(given) < inf:
        return float(given)
    raise UsageError(f"a width is a number of inches, or {' or '.join(PAPER)}: {said(given)}")


def _part(given: object, longest: float) -> tuple[float, float]:
    """The part of the time that is drawn, of runs of which the longest takes so long."""
    try:
        begin, end = map(float, given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        begin = end = nan
    if not 0 <= begin < min(end, longest) or end == inf:
        raise UsageError(
            f"the time that is drawn is like (0, {longest:.6g}), all of it, not {said(given)}"
        )
    return begin, end


def _palette(style: Style) -> Palette:
    """The palette that is asked for, with colours of its own for some kinds."""
    name, given, colours = style.get("palette", "plain"), {}, style.get("colours", {})
    if not isinstance(name, str) or name not in PALETTES:
        raise UsageError(f"a palette is {', '.join(PALETTES)}, not {said(name)}")
    expect(colours, Mapping, '{"F": "skyblue"}')
    for kind, colour in colours.items():
        if kind not in KINDS:
            raise UsageError(f"what has a colour is {', '.join(KINDS)}, not {said(kind)}")
        if not is_color_like(colour):
            raise UsageError(f"{kind} has no colour {said(colour)}", hint="a name, or #4b3b8f")
        given[kind] = to_hex(colour)
    return recoloured(PALETTES[name], given)


def _frame(
    axes: Axes,
    sheet: Sheet,
    frame: tuple[float, float],
    row: float,
    axis: str | None,
    *,
    last: bool,
) -> None:
    """Limits, ticks and names of one chart; `row` is a lane's height, and `axis` what stands under
    the last chart of an axis."""
    timeline = sheet.timeline
    axes.set_xlim(*frame)
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
                    xycoords=("axes fraction", "data"),
                    ha="right", va="center", fontsize=5.5, color="#555555",
                )  # fmt: skip
    one, unit = _clock(timeline, frame[1] - frame[0])
    bare = axis == "none"
    axes.spines["bottom"].set_visible(not bare)
    axes.tick_params(axis="x", labelsize=7.5, length=3 * (not bare), labelbottom=last and not bare)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / one:g}"))
    if last and not bare:
        label = f"time in {unit}" if axis is None else axis
        axes.set_xlabel(label, fontsize=7.5, labelpad=2, parse_math=False)


def _head(axes: Axes, timeline: Timeline, span: float, inches: float, title: str | None) -> None:
    """What stands above a chart: its name on the left, its figures on the right."""
    if title == "":
        return
    slim = inches < _SLIM
    size = 7 if slim else 9
    one, unit = _clock(timeline, span)
    most = timeline.peak_activations
    peak = f"{most:.4g} activation{'s' * (most != 1)}"
    if timeline.sizes is not None:
        peak = in_bytes(float(timeline.peak_memory.max()))
    facts = [f"bubble {timeline.bubble:.1%}", f"peak {peak}"]
    facts += [] if slim else [f"span {timeline.span / one:.4g} {timeline.unit and unit}".rstrip()]
    v, name = timeline.program.plan.stages_per_rank, timeline.program.name
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
