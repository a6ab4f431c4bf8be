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

# Heights, in compute lanes.
LANE_HEIGHT: Final = 0.24  # a communication lane
LANE_INSET: Final = 0.06  # above it
BAND_HEIGHT: Final = 0.24  # of a stage that is whole
_RANK_GAP: Final = 0.2  # between ranks
CURVE_HEIGHT: Final = 0.7  # a curve
# Widths of letters and of digits, in font sizes.
_LETTER_WIDTHS: Final = {"F": 0.6, "B": 0.7, "I": 0.35, "W": 1.0, "R": 0.7}
_DIGIT_WIDTH: Final = 0.65


class ChartRectangles:
    """Rectangles of all instructions: x is time since the timeline began, y counts compute lanes
    from the top.

    `left`, `right`, `top`, `bottom` and `local_stages` (which of its rank's own stages) have one
    entry per span; `compute_indices` and `transfer_indices` are the indices of those that take any
    time, on the compute lane and on the others; `lanes` are the communication lanes that are there,
    unless none are wanted; below them each stage has a band for as long as its weights are whole
    (`unsharded`).
    `curves` have room under each rank; `gap` is the room between ranks; `palette` is what
    boxes are drawn in.
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
        self.timeline, self.palette = timeline, palette
        self.op: NDArray[np.int16] = spans["op"]
        self.left: Floats = spans["start"] - timeline.start_time
        self.right: Floats = spans["end"] - timeline.start_time
        on_compute = spans["lane"] == Lane.COMPUTE
        self.compute_indices = np.flatnonzero((self.right > self.left) & on_compute)
        self.transfer_indices = np.flatnonzero((self.right > self.left) & ~on_compute & lanes)
        self.lanes = [Lane(k) for k in np.unique(spans["lane"][self.transfer_indices]).tolist()]
        self.unsharded = find_unsharded_intervals(timeline) if lanes else UnshardedIntervals.empty()
        bands = self.unsharded.row_count * BAND_HEIGHT
        self.unsharded_top = 1 + (LANE_INSET + LANE_HEIGHT) * len(self.lanes) + LANE_INSET
        self.curve_top = self.unsharded_top + (bands and bands + LANE_INSET)
        self.pitch = self.curve_top - LANE_INSET + (LANE_INSET + CURVE_HEIGHT) * curves + gap
        self.height = self.pitch * timeline.ranks - gap / 2
        self.local_stages = find_local_stages(timeline)
        self._place_vertically(on_compute)

    def _place_vertically(self, on_compute: NDArray[np.bool_]) -> None:
        spans = self.timeline.spans
        self.top: Floats = spans["rank"] * self.pitch
        self.bottom = self.top + 1
        # A pair run together: two halves of one box.
        second = np.flatnonzero(self.timeline.is_second_of_pair)
        self.bottom[second - 1] -= 0.5
        self.top[second] += 0.5
        # What comes in is the upper half of its lane, what goes out the lower: both at once show.
        for lane in self.lanes:
            here = spans["lane"] == lane
            self.top[here] += self.lane_top(lane)
            self.bottom[here] = self.top[here] + LANE_HEIGHT
        half = np.isin(self.op, TRANSFER_OPS) & ~on_compute
        sends = np.isin(self.op, SEND_OPS)
        self.bottom[half & ~sends] -= LANE_HEIGHT / 2
        self.top[half & sends] += LANE_HEIGHT / 2

    def lane_top(self, lane: Lane) -> float:
        """Where a communication lane begins, below the top of its rank."""
        k = self.lanes.index(lane)
        return 1 + LANE_INSET + (LANE_INSET + LANE_HEIGHT) * k

    def compute_lane_corners(self) -> Floats:
        """Corners of the communication lanes, shape (n, 4, 2)."""
        begins = np.array([self.lane_top(lane) for lane in self.lanes])
        top = np.add.outer(np.arange(self.timeline.ranks) * self.pitch, begins).reshape(-1)
        right = np.full(len(top), self.timeline.span)
        return compute_corners(0 * right, right, top, top + LANE_HEIGHT)

    def compute_unsharded_corners(self) -> Floats:
        """Corners of the bands of stages that are whole, shape (n, 4, 2)."""
        top = (
            self.unsharded.rank * self.pitch + self.unsharded_top + self.unsharded.row * BAND_HEIGHT
        )
        return compute_corners(self.unsharded.start, self.unsharded.end, top, top + BAND_HEIGHT)

    def compute_box_corners(self, indices: NDArray[np.intp]) -> Floats:
        """Corners of the rectangles of some instructions, shape (n, 4, 2)."""
        return compute_corners(
            self.left[indices], self.right[indices], self.top[indices], self.bottom[indices]
        )

    def compute_idle_corners(self, min_gap: float = 0.0) -> Floats:
        """Corners of what is idle on the compute lanes between 0 and the span, shape (n, 4, 2).

        Gaps of less than `min_gap` are left out.
        """
        min_gap = max(min_gap, 1e-9 * self.timeline.span)  # rounding is no bubble
        gaps = [self._compute_rank_gaps(rank, min_gap) for rank in range(self.timeline.ranks)]
        return np.concatenate([np.empty((0, 4, 2)), *gaps])

    def _compute_rank_gaps(self, rank: int, min_gap: float) -> Floats:
        own = self.compute_indices[self.timeline.spans["rank"][self.compute_indices] == rank]
        own = own[np.argsort(self.left[own], kind="stable")]
        ends = np.maximum.accumulate(np.append(0.0, self.right[own]))
        begins = np.append(self.left[own], self.timeline.span)
        gap = begins - ends > min_gap
        y = np.full(gap.sum(), rank * self.pitch)
        return compute_corners(ends[gap], begins[gap], y, y + 1)

    @property
    def short_box_width(self) -> float:
        """How long the shorter ones of F, B, I, W take: nine in ten take longer."""
        work = self.compute_indices[np.isin(self.op[self.compute_indices], COMPUTE_OPS)]
        width = self.right[work] - self.left[work]
        return float(np.quantile(width, 0.1)) if len(work) else max(self.timeline.span, 1.0)

    @property
    def label_width(self) -> float:
        """How wide the widest label of F, B, I, W is, in font sizes."""
        letters = [INSTRUCTIONS[op].text for op in self.list_compute_ops() if op in COMPUTE_OPS]
        return (
            max((_LETTER_WIDTHS.get(letter, 1.0) for letter in letters), default=1.0)
            + self.number_width
        )

    @property
    def number_width(self) -> float:
        """How wide the widest label is without its letter, which colours tell as well."""
        return len(str(self.timeline.program.shape.microbatches - 1)) * _DIGIT_WIDTH

    def format_label(self, index: int, *, with_letter: bool = True) -> str:
        """What a box is called: letter and microbatch, or what fits where letters do not."""
        row = INSTRUCTIONS[self.op[index]]
        number = str(self.timeline.spans["mb"][index]) if row.op in COMPUTE_OPS else ""
        return f"{row.text if with_letter else ''}{number}"

    def list_compute_ops(self) -> list[Opcode]:
        """The instructions of the compute lane that take any time, in the order of the table."""
        return [Opcode(k) for k in np.unique(self.op[self.compute_indices]).tolist()]


def compute_corners(left: Floats, right: Floats, top: Floats, bottom: Floats) -> Floats:
    """Corners of rectangles, shape (n, 4, 2)."""
    x = np.stack([left, right, right, left], 1)
    return np.stack([x, np.stack([top, top, bottom, bottom], 1)], 2)
