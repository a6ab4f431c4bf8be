"""Draw the boxes, the labels and the legend of a Gantt chart."""

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

from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, Opcode
from schedir.viz.layout import BAND_HEIGHT, ChartRectangles, Floats
from schedir.viz.palette import (
    HATCHED_OPS,
    IDLE_COLOR,
    LANE_NAMES,
    OP_NAMES,
    TWO_WAY_LANES,
    UNSHARDED_LABEL,
    choose_box_color,
    choose_outline,
    choose_text_color,
    choose_unsharded_shade,
    lighten_incoming,
)
from schedir.viz.time_bins import bin_timeline

_MIN_FONT_SIZE, _MAX_FONT_SIZE = 4.5, 9.0  # points of a label
_COLUMNS_PER_INCH: Final = 200  # columns per inch of the image of a dense chart
_MIN_HATCHED_INCHES: Final = 0.05  # inches: shorter gaps of a dense chart are not hatched
_MAX_LABELS = 12_000  # more labels are not readable
_IDLE_STYLE: Final[dict[str, Any]] = {
    "facecolor": "white",
    "edgecolor": IDLE_COLOR,
    "hatch": "/////",
    "linewidth": 0.0,
}
_RECOMPUTE_HATCH: Final = "\\\\\\\\"  # idle time is hatched in the opposite direction
_EMPTY_LANE_COLOR: Final = "#f0f0f0"  # a communication lane without a transfer


def draw_boxes(
    axes: Axes,
    rectangles: ChartRectangles,
    inches_per_unit: float,
    row_height: float,
    *,
    is_dense: bool = False,
    has_background: bool = True,
) -> None:
    """Draw all boxes and labels of a chart.

    Args:
        axes: The axes, with their x limits set.
        rectangles: The rectangles of the chart.
        inches_per_unit: Inches per unit of time.
        row_height: The height of a compute lane, in inches.
        is_dense: True to draw an image per rank instead of boxes. A column of the image has the
            mean colour of the boxes in its interval of time.
        has_background: True to fill idle time with white. If False, the colour below remains
            visible.
    """
    idle = _IDLE_STYLE if has_background else _IDLE_STYLE | {"facecolor": "none"}
    gaps = rectangles.compute_idle_corners(
        min_gap=_MIN_HATCHED_INCHES / inches_per_unit if is_dense else 0.0
    )
    _add_rectangles(axes, gaps, hatch_linewidth=0.5, **idle)
    _add_rectangles(
        axes, rectangles.compute_lane_corners(), facecolor=_EMPTY_LANE_COLOR, linewidth=0.0
    )
    stages = rectangles.timeline.program.shape.stages_per_rank
    if is_dense:
        _draw_binned(axes, rectangles, inches_per_unit, stages)
        return
    kinds = len(Opcode)
    for indices, max_width in (
        (rectangles.compute_indices, 0.5),
        (rectangles.transfer_indices, 0.0),
    ):
        key, key_indices = np.unique(
            rectangles.local_stages[indices] * kinds + rectangles.op[indices], return_inverse=True
        )
        key_colors = [
            choose_box_color(k % kinds, k // kinds, stages, rectangles.palette)
            for k in key.tolist()
        ]
        faces = [key_colors[k] for k in key_indices.tolist()]
        edges = [choose_outline(face) for face in faces]
        # An outline is at most 1/8 of a short box, so that the box remains visible.
        line_width = min(max_width, rectangles.short_box_width * inches_per_unit * 72 / 8)
        _add_rectangles(
            axes, rectangles.compute_box_corners(indices), fc=faces, ec=edges, linewidth=line_width
        )
    hatched_indices = rectangles.compute_indices[
        np.isin(rectangles.op[rectangles.compute_indices], [*HATCHED_OPS])
    ]
    if len(hatched_indices):
        style = {"fc": "none", "ec": "white", "linewidth": 0.0, "hatch_linewidth": 0.6}
        _add_rectangles(
            axes, rectangles.compute_box_corners(hatched_indices), hatch=_RECOMPUTE_HATCH, **style
        )
    _draw_labels(axes, rectangles, inches_per_unit, row_height, stages)
    _draw_unsharded(axes, rectangles, inches_per_unit, row_height, stages)


def _draw_unsharded(
    axes: Axes, rectangles: ChartRectangles, inches_per_unit: float, row_height: float, stages: int
) -> None:
    """Draw a band for each stage while it is unsharded.

    If a rank has several stages, each band that is wide enough has the number of its stage.
    """
    if not rectangles.unsharded.row_count:
        return
    intervals = rectangles.unsharded
    size = min(0.9 * BAND_HEIGHT * row_height * 72, _MAX_FONT_SIZE)
    faces = [
        choose_unsharded_shade(local_stage, stages, rectangles.palette)
        for local_stage in intervals.local_stage.tolist()
    ]
    _add_rectangles(
        axes, rectangles.compute_unsharded_corners(), fc=faces, ec="white", linewidth=0.4
    )
    if stages == 1 or size < _MIN_FONT_SIZE:
        return
    for k, corners in enumerate(rectangles.compute_unsharded_corners()):
        (left, top), (right, bottom) = corners[0], corners[2]
        if (right - left) * inches_per_unit * 72 > 2 * size:
            axes.text(
                (left + right) / 2, (top + bottom) / 2, f"s{intervals.stage[k]}", fontsize=size,
                ha="center", va="center_baseline", color=choose_text_color(faces[k]), clip_on=True,
            )  # fmt: skip


def _draw_binned(
    axes: Axes, rectangles: ChartRectangles, inches_per_unit: float, stages: int
) -> None:
    """Draw an image per rank. The opacity of a column is the busy share of its time.

    The colour of a column is the mean colour of its boxes.
    """
    span = rectangles.timeline.span
    kinds, share = bin_timeline(
        rectangles.timeline, max(int(span * inches_per_unit * _COLUMNS_PER_INCH), 1)
    )
    kind_colors = [
        to_rgb(choose_box_color(op, local_stage, stages, rectangles.palette))
        for op, local_stage in kinds
    ]
    cover = share.sum(-1)
    image = np.empty((*cover.shape, 4))
    image[..., :3] = share @ np.array(kind_colors) / np.maximum(cover, 1e-12)[..., None]
    image[..., 3] = np.clip(cover, 0, 1)
    for rank, line in enumerate(np.clip(image, 0, 1)):
        top = rank * rectangles.pitch
        axes.imshow(line[None], extent=(0, span, top + 1, top), aspect="auto")


def _add_rectangles(axes: Axes, corners: Floats, **style: Any) -> None:
    axes.add_collection(PolyCollection(list(corners), **style))


def _draw_labels(
    axes: Axes, rectangles: ChartRectangles, inches_per_unit: float, row_height: float, stages: int
) -> None:
    """Write the letter and the microbatch on boxes, and the stage if a rank has several stages.

    If letters do not fit, only the microbatch is written, because the colour shows the instruction.
    Labels that do not fit are left out.
    """
    points = inches_per_unit * 72  # typographic points per unit of time
    label_width, available = (
        rectangles.label_width,
        0.9 * rectangles.short_box_width * points,
    )
    with_letter = available >= label_width * _MIN_FONT_SIZE
    if not with_letter:
        label_width = rectangles.number_width
        available = 0.95 * rectangles.short_box_width * points
    font_size = min(_MAX_FONT_SIZE, available / label_width, 0.55 * row_height * 72)
    low, high = axes.get_xlim()
    is_visible = (rectangles.left >= low) & (rectangles.right <= high)
    width = (rectangles.right - rectangles.left) * points * is_visible
    label_indices = rectangles.compute_indices[
        width[rectangles.compute_indices] >= label_width * font_size
    ]
    if font_size < _MIN_FONT_SIZE or len(label_indices) > _MAX_LABELS:
        return
    for k in label_indices.tolist():
        op, is_full_height = int(rectangles.op[k]), rectangles.bottom[k] - rectangles.top[k] > 0.75
        x = (rectangles.left[k] + rectangles.right[k]) / 2
        y = (rectangles.top[k] + rectangles.bottom[k]) / 2
        has_stage = stages > 1 and is_full_height and op in COMPUTE_OPS and with_letter
        text_color = choose_text_color(
            choose_box_color(op, int(rectangles.local_stages[k]), stages, rectangles.palette)
        )
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center_baseline",
            "color": text_color,
            "clip_on": False,
        }
        scale = 1.0 if is_full_height else min(1.0, 0.4 * row_height * 72 / font_size)
        axes.text(
            x,
            y - 0.15 * has_stage,
            rectangles.format_label(k, with_letter=with_letter),
            fontsize=font_size * scale,
            **style,
        )
        if has_stage:
            stage = f"s{rectangles.timeline.spans['stage'][k]}"
            axes.text(x, y + 0.28, stage, fontsize=font_size * 0.62, **style)


def list_legend_entries(
    chart_rectangles: Sequence[ChartRectangles], extra_colors: dict[str, str]
) -> tuple[list[Any], list[str]]:
    """Return the legend entries of some charts.

    Args:
        chart_rectangles: The rectangles of each chart.
        extra_colors: Further entries, with their colours.

    Returns:
        The handles, each a tuple of patches, and their names.
    """
    handles: list[tuple[Patch, ...]] = []  # matplotlib's types do not allow tuples
    names: list[str] = []
    stages = max(s.timeline.program.shape.stages_per_rank for s in chart_rectangles)
    palette = chart_rectangles[0].palette
    ops_by_fills: dict[tuple[Any, ...], list[Opcode]] = {}  # opcodes of one colour share an entry
    for op in sorted({op for s in chart_rectangles for op in s.list_compute_ops()}):
        shades = range(min(stages, 4) if op in COMPUTE_OPS else 1)
        fills = tuple(choose_box_color(op, k, len(shades), palette) for k in shades)
        ops_by_fills.setdefault(fills, []).append(Opcode(op))
    for fills, ops in ops_by_fills.items():
        hatch = _RECOMPUTE_HATCH if ops[0] in HATCHED_OPS else ""
        handles.append(tuple(_make_swatch(fill, hatch) for fill in fills))
        texts = dict.fromkeys(INSTRUCTIONS[op].text.partition("_")[0] for op in ops)
        names.append(OP_NAMES[ops[0]] if ops[0] in OP_NAMES else ", ".join(texts))
    handles.append((Patch(lw=0.5, fc="white", ec=IDLE_COLOR, hatch="//////"),))
    names.append("idle")
    for lane in sorted({lane for s in chart_rectangles for lane in s.lanes}):
        base = palette.lane_colors[lane]
        is_two_way = lane in TWO_WAY_LANES
        handles.append(
            (Patch(fc=lighten_incoming(base)), Patch(fc=base)) if is_two_way else (Patch(fc=base),)
        )
        names.append(LANE_NAMES[lane] + (" in, out" if is_two_way else ""))
    if unsharded_stages := [
        s.unsharded.local_stage for s in chart_rectangles if s.unsharded.row_count
    ]:
        shades = range(min(int(max(map(max, unsharded_stages))) + 1, 4))
        handles.append(
            tuple(_make_swatch(choose_unsharded_shade(k, len(shades), palette), "") for k in shades)
        )
        names.append(UNSHARDED_LABEL)
    for name, color in extra_colors.items():
        handles.append((Patch(fc=color),))
        names.append(name)
    return handles, names


def _make_swatch(fill: Any, hatch: str) -> Patch:
    edge = choose_outline(fill)
    if hatch:
        return Patch(fc=fill, ec="white", lw=0.0, hatch=hatch)
    return Patch(fc=fill) if edge == "white" else Patch(fc=fill, ec=edge, lw=0.5)


def add_legend(
    figure: Figure,
    chart_rectangles: Sequence[ChartRectangles],
    left_margin: float,
    columns: int,
    extra_colors: dict[str, str],
) -> None:
    """Add a legend at the bottom of a figure.

    Args:
        figure: The figure.
        chart_rectangles: The rectangles of each chart.
        left_margin: The left edge of the legend, in inches.
        columns: The number of columns.
        extra_colors: Further entries, with their colours.
    """
    handles, names = list_legend_entries(chart_rectangles, extra_colors)
    figure.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(left_margin / figure.get_figwidth(), 0.03 / figure.get_figheight()),
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
