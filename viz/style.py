"""Style: options of how a chart looks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Final, TypedDict

from matplotlib.colors import is_color_like, to_hex

from schedir.errors import UsageError, describe, require_type, to_float
from schedir.ir.isa.instructions import TIERS
from schedir.viz.figures.overlays import OVERLAYS
from schedir.viz.palette import COLORED_KINDS, PALETTES, Palette, recolor

LEFT_MARGIN, RIGHT_MARGIN = 0.62, 0.12  # inches, beside the axes
PAPER_WIDTHS: Final = {"column": 3.35, "page": 7.0}  # inches of whole figures, as journals set them


class Style(TypedDict, total=False):
    """How charts look.

    `width` is that of the axes in inches, or "column" or "page" for a figure as wide as those of
    a paper (3.35 and 7 inches); without it, wide enough for the labels, within bounds.

    `overlays` names what there is besides boxes (`schedir.viz.figures.overlays.OVERLAYS`), between
    commas or in a collection: "lanes", "arrows" for messages, "path" for the critical path,
    "in_flight" and "memory" for curves of them under each rank, and "phases" to shade warmup and
    cooldown.

    `palette` is one of `schedir.viz.palette.PALETTES`: "plain" holds for colour-blind readers and
    on a grey print, "grey" is that print, "bright" is Okabe and Ito's.  `colours` has others for
    some of F, B, I, W, R, act, grad, tp, dp and step, as matplotlib knows them.

    `memory_limits` are bytes that a rank may hold on a tier, {"device": 40e9, "host": 256e9}: lines
    across what it holds there.

    `axis_label` is what stands under the time axis, or "none" for no numbers and no words.
    `time_range` is the part that is drawn, from and to, in the runs' unit from their begin.

    >>> import schedir
    >>> paper = schedir.viz.Style(width="column", palette="grey", show="path", axis="time in ms")
    >>> run = schedir.simulate(schedir.compile(schedir.schedules.zb_h1,
    ...     schedir.PipelineShape(4, 8)))
    >>> f"{schedir.viz.gantt(run, **paper).get_figwidth():g} inches"
    '3.35 inches'
    """

    width: float | str | None
    show: str | Collection[str]
    palette: str
    colours: Mapping[str, str]
    axis: str | None
    time: tuple[float, float] | None
    limits: Mapping[str, float]


@dataclass(frozen=True)
class ResolvedStyle:
    """A Style as it is meant: each part has a value, and can be.

    `width` is that of the axes in inches, None where it follows from the labels; `time_range` is as
    it was given, for how long the runs take says whether it can be.
    """

    overlays: frozenset[str]
    palette: Palette
    axis_label: str | None
    time_range: tuple[float, float] | None
    width: float | None
    memory_limits: Mapping[str, float]


def resolve_style(style: Style) -> ResolvedStyle:
    """What a Style means.  Raises UsageError for one that cannot be."""
    axis = style.get("axis")
    if axis is not None:
        require_type(axis, str, '"time in ms"')
    return ResolvedStyle(
        _resolve_overlays(style.get("show", "lanes")),
        _resolve_palette(style),
        axis,
        style.get("time"),
        _resolve_width(style.get("width")),
        _resolve_memory_limits(style.get("limits", {})),
    )


def _resolve_overlays(show: str | Collection[str]) -> frozenset[str]:
    """The overlays that are asked for, between commas or in a collection."""
    if isinstance(show, str):
        show = [mark.strip() for mark in show.split(",") if mark.strip()]
    require_type(show, Collection, '"lanes,arrows"')
    for mark in show:
        if not isinstance(mark, str) or mark not in OVERLAYS:
            raise UsageError(f"a chart shows {', '.join(OVERLAYS)}, not {describe(mark)}")
    return frozenset(show)


def _resolve_memory_limits(value: object) -> Mapping[str, float]:
    """The limits that are asked for, by tier."""
    require_type(value, Mapping, '{"device": 40e9}')
    assert isinstance(value, Mapping)
    for tier, limit in value.items():
        if tier not in TIERS:
            raise UsageError(f"limits are of {', '.join(TIERS)}, not {describe(tier)}")
        size = to_float(limit)
        if size is None or not 0 < size < inf:
            raise UsageError(f"the limit of the {tier} is a number of bytes, not {describe(limit)}")
    return value


def _resolve_width(value: object) -> float | None:
    """The width of the axes, in inches, if one is asked for."""
    if isinstance(value, str) and value in PAPER_WIDTHS:
        return PAPER_WIDTHS[value] - LEFT_MARGIN - RIGHT_MARGIN
    if value is None:
        return None
    if isinstance(value, Real) and 0 < float(value) < inf:
        return float(value)
    raise UsageError(
        f"a width is a number of inches, or {' or '.join(PAPER_WIDTHS)}: {describe(value)}"
    )


def _resolve_palette(style: Style) -> Palette:
    """The palette that is asked for, with colours of its own for some kinds."""
    name, given, colours = style.get("palette", "plain"), {}, style.get("colours", {})
    if not isinstance(name, str) or name not in PALETTES:
        raise UsageError(f"a palette is {', '.join(PALETTES)}, not {describe(name)}")
    require_type(colours, Mapping, '{"F": "skyblue"}')
    for kind, colour in colours.items():
        if kind not in COLORED_KINDS:
            raise UsageError(
                f"what has a colour is {', '.join(COLORED_KINDS)}, not {describe(kind)}"
            )
        if not is_color_like(colour):
            raise UsageError(f"{kind} has no colour {describe(colour)}", hint="a name, or #4b3b8f")
        given[kind] = to_hex(colour)
    return recolor(PALETTES[name], given)
