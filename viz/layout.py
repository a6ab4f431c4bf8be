"""Compute the rectangles of a chart from a Timeline, before anything is drawn."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    INSTRUCTIONS,
    SEND_OPS,
    TRANSFER_OPS,
    Lane,
    Opcode,
)
from schedir.predict.timeline import Timeline
from schedir.viz.palette import LIGHT_PALETTE, Palette
from schedir.viz.time_bins import UnshardedIntervals, find_local_stages, find_unsharded_intervals

Floats = NDArray[np.float64]

# Heights, where the height of a compute lane is 1.
LANE_HEIGHT: Final = 0.24  # A communication lane.
LANE_INSET: Final = 0.06  # The gap above each communication lane, band group and curve.
BAND_HEIGHT: Final = 0.24  # The band of an unsharded stage.
_RANK_GAP: Final = 0.2  # The gap between two ranks.
CURVE_HEIGHT: Final = 0.7  # A curve.
# Widths of letters and of digits, as a multiple of the font size.
_LETTER_WIDTHS: Final = {"F": 0.6, "B": 0.7, "I": 0.35, "W": 1.0, "R": 0.7}
_DIGIT_WIDTH: Final = 0.65


class ChartRectangles:
    """The rectangles of all instructions of a timeline.

    x is the time since the start of the timeline, in the unit of the timeline. y grows downwards
    from 0 at the top. The height of a compute lane is 1.

    Each rank has these parts from top to bottom: the compute lane, the communication lanes, the
    bands of unsharded stages, and space for curves.

    Args:
        timeline: The timeline.
        lanes: True to include communication lanes and the bands of unsharded stages.
        curves: The number of curves below each rank.
        gap: The gap between two ranks.
        palette: The colours of the boxes.

    Attributes:
        timeline: The timeline.
        palette: The colours of the boxes.
        op: The opcode of each span, shape (n,).
        left: The start of each span, shape (n,).
        right: The end of each span, shape (n,).
        top: The upper edge of each span, shape (n,).
        bottom: The lower edge of each span, shape (n,).
        local_stages: The local stage of each span, shape (n,).
        compute_indices: Indices of the spans on the compute lane that take time.
        transfer_indices: Indices of the spans on other lanes that take time.
        lanes: The communication lanes that have a span that takes time.
        unsharded: The intervals in which stages are unsharded; empty without communication lanes.
        unsharded_top: The y coordinate of the bands, from the top of their rank.
        curve_top: The y coordinate of the first curve, from the top of its rank.
        pitch: The distance between the tops of two ranks.
        height: The height of the chart.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        lanes: bool = True,
        curves: int = 0,
        gap: float = _RANK_GAP,
        palette: Palette = LIGHT_PALETTE,
    ) -> None:
        spans = timeline.spans
        self.timeline = timeline
        self.palette = palette
        self.op: NDArray[np.int16] = spans["op"]
        self.left: Floats = spans["start"] - timeline.start_time
        self.right: Floats = spans["end"] - timeline.start_time
        on_compute = spans["lane"] == Lane.COMPUTE
        self.compute_indices = np.flatnonzero((self.right > self.left) & on_compute)
        self.transfer_indices = np.flatnonzero((self.right > self.left) & ~on_compute & lanes)
        self.lanes = [Lane(k) for k in np.unique(spans["lane"][self.transfer_indices]).tolist()]
        self.unsharded = find_unsharded_intervals(timeline) if lanes else UnshardedIntervals.empty()
        bands_height = self.unsharded.row_count * BAND_HEIGHT
        self.unsharded_top = 1 + (LANE_INSET + LANE_HEIGHT) * len(self.lanes) + LANE_INSET
        self.curve_top = self.unsharded_top + (bands_height and bands_height + LANE_INSET)
        self.pitch = self.curve_top - LANE_INSET + (LANE_INSET + CURVE_HEIGHT) * curves + gap
        self.height = self.pitch * timeline.ranks - gap / 2
        self.local_stages = find_local_stages(timeline)
        self._place_vertically(on_compute)

    def _place_vertically(self, on_compute: NDArray[np.bool_]) -> None:
        spans = self.timeline.spans
        self.top: Floats = spans["rank"] * self.pitch
        self.bottom = self.top + 1
        # The two instructions of a pair are the upper and the lower half of one box.
        second_indices = np.flatnonzero(self.timeline.is_second_of_pair)
        self.bottom[second_indices - 1] -= 0.5
        self.top[second_indices] += 0.5
        # Receives are the upper half of a lane and sends the lower half, because both may run at
        # the same time.
        for lane in self.lanes:
            is_on_lane = spans["lane"] == lane
            self.top[is_on_lane] += self.lane_top(lane)
            self.bottom[is_on_lane] = self.top[is_on_lane] + LANE_HEIGHT
        is_half_lane = np.isin(self.op, TRANSFER_OPS) & ~on_compute
        is_send = np.isin(self.op, SEND_OPS)
        self.bottom[is_half_lane & ~is_send] -= LANE_HEIGHT / 2
        self.top[is_half_lane & is_send] += LANE_HEIGHT / 2

    def lane_top(self, lane: Lane) -> float:
        """Return the y coordinate of a communication lane, from the top of its rank.

        Args:
            lane: A lane in `lanes`.
        """
        k = self.lanes.index(lane)
        return 1 + LANE_INSET + (LANE_INSET + LANE_HEIGHT) * k

    def compute_lane_corners(self) -> Floats:
        """Return the corners of the communication lanes of all ranks, shape (n, 4, 2)."""
        lane_tops = np.array([self.lane_top(lane) for lane in self.lanes])
        top = np.add.outer(np.arange(self.timeline.ranks) * self.pitch, lane_tops).reshape(-1)
        right = np.full(len(top), self.timeline.span)
        return compute_corners(0 * right, right, top, top + LANE_HEIGHT)

    def compute_unsharded_corners(self) -> Floats:
        """Return the corners of the bands of unsharded stages, shape (n, 4, 2)."""
        top = (
            self.unsharded.rank * self.pitch + self.unsharded_top + self.unsharded.row * BAND_HEIGHT
        )
        return compute_corners(self.unsharded.start, self.unsharded.end, top, top + BAND_HEIGHT)

    def compute_box_corners(self, indices: NDArray[np.intp]) -> Floats:
        """Return the corners of the boxes of some spans, shape (n, 4, 2).

        Args:
            indices: The indices of the spans, shape (n,).
        """
        return compute_corners(
            self.left[indices], self.right[indices], self.top[indices], self.bottom[indices]
        )

    def compute_idle_corners(self, min_gap: float = 0.0) -> Floats:
        """Return the corners of the idle times on the compute lanes, shape (n, 4, 2).

        Args:
            min_gap: The shortest idle time that is included, in the unit of the timeline.
        """
        min_gap = max(min_gap, 1e-9 * self.timeline.span)  # ignore gaps from rounding
        gaps = [self._compute_rank_gaps(rank, min_gap) for rank in range(self.timeline.ranks)]
        return np.concatenate([np.empty((0, 4, 2)), *gaps])

    def _compute_rank_gaps(self, rank: int, min_gap: float) -> Floats:
        indices = self.compute_indices[self.timeline.spans["rank"][self.compute_indices] == rank]
        indices = indices[np.argsort(self.left[indices], kind="stable")]
        ends = np.maximum.accumulate(np.append(0.0, self.right[indices]))
        begins = np.append(self.left[indices], self.timeline.span)
        is_gap = begins - ends > min_gap
        y = np.full(is_gap.sum(), rank * self.pitch)
        return compute_corners(ends[is_gap], begins[is_gap], y, y + 1)

    @property
    def short_box_width(self) -> float:
        """The 10% quantile of the durations of F, B, I, W and R, in the timeline's unit."""
        indices = self.compute_indices[np.isin(self.op[self.compute_indices], COMPUTE_OPS)]
        width = self.right[indices] - self.left[indices]
        return float(np.quantile(width, 0.1)) if len(indices) else max(self.timeline.span, 1.0)

    @property
    def label_width(self) -> float:
        """The width of the widest label of F, R, B, I and W, as a multiple of the font size."""
        letters = [INSTRUCTIONS[op].text for op in self.list_compute_ops() if op in COMPUTE_OPS]
        return (
            max((_LETTER_WIDTHS.get(letter, 1.0) for letter in letters), default=1.0)
            + self.number_width
        )

    @property
    def number_width(self) -> float:
        """The width of the widest label without its letter, as a multiple of the font size."""
        return len(str(self.timeline.program.shape.microbatches - 1)) * _DIGIT_WIDTH

    def format_label(self, index: int, *, with_letter: bool = True) -> str:
        """Return the label of a span: its letter and its microbatch.

        Args:
            index: The index of the span.
            with_letter: True to include the letter. Without the letter, only the colour shows the
                opcode.
        """
        row = INSTRUCTIONS[self.op[index]]
        number = str(self.timeline.spans["mb"][index]) if row.op in COMPUTE_OPS else ""
        return f"{row.text if with_letter else ''}{number}"

    def list_compute_ops(self) -> list[Opcode]:
        """Return the opcodes on the compute lane that take time, in the order of `INSTRUCTIONS`."""
        return [Opcode(k) for k in np.unique(self.op[self.compute_indices]).tolist()]


def compute_corners(left: Floats, right: Floats, top: Floats, bottom: Floats) -> Floats:
    """Return the corners of rectangles, shape (n, 4, 2).

    Args:
        left: The left edges, shape (n,).
        right: The right edges, shape (n,).
        top: The upper edges, shape (n,).
        bottom: The lower edges, shape (n,).
    """
    x = np.stack([left, right, right, left], 1)
    return np.stack([x, np.stack([top, top, bottom, bottom], 1)], 2)
