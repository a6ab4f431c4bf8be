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
from schedir.viz.palette import choose_box_color, choose_text_color, format_hex, to_linear_light
from schedir.viz.time_bins import bin_timeline

_AXIS_WIDTH: Final = 860.0  # pixels of the time axis; a narrower page shrinks the picture
_LEFT_MARGIN: Final = 56.0  # pixels
_MAX_BOXES: Final = 3000  # a run with more boxes is drawn as an image of mean colours
_MAX_PIXELS: Final = 100_000  # ranks x columns of such an image
_PIXELS_PER_RANK: Final = 5  # rows of the image for a rank, with the gap below it
_MAX_HEIGHTS: Final = (20.0, 620.0)  # pixels of a row, and of all rows


def draw_thumbnail(timeline: Timeline) -> str:
    """Return the chart of a run as an SVG element of bounded size.

    Args:
        timeline: The run.
    """
    rectangles = ChartRectangles(timeline, lanes=False)
    row_height = min(_MAX_HEIGHTS[0], _MAX_HEIGHTS[1] / rectangles.height)
    height = rectangles.height * row_height
    shapes = (
        _draw_boxes(rectangles, row_height)
        if len(rectangles.compute_indices) <= _MAX_BOXES
        else _draw_binned(rectangles, row_height)
    )
    rank_step = -(-10 // max(int(rectangles.pitch * row_height), 1))
    names = "".join(
        f'<text x="{_LEFT_MARGIN - 6:g}" y="{(r * rectangles.pitch + 0.5) * row_height + 4:.1f}" '
        f'text-anchor="end">rank {r}</text>'
        for r in range(0, timeline.ranks, rank_step)
    )
    title = f"{timeline.program.name}, {timeline.caption}: bubble {timeline.bubble:.1%}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {_LEFT_MARGIN + _AXIS_WIDTH:g} {height:.1f}" '
        f'width="{_LEFT_MARGIN + _AXIS_WIDTH:g}" style="max-width:100%;height:auto" role="img" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="currentColor">'
        f"<title>{escape(title)}</title>{names}{shapes}</svg>"
    )


def _format_rectangle(left: float, right: float, top: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{_LEFT_MARGIN + left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
        f'height="{height:.1f}" {fill}/>'
    )


def _draw_background(rectangles: ChartRectangles, row_height: float) -> str:
    fill = 'fill="currentColor" fill-opacity="0.08"'
    tops = (rank * rectangles.pitch * row_height for rank in range(rectangles.timeline.ranks))
    return "".join(_format_rectangle(0, _AXIS_WIDTH, top, row_height, fill) for top in tops)


def _draw_boxes(rectangles: ChartRectangles, row_height: float) -> str:
    scale = _AXIS_WIDTH / (rectangles.timeline.span or 1.0)
    stages = rectangles.timeline.program.shape.stages_per_rank
    shapes = [_draw_background(rectangles, row_height)]
    for k in rectangles.compute_indices.tolist():
        left = rectangles.left[k] * scale
        right = rectangles.right[k] * scale
        top = rectangles.top[k] * row_height
        height = (rectangles.bottom[k] - rectangles.top[k]) * row_height
        fill = choose_box_color(int(rectangles.op[k]), int(rectangles.local_stages[k]), stages)
        gap = 0.8 if right - left > 3 else 0.0
        shapes.append(
            _format_rectangle(left, right - gap, top, height, f'fill="{format_hex(fill)}"')
        )
        label = rectangles.format_label(k)
        if height >= 12 and right - left > 6.8 * len(label) + 2:
            x = _LEFT_MARGIN + (left + right - gap) / 2
            shapes.append(
                f'<text x="{x:.1f}" y="{top + height / 2 + 4:.1f}" text-anchor="middle" '
                f'fill="{choose_text_color(fill)}">{label}</text>'
            )
    return "".join(shapes)


def _draw_binned(rectangles: ChartRectangles, row_height: float) -> str:
    """Return an image of mean colours, with at most one column for two pixels of the axis."""
    timeline = rectangles.timeline
    stages = timeline.program.shape.stages_per_rank
    columns = max(min(int(_AXIS_WIDTH) // 2, _MAX_PIXELS // timeline.ranks), 1)
    kinds, share = bin_timeline(timeline, columns)
    cover = np.clip(share.sum(-1), 0, 1)
    linear_colors = np.array(
        [to_linear_light(choose_box_color(op, stage, stages)) for op, stage in kinds]
    )
    mean_colors = np.clip(share @ linear_colors / np.maximum(cover, 1e-9)[..., None], 0, 1) ** (
        1 / 2.2
    )
    pixels = np.concatenate([mean_colors, cover[..., None]], -1)
    rank_height = rectangles.pitch * row_height
    lines = np.zeros((timeline.ranks, _PIXELS_PER_RANK, columns, 4), np.uint8)
    lines[:, : round(_PIXELS_PER_RANK * row_height / rank_height)] = np.rint(255 * pixels)[:, None]
    png = _encode_png(lines.reshape(-1, columns, 4))
    return _draw_background(rectangles, row_height) + (
        f'<image x="{_LEFT_MARGIN:g}" y="0" width="{_AXIS_WIDTH:g}" '
        f'height="{rank_height * timeline.ranks:.1f}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{b64encode(png).decode()}"/>'
    )


def _encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode red, green, blue and alpha as PNG, shape (rows, columns, 4)."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()
