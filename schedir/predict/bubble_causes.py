"""Idleness: why the compute lane of a rank is idle when it is."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.index import NONE
from schedir.ir.ops import BACKWARDS, ROWS, Lane, Opcode
from schedir.predict.timeline import Timeline, expect_runs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Cause(IntEnum):
    """Why a rank is idle; `idleness` says how each is told."""

    WARMUP = 0
    COOLDOWN = 1
    MESSAGE = 2
    PEER = 3
    IMBALANCE = 4
    REDUCTION = 5
    HOST = 6


IDLE: Final = np.dtype(
    [("rank", "i4"), ("cause", "i4"), ("awaits", "i8"), ("start", "f8"), ("end", "f8")]
)
_LANE: Final = np.array([row.lane for row in ROWS])


def idleness(timeline: Timeline) -> NDArray[Any]:
    """Every idle interval of every rank with its one cause, by rank and start.

    A structured array (IDLE): rank, cause (a Cause), start, end, and `awaits`, the index in
    `timeline.spans` of the instruction that was waited for, or -1.  The intervals of a rank do
    not overlap, and their lengths sum to `timeline.idle[rank]`.

    Between two instructions of its compute lane, a rank waits for what the second one needs.
    From the start of that one we go back in time, each time to what ended last of all that had
    to end before (`Graph.latest`), until we are where the rank became idle:

    - MESSAGE: a transfer, or a scatter or gather, is under way; it is awaited.
    - REDUCTION: a reduction is under way, and no member is missing any more; it is awaited.
    - HOST: all that was waited for has ended, and still the next has not begun.  Never in a
      prediction.
    - An instruction on another rank has not ended: that one is awaited, for the rest of the
      interval.  Which cause this is, the phase of the waiting rank decides:
      WARMUP until its first backward begins, COOLDOWN from the end of its last forward on (but
      not before its first backward), PEER in between.
    - IMBALANCE: a rank with less to do than the busiest one is idle for the difference, in
      whatever order: so much of its waits for others is called this, of the PEER ones first,
      then of those after its first instruction, then of those before it.

    Before the first instruction of a rank the same is told, except that waits for others are
    WARMUP; after its last it is COOLDOWN, and nothing is awaited.
    """
    expect_runs([timeline])
    if not len(timeline):
        return np.empty(0, IDLE)
    waits = _Gaps(timeline)
    return waits.told()


def by_cause(idle: NDArray[Any], ranks: int) -> Floats:
    """Idle time by rank and cause, shape (ranks, len(Cause))."""
    total = np.zeros((ranks, len(Cause)))
    np.add.at(total, (idle["rank"], idle["cause"]), idle["end"] - idle["start"])
    return total


def ready_gaps(timeline: Timeline) -> Floats:
    """How long compute lanes stand still for nothing, by pairs of instructions that follow there.

    For each of which the second has all that it waits for when the first ends: from then until
    it begins.  Of a program with its transfers; in a prediction all are 0.
    """
    before, after = _followers(timeline)
    spans = timeline.spans
    waited = timeline.latest[after]
    end = np.where(waited == NONE, -np.inf, spans["end"][waited])
    ready = end <= spans["end"][before]
    gaps: Floats = (spans["start"][after] - spans["end"][before])[ready]
    return gaps


def steady(timeline: Timeline) -> tuple[Floats, Floats]:
    """When the steady phase of each rank begins and ends: warmup is before it, cooldown after.

    From the start of its first backward, infinite if there is none, to the end of its last
    forward, if that is later.  In the times of `timeline.spans`; each of shape (ranks,).
    """
    spans = timeline.spans
    begins, ends = np.full(timeline.ranks, np.inf), np.full(timeline.ranks, -np.inf)
    back, ahead = np.isin(spans["op"], BACKWARDS), spans["op"] == Opcode.Forward
    np.minimum.at(begins, spans["rank"][back], spans["start"][back])
    np.maximum.at(ends, spans["rank"][ahead], spans["end"][ahead])
    return begins, np.maximum(begins, ends)


def exposed(timeline: Timeline) -> float:
    """The share of the steady phase in which ranks wait for a transfer, a scatter or a gather.

    Where no rank has a steady phase, the share is 0.
    """
    begins, ends = steady(timeline)
    idle = idleness(timeline)
    idle = idle[idle["cause"] == Cause.MESSAGE]
    rank = idle["rank"]
    waits = np.minimum(idle["end"], ends[rank]) - np.maximum(idle["start"], begins[rank])
    there = np.isfinite(begins)
    whole = float((ends[there] - begins[there]).sum())
    return float(np.maximum(waits, 0.0).sum()) / whole if whole else 0.0


def _followers(timeline: Timeline) -> tuple[Ints, Ints]:
    """All pairs of instructions that follow each other on the compute lane of a rank."""
    spans = timeline.spans
    own = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.second_of_pair)
    same = spans["rank"][own[1:]] == spans["rank"][own[:-1]]
    return own[:-1][same], own[1:][same]


class _Gaps:
    """The gaps of all compute lanes, and the intervals that they fall into.

    A gap has its rank, when it begins and ends, and `before` and `after`: the indices of the
    instructions around it, -1 where there is none.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, spans = timeline, timeline.spans
        own = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.second_of_pair)
        bounds = np.searchsorted(spans["rank"][own], np.arange(timeline.ranks + 1))
        after = np.insert(own, bounds[1:], NONE)
        before = np.insert(own, bounds[:-1], NONE)
        rank = np.repeat(np.arange(timeline.ranks), np.diff(bounds) + 1)
        begin, finish = timeline.begin, spans["end"].max()
        lo = np.where(before == NONE, begin, spans["end"][before])
        hi = np.where(after == NONE, finish, spans["start"][after])
        real = hi > lo
        self.rank, self.before, self.after = rank[real], before[real], after[real]
        self.lo, self.hi = lo[real], hi[real]
        self.found: list[tuple[Ints, Cause, Ints, Floats, Floats]] = []

    def told(self) -> NDArray[Any]:
        """The intervals of all gaps."""
        self._walk_back()
        idle = np.concatenate([np.empty(0, IDLE), *(self._rows(*found) for found in self.found)])
        idle = self._call_imbalance(idle)
        return idle[np.lexsort((idle["start"], idle["rank"]))]

    def _tell(self, gap: Ints, cause: Cause, awaits: Ints, lo: Floats, hi: Floats) -> None:
        real = hi > lo
        if real.any():
            self.found.append((gap[real], cause, awaits[real], lo[real], hi[real]))

    def _rows(self, gap: Ints, cause: Cause, awaits: Ints, lo: Floats, hi: Floats) -> NDArray[Any]:
        rows = np.empty(len(gap), IDLE)
        rows["rank"], rows["awaits"], rows["start"], rows["end"] = self.rank[gap], awaits, lo, hi
        rows["cause"] = self._phase(gap) if cause is Cause.PEER else cause
        return rows

    def _walk_back(self) -> None:
        """From the end of every gap back to its beginning, all gaps at once."""
        spans, rank = self.timeline.spans, self.timeline.spans["rank"]
        lane, latest = _LANE[spans["op"]], self._latest()
        gap = np.arange(len(self.rank))
        tail = self.after == NONE
        none = np.full(int(tail.sum()), NONE)
        self._tell(gap[tail], Cause.COOLDOWN, none, self.lo[tail], self.hi[tail])
        gap = gap[~tail]
        now, hi = self.after[gap], self.hi[gap]  # we stand before `now`, at time `hi`
        while len(gap):
            lo, before = self.lo[gap], latest[now]
            some = before != NONE
            ended = np.where(some, np.clip(spans["end"][before], lo, hi), lo)
            direct = some & (lane[now] == Lane.COMPUTE) & (lane[before] == Lane.COMPUTE)
            direct &= rank[now] != rank[before]
            self._tell(gap[direct], Cause.MESSAGE, before[direct], ended[direct], hi[direct])
            host = ~direct
            self._tell(gap[host], Cause.HOST, now[host], ended[host], hi[host])

            on = some & (ended > lo)
            gap, lo, now, hi = gap[on], lo[on], before[on], ended[on]
            works = lane[now] == Lane.COMPUTE
            self._tell(gap[works], Cause.PEER, now[works], lo[works], hi[works])
            gap, lo, now, hi = gap[~works], lo[~works], now[~works], hi[~works]
            began = np.clip(spans["start"][now], lo, hi)
            reduces = lane[now] == Lane.DP
            for cause, which in ((Cause.REDUCTION, reduces), (Cause.MESSAGE, ~reduces)):
                self._tell(gap[which], cause, now[which], began[which], hi[which])
            on = began > lo
            gap, now, hi = gap[on], now[on], began[on]

    def _latest(self) -> Ints:
        """What each instruction waited for longest; of equals, work rather than a transfer."""
        spans = self.timeline.spans
        order = np.lexsort((_LANE[spans["op"]] == Lane.COMPUTE, spans["end"]))
        place = np.full(len(spans) + 1, -1.0)  # the last entry is that of NONE
        place[order] = np.arange(len(spans))
        return self.timeline.graph.latest(place[:-1])

    def _phase(self, gap: Ints) -> NDArray[np.int32]:
        """The cause of a wait for another rank, by the phase that the rank is in."""
        begins, ends = (times[self.rank[gap]] for times in steady(self.timeline))
        phase = np.full(len(gap), Cause.PEER, np.int32)
        phase[self.lo[gap] >= ends] = Cause.COOLDOWN
        fills = np.isfinite(begins) & (self.hi[gap] <= begins)
        phase[fills | (self.before[gap] == NONE)] = Cause.WARMUP
        return phase

    def _call_imbalance(self, idle: NDArray[Any]) -> NDArray[Any]:
        """Take from the waits for other ranks what a rank has less to do than the busiest one."""
        timeline, rank = self.timeline, idle["rank"]
        begins = np.full(timeline.ranks, -np.inf)  # when the first instruction does
        first = self.before == NONE
        begins[self.rank[first]] = self.hi[first]
        at = np.flatnonzero(np.isin(idle["cause"], (Cause.WARMUP, Cause.COOLDOWN, Cause.PEER)))
        turn = (idle["cause"] != Cause.PEER).astype(int) + (idle["start"] < begins[rank])
        at = at[np.lexsort((idle["start"][at], turn[at], rank[at]))]
        long = idle["end"][at] - idle["start"][at]
        total = np.concatenate([[0.0], np.cumsum(long)])
        base = total[np.searchsorted(rank[at], rank[at])]
        left = (timeline.busy.max() - timeline.busy)[rank[at]] - (total[:-1] - base)
        whole, part = at[left >= long], at[(left > 0) & (left < long)]
        idle["cause"][whole] = Cause.IMBALANCE
        rest = idle[part].copy()
        rest["start"] += left[(left > 0) & (left < long)]
        idle["end"][part] = rest["start"]
        idle["cause"][part] = Cause.IMBALANCE
        return np.concatenate([idle, rest[rest["end"] > rest["start"]]])
