"""Paint: a Sheet onto matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from schedir.ops import COMPUTE, ROWS, Lane, Opcode
from schedir.viz.palette import IDLE, LANE_NAMES, LANES, NAMES, colour, ink, received
from schedir.viz.sheet import Floats, Sheet

_SMALLEST, _LARGEST = 4.5, 9.0  # points, of a label
_MOST_LABELS = 12_000  # more than this nobody reads
_HATCH: Final[dict[str, Any]] = {
    "facecolor": "white",
    "edgecolor": IDLE,
    "hatch": "/////",
    "linewidth": 0.0,
}
_BAND: Final = "#f0f0f0"  # an empty communication lane


def paint(axes: Axes, sheet: Sheet, inches: float, row: float) -> None:
    """Draw all boxes and labels; `inches` are those of a unit of time, `row` of a lane."""
    _rectangles(axes, sheet.idle(), hatch_linewidth=0.5, **_HATCH)
    _rectangles(axes, sheet.bands(), facecolor=_BAND, linewidth=0.0)
    stages = sheet.timeline.program.plan.stages_per_rank
    kinds = len(Opcode)
    for which, edge in ((sheet.compute, 0.5), (sheet.talk, 0.0)):
        key, at = np.unique(sheet.local[which] * kinds + sheet.op[which], return_inverse=True)
        table = [colour(k % kinds, k // kinds, stages) for k in key.tolist()]
        faces = [table[k] for k in at.tolist()]
        thin = min(edge, sheet.narrow * inches * 72 / 8)  # an outline must not eat its box
        _rectangles(axes, sheet.quads(which), fc=faces, ec="white", linewidth=thin)
    _label(axes, sheet, inches, row, stages)


def _rectangles(axes: Axes, corners: Floats, **style: Any) -> None:
    axes.add_collection(PolyCollection(list(corners), **style))


def _label(axes: Axes, sheet: Sheet, inches: float, row: float, stages: int) -> None:
    """Letter and microbatch where they fit, and small below it the stage if ranks hold several."""
    points = inches * 72  # of a unit of time
    size = min(_LARGEST, 0.9 * sheet.narrow * points / sheet.label_width, 0.55 * row * 72)
    width = (sheet.right - sheet.left) * points
    fits = sheet.compute[width[sheet.compute] >= sheet.label_width * size]
    if size < _SMALLEST or len(fits) > _MOST_LABELS:
        return
    for k in fits.tolist():
        op, whole = int(sheet.op[k]), sheet.bottom[k] - sheet.top[k] > 0.75
        x, y = (sheet.left[k] + sheet.right[k]) / 2, (sheet.top[k] + sheet.bottom[k]) / 2
        under = stages > 1 and whole and op in COMPUTE
        dark = ink(colour(op, int(sheet.local[k]), stages))
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center_baseline",
            "color": dark,
            "clip_on": False,
        }
        fit = 1.0 if whole else min(1.0, 0.4 * row * 72 / size)
        axes.text(x, y - 0.15 * under, sheet.label(k), fontsize=size * fit, **style)
        if under:
            stage = f"s{sheet.timeline.spans['stage'][k]}"
            axes.text(x, y + 0.28, stage, fontsize=size * 0.62, **style)


def entries(sheets: Sequence[Sheet]) -> tuple[list[Any], list[str]]:
    """What the legend shows: handles and their names."""
    handles: list[tuple[Patch, ...]] = []  # of tuples matplotlib's types know nothing
    names: list[str] = []
    stages = max(s.timeline.program.plan.stages_per_rank for s in sheets)
    for op in sorted({op for s in sheets for op in s.present()}):
        shades = range(min(stages, 4) if op in COMPUTE else 1)
        handles.append(tuple(Patch(fc=colour(op, k, len(shades))) for k in shades))
        names.append(NAMES.get(op, ROWS[op].text))
    handles.append((Patch(lw=0.5, fc="white", ec=IDLE, hatch="//////"),))
    names.append("idle")
    for lane in sorted({lane for s in sheets for lane in s.lanes}):
        base = LANES[lane]
        pair = lane in (Lane.ACT, Lane.GRAD)
        handles.append((Patch(fc=received(base)), Patch(fc=base)) if pair else (Patch(fc=base),))
        names.append(LANE_NAMES[lane] + (" in, out" if pair else ""))
    return handles, names


def legend(figure: Figure, sheets: Sequence[Sheet], left: float, columns: int) -> None:
    """A legend at the foot of the figure; `left` is in inches."""
    handles, names = entries(sheets)
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
