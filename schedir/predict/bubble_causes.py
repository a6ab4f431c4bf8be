"""Find why the compute lane of a rank is idle."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    FORWARD,
    INSTRUCTIONS,
    LANES,
    Lane,
    find_segment_collectives,
)
from schedir.predict.timeline import Timeline, require_timelines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class IdleCause(IntEnum):
    """Why a rank is idle; `idleness` says how each is told."""

    WARMUP = 0
    COOLDOWN = 1
    MESSAGE = 2
    PEER = 3
    IMBALANCE = 4
    REDUCTION = 5
    HOST = 6
    WEIGHTS = 7
    SNAPSHOT = 8
    OFFLOAD = 9
    DISK = 10
    SUM = 11
    STEP = 12


# Of what is awaited while it runs.
_CAUSE_OF_OP: Final = [
    IdleCause[(row.idle_cause or LANES[row.lane].idle_cause).upper()] for row in INSTRUCTIONS
]
IDLE_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("cause", "i4"), ("awaits", "i8"), ("start", "f8"), ("end", "f8")]
)
# Between two instructions of a compute lane; and a part of that, with one cause.
GAP_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("before", "i8"), ("after", "i8"), ("start", "f8"), ("end", "f8")]
)
WAIT_DTYPE: Final = np.dtype(
    [("gap", "i8"), ("cause", "i4"), ("awaits", "i8"), ("start", "f8"), ("end", "f8")]
)


def idleness(timeline: Timeline) -> NDArray[Any]:
    """Every idle interval of every rank with its one cause, by rank and start.

    A structured array (IDLE): rank, cause (a Cause), start, end, and `awaits`, the index in
    `timeline.spans` of the instruction that was waited for, or -1.  The intervals of a rank do
    not overlap, and their lengths sum to `timeline.idle[rank]`.

    Between two instructions of its compute lane, a rank waits for what the second one needs.
    From the start of that one we go back in time, each time to what ended last of all that had
    to end before (`Graph.latest`), until we are where the rank became idle:

    - MESSAGE: a transfer, or a scatter or gather, is under way; it is awaited.
    - SUM: what pieces of a stage give is being summed (TPReduceAct, TPReduceGrad),
    or gathered where
      tensor-parallel ranks share the sequence, and that is awaited.
    - REDUCTION: a reduction is under way, and no member is missing any more; it is awaited.
    - WEIGHTS: a stage's weights are being gathered (Unshard), and that is awaited.
    - SNAPSHOT: a stage is being copied to the host (Snapshot), and its step awaits that.
    - OFFLOAD: what is held elsewhere is on its way from the host's memory (Reload), or to it
      (Offload) and leaves no room before; it is awaited.
    - DISK: the same between the host's memory and its disk (ReloadFromDisk, OffloadToDisk).
    - STEP: the host steps a stage (HostOptimizerStep), and its weights are awaited.
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
    require_timelines([timeline])
    if not len(timeline):
        return np.empty(0, IDLE_DTYPE)
    gaps = _find_gaps(timeline)
    waits = _find_waits(timeline, gaps)
    idle = np.empty(len(waits), IDLE_DTYPE)
    for name in ("cause", "awaits", "start", "end"):
        idle[name] = waits[name]
    idle["rank"] = gaps["rank"][waits["gap"]]
    peer = waits["cause"] == IdleCause.PEER
    idle["cause"][peer] = _find_phase_causes(timeline, gaps)[waits["gap"][peer]]
    idle = _mark_imbalance(timeline, gaps, idle)
    return idle[np.lexsort((idle["start"], idle["rank"]))]


def sum_by_cause(idle: NDArray[Any], ranks: int) -> Floats:
    """Idle time by rank and cause, shape (ranks, len(Cause))."""
    total = np.zeros((ranks, len(IdleCause)))
    np.add.at(total, (idle["rank"], idle["cause"]), idle["end"] - idle["start"])
    return total


def find_ready_gaps(timeline: Timeline) -> Floats:
    """How long compute lanes stand still for nothing, by pairs of instructions that follow there.

    For each of which the second has all that it waits for when the first ends: from then until
    it begins.  Of a program with its transfers; in a prediction all are 0.
    """
    before, after = _find_followers(timeline)
    spans = timeline.spans
    waited = timeline.critical_predecessor[after]
    end = np.where(waited == NO_POSITION, -np.inf, spans["end"][waited])
    ready = end <= spans["end"][before]
    gaps: Floats = (spans["start"][after] - spans["end"][before])[ready]
    return gaps


def find_steady_phase(timeline: Timeline) -> tuple[Floats, Floats]:
    """When the steady phase of each rank begins and ends: warmup is before it, cooldown after.

    From the start of its first backward, infinite if there is none, to the end of its last
    forward, if that is later.  In the times of `timeline.spans`; each of shape (ranks,).
    """
    spans = timeline.spans
    begins, ends = np.full(timeline.ranks, np.inf), np.full(timeline.ranks, -np.inf)
    back, ahead = np.isin(spans["op"], BACKWARD_OPS), spans["op"] == FORWARD
    np.minimum.at(begins, spans["rank"][back], spans["start"][back])
    np.maximum.at(ends, spans["rank"][ahead], spans["end"][ahead])
    return begins, np.maximum(begins, ends)


def compute_exposed_share(timeline: Timeline) -> float:
    """The share of the steady phase in which ranks wait for a transfer, a scatter or a gather.

    Where no rank has a steady phase, the share is 0.
    """
    begins, ends = find_steady_phase(timeline)
    idle = idleness(timeline)
    idle = idle[idle["cause"] == IdleCause.MESSAGE]
    rank = idle["rank"]
    waits = np.minimum(idle["end"], ends[rank]) - np.maximum(idle["start"], begins[rank])
    there = np.isfinite(begins)
    whole = float((ends[there] - begins[there]).sum())
    return float(np.maximum(waits, 0.0).sum()) / whole if whole else 0.0


def _find_followers(timeline: Timeline) -> tuple[Ints, Ints]:
    """All pairs of instructions that follow each other on the compute lane of a rank."""
    spans = timeline.spans
    own = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.is_second_of_pair)
    same = spans["rank"][own[1:]] == spans["rank"][own[:-1]]
    return own[:-1][same], own[1:][same]


def _find_gaps(timeline: Timeline) -> NDArray[Any]:
    """The gaps of all compute lanes, by rank and start: a structured array (GAP).

    `before` and `after` are the indices of the instructions around a gap, -1 where there is none.
    """
    spans = timeline.spans
    own = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.is_second_of_pair)
    bounds = np.searchsorted(spans["rank"][own], np.arange(timeline.ranks + 1))
    gaps = np.empty(len(own) + timeline.ranks, GAP_DTYPE)
    gaps["rank"] = np.repeat(np.arange(timeline.ranks), np.diff(bounds) + 1)
    gaps["after"] = after = np.insert(own, bounds[1:], NO_POSITION)
    gaps["before"] = before = np.insert(own, bounds[:-1], NO_POSITION)
    gaps["start"] = np.where(before == NO_POSITION, timeline.start_time, spans["end"][before])
    gaps["end"] = np.where(after == NO_POSITION, spans["end"].max(), spans["start"][after])
    return gaps[gaps["end"] > gaps["start"]]


def _find_waits(timeline: Timeline, gaps: NDArray[Any]) -> NDArray[Any]:
    """What each gap consists of, in any order: a structured array (WAIT).

    All gaps at once are walked from their end back to their beginning.  At each step we stand at
    `time`, before the instruction `waiting`: first comes the time since what `waiting` waited for
    had ended, and then the time in which that ran, before which we stand next.
    """
    spans, latest = timeline.spans, _find_latest(timeline)
    nothing_follows = gaps["after"] == NO_POSITION
    tail = np.flatnonzero(nothing_follows)
    none = np.full(len(tail), NO_POSITION)
    found = [_make_waits(tail, IdleCause.COOLDOWN, none, gaps["start"][tail], gaps["end"][tail])]
    gap = np.flatnonzero(~nothing_follows)
    now, time = gaps["after"][gap], gaps["end"][gap]
    while len(gap):
        begin, awaited = gaps["start"][gap], latest[now]
        some = awaited != NO_POSITION
        ended = np.where(some, np.clip(spans["end"][awaited], begin, time), begin)
        found.append(_make_waits(gap, *_explain_late_start(timeline, now, awaited), ended, time))
        on = some & (ended > begin)
        gap, begin, now, time = gap[on], begin[on], awaited[on], ended[on]

        cause = _explain_running(timeline, now)
        # Of another rank's compute nobody asks what it waited for: it stands for all of that.
        began = np.where(cause == IdleCause.PEER, -np.inf, spans["start"][now])
        began = np.clip(began, begin, time)
        found.append(_make_waits(gap, cause, now, began, time))
        on = began > begin
        gap, now, time = gap[on], now[on], began[on]
    waits = np.concatenate(found)
    return waits[waits["end"] > waits["start"]]


def _make_waits(
    gap: Ints, cause: ArrayLike, awaits: Ints, start: Floats, end: Floats
) -> NDArray[Any]:
    waits = np.empty(len(gap), WAIT_DTYPE)
    waits["gap"], waits["cause"], waits["awaits"] = gap, cause, awaits
    waits["start"], waits["end"] = start, end
    return waits


def _explain_late_start(timeline: Timeline, waiting: Ints, awaited: Ints) -> tuple[Ints, Ints]:
    """Why an instruction has not begun though what it waited for has ended; and what is awaited.

    Of a draft, whose messages are no instructions, a message is under way.  Else it is the host.
    """
    lane, rank = timeline.spans["lane"], timeline.spans["rank"]
    computes = (lane[waiting] == Lane.COMPUTE) & (lane[awaited] == Lane.COMPUTE)
    message = (awaited != NO_POSITION) & computes & (rank[waiting] != rank[awaited])
    cause = np.where(message, IdleCause.MESSAGE, IdleCause.HOST)
    return cause, np.where(message, awaited, waiting)


def _explain_running(timeline: Timeline, awaited: Ints) -> Ints:
    """Why a rank is idle while what it waits for runs."""
    cause = np.array(_CAUSE_OF_OP)
    cause[[*find_segment_collectives(timeline.program.sequence_parallel)]] = IdleCause.SUM
    return np.asarray(cause[timeline.spans["op"][awaited]])


def _find_latest(timeline: Timeline) -> Ints:
    """What each instruction waited for longest; of equals, work rather than a transfer."""
    spans = timeline.spans
    order = np.lexsort((spans["lane"] == Lane.COMPUTE, spans["end"]))
    place = np.full(len(spans) + 1, -1.0)  # the last entry is that of NONE
    place[order] = np.arange(len(spans))
    return timeline.graph.find_last_predecessors(place[:-1])


def _find_phase_causes(timeline: Timeline, gaps: NDArray[Any]) -> Ints:
    """The cause of a wait for another rank, by the phase that the waiting rank is in at a gap."""
    begins, ends = (times[gaps["rank"]] for times in find_steady_phase(timeline))
    fills = np.isfinite(begins) & (gaps["end"] <= begins)
    return np.select(
        [fills | (gaps["before"] == NO_POSITION), gaps["start"] >= ends],
        [IdleCause.WARMUP, IdleCause.COOLDOWN],
        IdleCause.PEER,
    )


def _mark_imbalance(timeline: Timeline, gaps: NDArray[Any], idle: NDArray[Any]) -> NDArray[Any]:
    """Take from the waits for other ranks what a rank has less to do than the busiest one."""
    rank = idle["rank"]
    begins = np.full(timeline.ranks, -np.inf)  # when the first instruction does
    first = gaps[gaps["before"] == NO_POSITION]
    begins[first["rank"]] = first["end"]
    at = np.flatnonzero(
        np.isin(idle["cause"], (IdleCause.WARMUP, IdleCause.COOLDOWN, IdleCause.PEER))
    )
    turn = (idle["cause"] != IdleCause.PEER).astype(int) + (idle["start"] < begins[rank])
    at = at[np.lexsort((idle["start"][at], turn[at], rank[at]))]
    long = idle["end"][at] - idle["start"][at]
    total = np.concatenate([[0.0], np.cumsum(long)])
    base = total[np.searchsorted(rank[at], rank[at])]
    left = (timeline.busy.max() - timeline.busy)[rank[at]] - (total[:-1] - base)
    whole, part = at[left >= long], at[(left > 0) & (left < long)]
    idle["cause"][whole] = IdleCause.IMBALANCE
    rest = idle[part].copy()
    rest["start"] += left[(left > 0) & (left < long)]
    idle["end"][part] = rest["start"]
    idle["cause"][part] = IdleCause.IMBALANCE
    return np.concatenate([idle, rest[rest["end"] > rest["start"]]])
