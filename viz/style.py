"""Style: the options for the appearance of a chart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Final, TypedDict

from matplotlib.colors import is_color_like, to_hex

from schedir.errors import UsageError, describe, require_type, to_float
from schedir.ir.isa.instructions import TIERS
from schedir.retired_names import suggest_name
from schedir.viz.figures.overlays import OVERLAYS
from schedir.viz.palette import COLORED_KINDS, PALETTES, Palette, recolor

LEFT_MARGIN, RIGHT_MARGIN = 0.62, 0.12  # inches to the left and right of the axes
PAPER_WIDTHS: Final = {"column": 3.35, "page": 7.0}  # inches of a figure in a journal


class Style(TypedDict, total=False):
    """The options for the appearance of a chart.

    Attributes:
        width: The width of the axes in inches. "column" and "page" give a figure of 3.35 and 7
            inches, as in a paper. By default the labels decide the width, within limits.
        show: The overlays, as a collection of names, or a text with names separated by commas. The
            default is "lanes". `schedir.viz.figures.overlays.OVERLAYS` describes all overlays:
            "lanes" for communication lanes, "arrows" for messages, "path" for the critical path,
            "in_flight" and "memory" for curves below each rank, "phases" for shaded warmup and
            cooldown.
        palette: A name in `schedir.viz.palette.PALETTES`. "plain" is for colour-blind readers and
            grey prints. "grey" has only shades of grey. "bright" has the colours of Okabe and Ito.
        colors: Other colours for some of F, B, I, W, R, step, and the communication lanes such as
            act, grad, tp and dp. All colours that matplotlib accepts are possible.
        axis_label: The label of the time axis. "none" removes the label and the numbers.
        time_range: The start and end of the part to draw, in the unit of the runs. 0 is the start
            of a run.
        memory_limits: The memory limit of a rank on each tier, in bytes, such as
            {"device": 40e9, "host": 256e9}. A line marks each limit on the memory curve of its
            tier.

    Example:
        >>> import schedir
        >>> paper = schedir.viz.Style(
        ...     width="column", palette="grey", show="path", axis_label="time in ms"
        ... )
        >>> run = schedir.simulate(schedir.compile(schedir.schedules.zb_h1,
        ...     schedir.PipelineShape(4, 8)))
        >>> f"{schedir.viz.gantt(run, **paper).get_figwidth():g} inches"
        '3.35 inches'
    """

    width: float | str | None
    show: str | Collection[str]
    palette: str
    colors: Mapping[str, str]
    axis_label: str | None
    time_range: tuple[float, float] | None
    memory_limits: Mapping[str, float]


@dataclass(frozen=True)
class ResolvedStyle:
    """A validated Style with a value for each option.

    Args:
        overlays: The overlays to draw.
        palette: The palette, with the colours of the user.
        axis_label: The label of the time axis. None means the unit of time, and "none" removes the
            axis.
        time_range: The start and end of the part to draw, as the user gave them. `lay_out`
            validates them, because the part must overlap the runs. None means the complete runs.
        width: The width of the axes in inches. None means that the width follows from the labels.
        memory_limits: The memory limit on each tier, in bytes.
    """

    overlays: frozenset[str]
    palette: Palette
    axis_label: str | None
    time_range: tuple[float, float] | None
    width: float | None
    memory_limits: Mapping[str, float]


def resolve_style(style: Style) -> ResolvedStyle:
    """Validate a Style and fill in its defaults.

    Args:
        style: The style.

    Raises:
        UsageError: An option is unknown or invalid.
    """
    for name in style.keys() - Style.__annotations__.keys():
        hint = suggest_name(name, Style.__annotations__) or "schedir.viz.Style lists all options"
        raise UsageError(f"a chart has no option {name!r}", hint=hint, fields=[name])
    axis_label = style.get("axis_label")
    if axis_label is not None:
        require_type(axis_label, "axis_label", str, '"time in ms"')
    return ResolvedStyle(
        _resolve_overlays(style.get("show", "lanes")),
        _resolve_palette(style),
        axis_label,
        style.get("time_range"),
        _resolve_width(style.get("width")),
        _resolve_memory_limits(style.get("memory_limits", {})),
    )


def _resolve_overlays(show: str | Collection[str]) -> frozenset[str]:
    """Return the names of the overlays, from a collection or a text separated by commas."""
    if isinstance(show, str):
        show = [name.strip() for name in show.split(",") if name.strip()]
    require_type(show, "show", Collection, '"lanes,arrows"')
    for name in show:
        if not isinstance(name, str) or name not in OVERLAYS:
            raise UsageError(
                f"show must contain only {', '.join(OVERLAYS)}, not {describe(name)}",
                hint="such as lanes,arrows",
            )
    return frozenset(show)


def _resolve_memory_limits(value: object) -> Mapping[str, float]:
    require_type(value, "memory_limits", Mapping, '{"device": 40e9}')
    assert isinstance(value, Mapping)
    for tier, limit in value.items():
        if tier not in TIERS:
            raise UsageError(
                f"memory_limits has the tier {describe(tier)}, but the tiers are {', '.join(TIERS)}"
            )
        size = to_float(limit)
        if size is None or not 0 < size < inf:
            raise UsageError(
                f"the limit of the {tier} must be a number of bytes above 0, not {describe(limit)}"
            )
    return value


def _resolve_width(value: object) -> float | None:
    if isinstance(value, str) and value in PAPER_WIDTHS:
        return PAPER_WIDTHS[value] - LEFT_MARGIN - RIGHT_MARGIN
    if value is None:
        return None
    if isinstance(value, Real) and 0 < float(value) < inf:
        return float(value)
    raise UsageError(
        f"width must be a number (inches), {' or '.join(map(repr, PAPER_WIDTHS))}, not "
        f"{describe(value)}"
    )


def _resolve_palette(style: Style) -> Palette:
    """Return the palette with the colours of the user."""
    name = style.get("palette", "plain")
    hex_colors = {}
    colors = style.get("colors", {})
    if not isinstance(name, str) or name not in PALETTES:
        raise UsageError(f"palette must be {' or '.join(PALETTES)}, not {describe(name)}")
    require_type(colors, "colors", Mapping, '{"F": "skyblue"}')
    for kind, colour in colors.items():
        if kind not in COLORED_KINDS:
            raise UsageError(
                f"colors has the name {describe(kind)}, but the names are "
                f"{', '.join(COLORED_KINDS)}"
            )
        if not is_color_like(colour):
            raise UsageError(
                f"the colour of {kind} is invalid: {describe(colour)}", hint="skyblue, or #4b3b8f"
            )
        hex_colors[kind] = to_hex(colour)
    return recolor(PALETTES[name], hex_colors)
