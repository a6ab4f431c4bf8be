"""Draw a run as text on a terminal."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final, NamedTuple

import numpy as np

from schedir.analysis.memory.footprint import find_used_tiers
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, Lane
from schedir.predict.timeline import Timeline, require_timeline
from schedir.viz.layout import ChartRectangles
from schedir.viz.palette import choose_box_color, choose_text_color, format_hex
from schedir.viz.time_bins import bin_timeline, find_local_stages

StyledText = tuple[str, str]  # a text and its style for rich: "black on #7cc4ee", or ""
StyledLine = list[StyledText]

_MAX_RANKS: Final = 40  # with more ranks, only every k-th rank is shown
_MAX_LINES: Final = 60  # lines of a chart with several rows
_MAX_ROWS: Final = 6  # rows of a chart; each row shows a part of the time
_IDLE_CELL: Final = (".", "bright_black")


def text_chart(timeline: Timeline, width: int = 80) -> list[StyledLine]:
    """Return a text chart of a run, for a terminal of a given width.

    A box has the letter and the microbatch of its instruction. The number of ' characters after the
    microbatch is the local stage. A run that is too long for one row continues in further rows
    below. If there would be too many rows, the chart has only one row. Each column of this row has
    the letter of the instruction that takes most of the column's time, or a dot if the rank is
    mostly idle then.

    To the right of each rank are its idle share and its peak of activations in flight. If the
    program offloads, the peaks on the host and the disk follow.

    Args:
        timeline: The run.
        width: The width in characters.

    Returns:
        The lines. Each is a list of (text, style) pairs.

    Example:
        >>> import schedir
        >>> run = schedir.simulate(schedir.compile(schedir.schedules.zb_h1,
        ...     schedir.PipelineShape(2, 4)))
        >>> for line in schedir.viz.text_chart(run, width=60):
        ...     print("".join(text for text, style in line))
        zb_h1, predicted: span 13, bubble 7.7%
                                                         idle  peak
        rank 0 F0 F1 ...I0 W0 F2 I1 W1 F3 I2 W2 I3 W3    7.7%     2
        rank 1 ...F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3    7.7%     2
    """
    require_timeline(timeline, "timeline")
    rank_step = ceil(timeline.ranks / _MAX_RANKS)
    ranks = range(0, timeline.ranks, rank_step)
    name_width = len(f"rank {timeline.ranks - 1} ")
    lower_peaks = {
        tier: _find_tier_peaks(timeline, tier) for tier in find_used_tiers(timeline.program)[1:]
    }
    peaks_by_tier = {
        tier: tier_peaks for tier, tier_peaks in lower_peaks.items() if any(tier_peaks)
    }
    boxes_width = max(width - name_width - 13 - 6 * len(peaks_by_tier), 10)
    layout = _lay_out_columns(timeline, len(ranks), boxes_width)
    draw = _draw_boxes if layout.has_boxes else _draw_binned
    rows = draw(timeline, ranks, layout.total_columns)

    shape, unit = timeline.program.shape, timeline.unit and f" {timeline.unit}"
    fact = f"{timeline.caption}: span {timeline.span:.6g}{unit}, bubble {timeline.bubble:.1%}"
    lines: list[StyledLine] = [[(timeline.program.name, "bold"), (f", {fact}", "")]]
    share = timeline.idle / (timeline.span or 1.0)
    for chart_row in range(layout.row_count):
        begin, is_last = chart_row * layout.columns_per_row, chart_row == layout.row_count - 1
        if is_last:  # only the last row has the idle shares and the peaks
            padding = " " * (name_width + layout.total_columns - begin)
            names = "".join(f"{tier:>6}" for tier in ("peak", *peaks_by_tier))
            lines.append([(f"{padding}   idle{names}", "bright_black")])
        elif chart_row:
            lines.append([])
        for rank, row in zip(ranks, rows, strict=True):
            figures = ""
            if is_last:
                peaks = [
                    timeline.peak_in_flight[rank],
                    *(tier_peaks[rank] for tier_peaks in peaks_by_tier.values()),
                ]
                figures = f" {share[rank]:6.1%}{''.join(f'{peak:6}' for peak in peaks)}"
            boxes = _merge_cells(row[begin : begin + layout.columns_per_row])
            lines.append([(f"{f'rank {rank}':<{name_width}}", ""), *boxes, (figures, "")])
    if rank_step > 1:
        lines.append(
            [(f"one of every {rank_step} of the {timeline.ranks} ranks is shown", "bright_black")]
        )
    if not layout.has_boxes:
        lines.append([(f"{shape.microbatches} microbatches; a column shows its main instruction",
                       "bright_black")])  # fmt: skip
    return lines


def _find_tier_peaks(timeline: Timeline, tier: str) -> list[int]:
    """Return for each rank the peak number of (stage, mb) pairs with a value on a tier."""
    unit_timeline = replace(timeline, sizes=Sizes(saved=1, recompute_inputs=1))
    return [round(float(curve.total.max())) for curve in unit_timeline.memory_on(tier)]


class _ColumnLayout(NamedTuple):
    """The division of a run into rows of columns.

    `total_columns` counts the columns of all rows. If boxes do not fit, `has_boxes` is False, and
    one row shows the main instruction of each column.
    """

    total_columns: int
    columns_per_row: int
    row_count: int
    has_boxes: bool


def _lay_out_columns(timeline: Timeline, rank_count: int, columns: int) -> _ColumnLayout:
    """Divide a run into rows, each with about `columns` columns and `rank_count` lines."""
    label, short_width = _measure_longest_label(timeline), ChartRectangles(timeline).short_box_width
    needed = timeline.span / short_width * (label + 1) if timeline.span else 0.0
    needed = min(needed, float(_MAX_ROWS * columns + 1))  # ceil needs a finite number
    if needed * label <= columns * (label + 1):  # one row suffices without gaps between boxes
        needed = min(needed, columns)
    row_count = max(1, ceil(needed / columns))
    if row_count > min(_MAX_ROWS, max(1, _MAX_LINES // (rank_count + 1))):
        return _ColumnLayout(columns, columns, 1, has_boxes=False)
    total_columns = columns * row_count
    cells = int(total_columns * short_width / (timeline.span or 1.0) + 1e-9)
    if cells and _has_even_boxes(timeline, short_width):
        # Boxes of equal time get equal widths, and no row ends within a short box.
        total_columns = round(timeline.span / short_width) * cells
        columns = ceil(total_columns / row_count / cells) * cells
    return _ColumnLayout(total_columns, columns, row_count, has_boxes=True)


def _measure_longest_label(timeline: Timeline) -> int:
    shape = timeline.program.shape
    return 1 + len(str(shape.microbatches - 1)) + shape.stages_per_rank - 1


def _has_even_boxes(timeline: Timeline, short_box_width: float) -> bool:
    """Return whether the times of all boxes and of the run are multiples of `short_box_width`."""
    spans = timeline.spans[timeline.spans["lane"] == Lane.COMPUTE]
    times = np.append(spans["end"] - spans["start"], timeline.span) / short_box_width
    return bool(np.abs(times - np.round(times)).max() < 1e-6)


def _choose_style(op: int, local_stage: int, stages: int) -> str:
    fill = choose_box_color(op, local_stage, stages)
    return f"{choose_text_color(fill)} on {format_hex(fill)}"


def _merge_cells(cells: list[StyledText]) -> StyledLine:
    line: StyledLine = []
    for text, style in cells:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line


def _draw_boxes(timeline: Timeline, ranks: range, columns: int) -> list[list[StyledText]]:
    """Return a cell per rank and column: the label of each box, then dashes, then a space."""
    spans, is_second = timeline.spans, timeline.is_second_of_pair
    local_stages = find_local_stages(timeline)
    scale = columns / (timeline.span or 1.0)
    stages = timeline.program.shape.stages_per_rank
    rows = []
    for rank in ranks:
        row = [_IDLE_CELL] * columns
        begin, end = timeline.program.offsets[rank : rank + 2].tolist()
        for k in range(begin, end):
            s = spans[k]
            if s["lane"] != Lane.COMPUTE or s["end"] <= s["start"]:
                continue
            a, b = (
                round(float(s[field] - timeline.start_time) * scale) for field in ("start", "end")
            )
            if is_second[k]:
                a += (b - a) // 2
            text = INSTRUCTIONS[s["op"]].text
            if s["op"] in COMPUTE_OPS:
                text += f"{s['mb']}{chr(39) * int(local_stages[k])}"
            text = f"{text[: b - a]:-<{max(b - a - 1, 0)}}"[: b - a]
            style = _choose_style(int(s["op"]), int(local_stages[k]), stages)
            cells = [(letter, style) for letter in text] + [(" ", "")] * (b - a - len(text))
            row[a:b] = cells
        rows.append(row[:columns])
    return rows


def _draw_binned(timeline: Timeline, ranks: range, columns: int) -> list[list[StyledText]]:
    """Return a cell per rank and column: the letter of the instruction that takes most time."""
    stages, (kinds, share) = timeline.program.shape.stages_per_rank, bin_timeline(timeline, columns)
    idle_share, main_kind = 1 - share.sum(-1), share.argmax(-1)
    table = [
        (INSTRUCTIONS[op].text[0], _choose_style(op, local_stage, stages))
        for op, local_stage in kinds
    ]
    return [
        [
            _IDLE_CELL if idle_share[rank, c] > 0.5 else table[main_kind[rank, c]]
            for c in range(columns)
        ]
        for rank in ranks
    ]
