"""Render a chart on matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from schedir.ir.isa.instructions import COMPUTE, ROWS, Opcode
from schedir.viz.layout import BAND, ChartRectangles, Floats
from schedir.viz.palette import (
    BOTH_WAYS,
    HATCHED,
    IDLE,
    LANE_NAMES,
    NAMES,
    WHOLE,
    colour,
    ink,
    outline,
    received,
    whole_shade,
)
from schedir.viz.time_bins import mixed

_SMALLEST, _LARGEST = 4.5, 9.0  # points, of a label
_COLUMNS: Final = 200  # of a mixed image, per inch
_HATCHED: Final = 0.05  # inches: shorter gaps of a mixed image are not hatched
_MOST_LABELS = 12_000  # more than this nobody reads
_HATCH: Final[dict[str, Any]] = {
    "facecolor": "white",
    "edgecolor": IDLE,
    "hatch": "/////",
    "linewidth": 0.0,
}
_AGAIN: Final = "\\\\\\\\"  # the other way than what is idle
_BAND: Final = "#f0f0f0"  # an empty communication lane


def render(
    axes: Axes,
    sheet: ChartRectangles,
    inches: float,
    row: float,
    *,
    dense: bool = False,
    ground: bool = True,
) -> None:
    """Draw all boxes and labels; `inches` are those of a unit of time, `row` of a lane.

    With `dense`, boxes are mixed to what they are seen as from afar.  Without `ground`, what is
    under idle time shows.
    """
    idle = _HATCH if ground else _HATCH | {"facecolor": "none"}
    gaps = sheet.idle(least=_HATCHED / inches if dense else 0.0)
    _rectangles(axes, gaps, hatch_linewidth=0.5, **idle)
    _rectangles(axes, sheet.bands(), facecolor=_BAND, linewidth=0.0)
    stages = sheet.timeline.program.shape.stages_per_rank
    if dense:
        _mix(axes, sheet, inches, stages)
        return
    kinds = len(Opcode)
    for which, edge in ((sheet.compute, 0.5), (sheet.talk, 0.0)):
        key, at = np.unique(sheet.local[which] * kinds + sheet.op[which], return_inverse=True)
        table = [colour(k % kinds, k // kinds, stages, sheet.palette) for k in key.tolist()]
        faces = [table[k] for k in at.tolist()]
        edges = [outline(face) for face in faces]
        thin = min(edge, sheet.narrow * inches * 72 / 8)  # an outline must not eat its box
        _rectangles(axes, sheet.quads(which), fc=faces, ec=edges, linewidth=thin)
    again = sheet.compute[np.isin(sheet.op[sheet.compute], [*HATCHED])]
    if len(again):
        look = {"fc": "none", "ec": "white", "linewidth": 0.0, "hatch_linewidth": 0.6}
        _rectangles(axes, sheet.quads(again), hatch=_AGAIN, **look)
    _label(axes, sheet, inches, row, stages)
    _whole(axes, sheet, inches, row, stages)


def _whole(axes: Axes, sheet: ChartRectangles, inches: float, row: float, stages: int) -> None:
    """A band for each stage while its weights are whole; its number, where ranks hold several."""
    if not sheet.whole.rows:
        return
    of, size = sheet.whole, min(0.9 * BAND * row * 72, _LARGEST)
    faces = [whole_shade(local, stages, sheet.palette) for local in of.local.tolist()]
    _rectangles(axes, sheet.wholes(), fc=faces, ec="white", linewidth=0.4)
    if stages == 1 or size < _SMALLEST:
        return
    for k, corners in enumerate(sheet.wholes()):
        (left, top), (right, bottom) = corners[0], corners[2]
        if (right - left) * inches * 72 > 2 * size:
            axes.text(
                (left + right) / 2, (top + bottom) / 2, f"s{of.stage[k]}", fontsize=size,
                ha="center", va="center_baseline", color=ink(faces[k]), clip_on=True,
            )  # fmt: skip


def _mix(axes: Axes, sheet: ChartRectangles, inches: float, stages: int) -> None:
    """An image per rank: in each column the mean colour of what runs, over what is idle."""
    span = sheet.timeline.span
    kinds, share = mixed(sheet.timeline, max(int(span * inches * _COLUMNS), 1))
    table = [to_rgb(colour(op, local, stages, sheet.palette)) for op, local in kinds]
    cover = share.sum(-1)
    image = np.empty((*cover.shape, 4))
    image[..., :3] = share @ np.array(table) / np.maximum(cover, 1e-12)[..., None]
    image[..., 3] = np.clip(cover, 0, 1)
    for rank, line in enumerate(np.clip(image, 0, 1)):
        top = rank * sheet.pitch
        axes.imshow(line[None], extent=(0, span, top + 1, top), aspect="auto")


def _rectangles(axes: Axes, corners: Floats, **style: Any) -> None:
    axes.add_collection(PolyCollection(list(corners), **style))


def _label(axes: Axes, sheet: ChartRectangles, inches: float, row: float, stages: int) -> None:
    """Letter and microbatch where they fit, and small below it the stage if ranks hold several.

    Where no letter fits, the microbatch alone: what it is of, its colour tells.
    """
    points = inches * 72  # of a unit of time
    wide, room = sheet.label_width, 0.9 * sheet.narrow * points
    letter = room >= wide * _SMALLEST
    if not letter:
        wide, room = sheet.number_width, 0.95 * sheet.narrow * points
    size = min(_LARGEST, room / wide, 0.55 * row * 72)
    lo, hi = axes.get_xlim()
    seen = (sheet.left >= lo) & (sheet.right <= hi)
    width = (sheet.right - sheet.left) * points * seen
    fits = sheet.compute[width[sheet.compute] >= wide * size]
    if size < _SMALLEST or len(fits) > _MOST_LABELS:
        return
    for k in fits.tolist():
        op, whole = int(sheet.op[k]), sheet.bottom[k] - sheet.top[k] > 0.75
        x, y = (sheet.left[k] + sheet.right[k]) / 2, (sheet.top[k] + sheet.bottom[k]) / 2
        under = stages > 1 and whole and op in COMPUTE and letter
        dark = ink(colour(op, int(sheet.local[k]), stages, sheet.palette))
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center_baseline",
            "color": dark,
            "clip_on": False,
        }
        fit = 1.0 if whole else min(1.0, 0.4 * row * 72 / size)
        axes.text(x, y - 0.15 * under, sheet.label(k, letter=letter), fontsize=size * fit, **style)
        if under:
            stage = f"s{sheet.timeline.spans['stage'][k]}"
            axes.text(x, y + 0.28, stage, fontsize=size * 0.62, **style)


def entries(
    sheets: Sequence[ChartRectangles], extra: dict[str, str]
) -> tuple[list[Any], list[str]]:
    """What the legend shows: handles and their names; `extra` names have a colour each."""
    handles: list[tuple[Patch, ...]] = []  # of tuples matplotlib's types know nothing
    names: list[str] = []
    stages = max(s.timeline.program.shape.stages_per_rank for s in sheets)
    palette = sheets[0].palette
    alike: dict[tuple[Any, ...], list[Opcode]] = {}  # what bears one colour has one entry
    for op in sorted({op for s in sheets for op in s.present()}):
        shades = range(min(stages, 4) if op in COMPUTE else 1)
        fills = tuple(colour(op, k, len(shades), palette) for k in shades)
        alike.setdefault(fills, []).append(Opcode(op))
    for fills, ops in alike.items():
        hatch = _AGAIN if ops[0] in HATCHED else ""
        handles.append(tuple(_swatch(fill, hatch) for fill in fills))
        brief = dict.fromkeys(ROWS[op].text.partition("_")[0] for op in ops)
        names.append(NAMES[ops[0]] if ops[0] in NAMES else ", ".join(brief))
    handles.append((Patch(lw=0.5, fc="white", ec=IDLE, hatch="//////"),))
    names.append("idle")
    for lane in sorted({lane for s in sheets for lane in s.lanes}):
        base = palette.lanes[lane]
        pair = lane in BOTH_WAYS
        handles.append((Patch(fc=received(base)), Patch(fc=base)) if pair else (Patch(fc=base),))
        names.append(LANE_NAMES[lane] + (" in, out" if pair else ""))
    if own := [s.whole.local for s in sheets if s.whole.rows]:
        shades = range(min(int(max(map(max, own))) + 1, 4))
        handles.append(tuple(_swatch(whole_shade(k, len(shades), palette), "") for k in shades))
        names.append(WHOLE)
    for name, shaded in extra.items():
        handles.append((Patch(fc=shaded),))
        names.append(name)
    return handles, names


def _swatch(fill: Any, hatch: str) -> Patch:
    edge = outline(fill)
    if hatch:
        return Patch(fc=fill, ec="white", lw=0.0, hatch=hatch)
    return Patch(fc=fill) if edge == "white" else Patch(fc=fill, ec=edge, lw=0.5)


def legend(
    figure: Figure,
    sheets: Sequence[ChartRectangles],
    left: float,
    columns: int,
    extra: dict[str, str],
) -> None:
    """A legend at the foot of the figure; `left` is in inches."""
    handles, names = entries(sheets, extra)
    figure.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(left / figure.get_figwidth(), 0.03 / figure.get_figheight()),
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.6,
        handleheight=0.9,
        columnspacing=1.2,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
