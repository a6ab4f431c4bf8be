"""Draw a run as a small SVG without matplotlib."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.predict.timeline import Timeline
from schedir.viz.layout import ChartRectangles
from schedir.viz.palette import colour, ink, linear, written
from schedir.viz.time_bins import mixed

_WIDE: Final = 860.0  # pixels of the time axis; the picture shrinks with the page
_LEFT: Final = 56.0
_BOXES: Final = 3000  # more are mixed
_CELLS: Final = 100_000  # of a mixed picture
_LINES: Final = 5  # of its pixels for a rank, with the room below it
_TALL: Final = (20.0, 620.0)  # a row at most, and all together


def svg(timeline: Timeline) -> str:
    """The chart of a run: an SVG element of bounded size."""
    sheet = ChartRectangles(timeline, lanes=False)
    row = min(_TALL[0], _TALL[1] / sheet.height)
    high = sheet.height * row
    shapes = _boxes(sheet, row) if len(sheet.compute) <= _BOXES else _mixed(sheet, row)
    every = -(-10 // max(int(sheet.pitch * row), 1))
    names = "".join(
        f'<text x="{_LEFT - 6:g}" y="{(r * sheet.pitch + 0.5) * row + 4:.1f}" '
        f'text-anchor="end">rank {r}</text>'
        for r in range(0, timeline.ranks, every)
    )
    what = f"{timeline.program.name}, {timeline.caption}: bubble {timeline.bubble:.1%}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE:g} {high:.1f}" '
        f'width="{_LEFT + _WIDE:g}" style="max-width:100%;height:auto" role="img" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="currentColor">'
        f"<title>{escape(what)}</title>{names}{shapes}</svg>"
    )


def _rectangle(left: float, right: float, top: float, high: float, fill: str) -> str:
    return (
        f'<rect x="{_LEFT + left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
        f'height="{high:.1f}" {fill}/>'
    )


def _ground(sheet: ChartRectangles, row: float) -> str:
    pale = 'fill="currentColor" fill-opacity="0.08"'
    tops = (rank * sheet.pitch * row for rank in range(sheet.timeline.ranks))
    return "".join(_rectangle(0, _WIDE, top, row, pale) for top in tops)


def _boxes(sheet: ChartRectangles, row: float) -> str:
    scale = _WIDE / (sheet.timeline.span or 1.0)
    stages = sheet.timeline.program.shape.stages_per_rank
    shapes = [_ground(sheet, row)]
    for k in sheet.compute.tolist():
        left, right = sheet.left[k] * scale, sheet.right[k] * scale
        top, high = sheet.top[k] * row, (sheet.bottom[k] - sheet.top[k]) * row
        fill = colour(int(sheet.op[k]), int(sheet.local[k]), stages)
        gap = 0.8 if right - left > 3 else 0.0
        shapes.append(_rectangle(left, right - gap, top, high, f'fill="{written(fill)}"'))
        label = sheet.label(k)
        if high >= 12 and right - left > 6.8 * len(label) + 2:
            x = _LEFT + (left + right - gap) / 2
            shapes.append(
                f'<text x="{x:.1f}" y="{top + high / 2 + 4:.1f}" text-anchor="middle" '
                f'fill="{ink(fill)}">{label}</text>'
            )
    return "".join(shapes)


def _mixed(sheet: ChartRectangles, row: float) -> str:
    """All that is too small to be seen: one picture, a pixel wide for each two of the axis."""
    timeline = sheet.timeline
    stages = timeline.program.shape.stages_per_rank
    columns = max(min(int(_WIDE) // 2, _CELLS // timeline.ranks), 1)
    kinds, share = mixed(timeline, columns)
    cover = np.clip(share.sum(-1), 0, 1)
    light = np.array([linear(colour(op, local, stages)) for op, local in kinds])
    seen = np.clip(share @ light / np.maximum(cover, 1e-9)[..., None], 0, 1) ** (1 / 2.2)
    pixels = np.concatenate([seen, cover[..., None]], -1)
    high = sheet.pitch * row
    lines = np.zeros((timeline.ranks, _LINES, columns, 4), np.uint8)
    lines[:, : round(_LINES * row / high)] = np.rint(255 * pixels)[:, None]
    return _ground(sheet, row) + (
        f'<image x="{_LEFT:g}" y="0" width="{_WIDE:g}" height="{high * timeline.ranks:.1f}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{b64encode(_png(lines.reshape(-1, columns, 4))).decode()}"/>'
    )


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Red, green, blue and alpha, shape (rows, columns, 4), as PNG."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()
