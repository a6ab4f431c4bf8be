"""Compute the rectangles of a chart from a Timeline, before anything is drawn."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import COMPUTE, ROWS, SENDS, TRANSFERS, Lane, Opcode
from schedir.predict.timeline import Timeline
from schedir.viz.palette import DAY, Palette
from schedir.viz.time_bins import UnshardedIntervals, own_stage, whole

Floats = NDArray[np.float64]

# Heights, in compute lanes.
LANE: Final = 0.24  # a communication lane
INSET: Final = 0.06  # above it
BAND: Final = 0.24  # of a stage that is whole
_GAP: Final = 0.2  # between ranks
CURVE: Final = 0.7  # a curve
# Widths of letters and of digits, in font sizes.
_WIDE: Final = {"F": 0.6, "B": 0.7, "I": 0.35, "W": 1.0, "R": 0.7}
_DIGIT: Final = 0.65


class ChartRectangles:
    """Rectangles of all instructions: x is time since the timeline began, y counts compute lanes
    from the top.

    `left`, `right`, `top`, `bottom` and `local` (which of its rank's own stages) have one entry
    per span; `compute` and `talk` are the indices of those that take any time, on the compute
    lane and on the others; `lanes` are the communication lanes that are there, unless none are
    wanted; below them each stage has a band for as long as its weights are whole (`whole`).
    `curves` have room under each rank; `gap` is the room between ranks; `palette` is what
    boxes are drawn in.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        lanes: bool = True,
        curves: int = 0,
        gap: float = _GAP,
        palette: Palette = DAY,
    ) -> None:
        spans = timeline.spans
        self.timeline, self.palette = timeline, palette
        self.op: NDArray[np.int16] = spans["op"]
        self.left: Floats = spans["start"] - timeline.begin
        self.right: Floats = spans["end"] - timeline.begin
        on_compute = spans["lane"] == Lane.COMPUTE
        self.compute = np.flatnonzero((self.right > self.left) & on_compute)
        self.talk = np.flatnonzero((self.right > self.left) & ~on_compute & lanes)
        self.lanes = [Lane(k) for k in np.unique(spans["lane"][self.talk]).tolist()]
        self.whole = whole(timeline) if lanes else UnshardedIntervals.nothing()
        bands = self.whole.rows * BAND
        self.whole_top = 1 + (INSET + LANE) * len(self.lanes) + INSET
        self.curve_top = self.whole_top + (bands and bands + INSET)
        self.pitch = self.curve_top - INSET + (INSET + CURVE) * curves + gap
        self.height = self.pitch * timeline.ranks - gap / 2
        self.local = own_stage(timeline)
        self._place(on_compute)

    def _place(self, on_compute: NDArray[np.bool_]) -> None:
        spans = self.timeline.spans
        self.top: Floats = spans["rank"] * self.pitch
        self.bottom = self.top + 1
        # A pair run together: two halves of one box.
        second = np.flatnonzero(self.timeline.second_of_pair)
        self.bottom[second - 1] -= 0.5
        self.top[second] += 0.5
        # What comes in is the upper half of its lane, what goes out the lower: both at once show.
        for lane in self.lanes:
            here = spans["lane"] == lane
            self.top[here] += self.lane_top(lane)
            self.bottom[here] = self.top[here] + LANE
        half = np.isin(self.op, TRANSFERS) & ~on_compute
        sends = np.isin(self.op, SENDS)
        self.bottom[half & ~sends] -= LANE / 2
        self.top[half & sends] += LANE / 2

    def lane_top(self, lane: Lane) -> float:
        """Where a communication lane begins, below the top of its rank."""
        k = self.lanes.index(lane)
        return 1 + INSET + (INSET + LANE) * k

    def bands(self) -> Floats:
        """Corners of the communication lanes, shape (n, 4, 2)."""
        begins = np.array([self.lane_top(lane) for lane in self.lanes])
        top = np.add.outer(np.arange(self.timeline.ranks) * self.pitch, begins).reshape(-1)
        right = np.full(len(top), self.timeline.span)
        return corners(0 * right, right, top, top + LANE)

    def wholes(self) -> Floats:
        """Corners of the bands of stages that are whole, shape (n, 4, 2)."""
        top = self.whole.rank * self.pitch + self.whole_top + self.whole.row * BAND
        return corners(self.whole.start, self.whole.end, top, top + BAND)

    def quads(self, which: NDArray[np.intp]) -> Floats:
        """Corners of the rectangles of some instructions, shape (n, 4, 2)."""
        return corners(self.left[which], self.right[which], self.top[which], self.bottom[which])

    def idle(self, least: float = 0.0) -> Floats:
        """Corners of what is idle on the compute lanes between 0 and the span, shape (n, 4, 2).

        Gaps of less than `least` are left out.
        """
        least = max(least, 1e-9 * self.timeline.span)  # rounding is no bubble
        gaps = [self._idle(rank, least) for rank in range(self.timeline.ranks)]
        return np.concatenate([np.empty((0, 4, 2)), *gaps])

    def _idle(self, rank: int, least: float) -> Floats:
        own = self.compute[self.timeline.spans["rank"][self.compute] == rank]
        own = own[np.argsort(self.left[own], kind="stable")]
        ends = np.maximum.accumulate(np.append(0.0, self.right[own]))
        begins = np.append(self.left[own], self.timeline.span)
        gap = begins - ends > least
        y = np.full(gap.sum(), rank * self.pitch)
        return corners(ends[gap], begins[gap], y, y + 1)

    @property
    def narrow(self) -> float:
        """How long the shorter ones of F, B, I, W take: nine in ten take longer."""
        work = self.compute[np.isin(self.op[self.compute], COMPUTE)]
        width = self.right[work] - self.left[work]
        return float(np.quantile(width, 0.1)) if len(work) else max(self.timeline.span, 1.0)

    @property
    def label_width(self) -> float:
        """How wide the widest label of F, B, I, W is, in font sizes."""
        letters = [ROWS[op].text for op in self.present() if op in COMPUTE]
        return max((_WIDE.get(letter, 1.0) for letter in letters), default=1.0) + self.number_width

    @property
    def number_width(self) -> float:
        """How wide the widest label is without its letter, which colours tell as well."""
        return len(str(self.timeline.program.shape.microbatches - 1)) * _DIGIT

    def label(self, at: int, *, letter: bool = True) -> str:
        """What a box is called: letter and microbatch, or what fits where letters do not."""
        row = ROWS[self.op[at]]
        number = str(self.timeline.spans["mb"][at]) if row.op in COMPUTE else ""
        return f"{row.text if letter else ''}{number}"

    def present(self) -> list[Opcode]:
        """The instructions of the compute lane that take any time, in the order of the table."""
        return [Opcode(k) for k in np.unique(self.op[self.compute]).tolist()]


def corners(left: Floats, right: Floats, top: Floats, bottom: Floats) -> Floats:
    """Corners of rectangles, shape (n, 4, 2)."""
    x = np.stack([left, right, right, left], 1)
    return np.stack([x, np.stack([top, top, bottom, bottom], 1)], 2)
