"""Compute curves and busy shares per column of time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import find_used_tiers
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import Lane, Opcode, Value
from schedir.predict.timeline import Timeline


def find_local_stages(timeline: Timeline) -> NDArray[np.int64]:
    """Of each span, which of its rank's own stages it is of, from 0; shape (n,)."""
    return timeline.program.shape.local_stage(timeline.spans["stage"], timeline.spans["rank"])


class MemoryCurve(NamedTuple):
    """What every rank holds as time passes, as a name and a unit ("B" or "") and, by rank, times
    from the timeline's begin and what is held from each on.

    `static_layers` are layers of what is held all the time, from below: names, and by rank up to
    where."""

    name: str
    unit: str
    steps: list[tuple[NDArray[np.float64], NDArray[np.float64]]]
    static_layers: dict[str, NDArray[np.float64]] = {}  # noqa: RUF012


def compute_in_flight_curve(timeline: Timeline) -> MemoryCurve:
    """How many (stage, mb) are held."""
    each = (timeline.count_in_flight(rank) for rank in range(timeline.ranks))
    return MemoryCurve("in flight", "", [_sort_curve(timeline, times, n) for times, n in each])


def compute_memory_curve(timeline: Timeline) -> MemoryCurve:
    """How many bytes are held on the device; without sizes, how many activations."""
    steps = [_sort_curve(timeline, own.times, own.total) for own in timeline.memory]
    floors, top = {}, np.zeros(timeline.ranks)
    for name, each in timeline.static_memory.items():
        floors[name] = top = top + each
    return MemoryCurve("memory", "" if timeline.sizes is None else "B", steps, floors)


def compute_tier_curves(timeline: Timeline) -> list[MemoryCurve]:
    """How many bytes are held on each tier below the device."""
    return [
        MemoryCurve(tier, "B", [_sort_curve(timeline, own.times, own.total) for own in curves])
        for tier, curves in (
            (tier, timeline.memory_on(tier)) for tier in list_lower_tiers(timeline)
        )
    ]


def list_lower_tiers(timeline: Timeline) -> tuple[str, ...]:
    """The tiers below the device on which bytes are counted."""
    return find_used_tiers(timeline.program)[1:] if timeline.sizes is not None else ()


def _sort_curve(
    timeline: Timeline, times: NDArray[np.float64], values: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A step curve in order of time, without what lasts no time."""
    order = np.argsort(times, kind="stable")
    times, values = times[order] - timeline.start_time, values[order].astype(float)
    lasts = np.ones(len(times), bool)
    lasts[:-1] = np.diff(times) > 0
    return times[lasts], values[lasts]


class UnshardedIntervals(NamedTuple):
    """When which stages have whole weights, where these are not whole all the time: between an
    Unshard and its Reshard.

    Entries by rank, with times from the timeline's begin.  `row` tells those apart that are whole
    at once; there are `row_count` on the rank that has most.
    """

    rank: NDArray[np.int64]
    stage: NDArray[np.int64]
    local_stage: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    row: NDArray[np.int64]

    @classmethod
    def empty(cls) -> UnshardedIntervals:
        """No stage is ever whole, or nobody asks."""
        none, times = np.empty(0, np.int64), np.empty(0)
        return cls(none, none, none, times, times, none)

    @property
    def row_count(self) -> int:
        """How many stages of a rank are whole at once, at most."""
        return int(self.row.max(initial=-1)) + 1


def find_unsharded_intervals(timeline: Timeline) -> UnshardedIntervals:
    """The stages that are whole: a row for each slot of their weights, taken when it is free."""
    spans, program = timeline.spans, timeline.program
    if program.is_draft:
        return UnshardedIntervals.empty()
    lives = Dataflow.from_program(program).find_lifetimes(Value.UNSHARDED_PARAMS)
    rank, stage = (spans[name][lives.filled_at].astype(np.int64) for name in ("rank", "stage"))
    start, end = spans["start"][lives.filled_at], spans["end"][lives.freed_at]
    local, row = find_local_stages(timeline)[lives.filled_at], np.zeros(len(rank), np.int64)
    free: dict[int, list[float]] = {}
    for k in np.lexsort((start, rank)).tolist():
        rows = free.setdefault(int(rank[k]), [])
        row[k] = next((at for at, since in enumerate(rows) if since <= start[k]), len(rows))
        rows[row[k] : row[k] + 1] = [end[k]]
    return UnshardedIntervals(
        rank, stage, local, start - timeline.start_time, end - timeline.start_time, row
    )


class BinnedRun(NamedTuple):
    """A run from afar: kinds of boxes, as opcode and own stage, and how much of each is seen.

    `share[rank, column, kind]` is the part of a column of time that the rank's compute lane spends
    on a kind, from 0 to 1.
    """

    kinds: list[tuple[int, int]]
    share: NDArray[np.float64]


def bin_timeline(timeline: Timeline, columns: int) -> BinnedRun:
    """The run's span cut into equal columns; see `BinnedRun`."""
    ops = len(Opcode)
    key, kind = np.unique(
        find_local_stages(timeline) * ops + timeline.spans["op"], return_inverse=True
    )
    kinds = [(k % ops, k // ops) for k in key.tolist()]
    return BinnedRun(kinds, compute_shares(timeline, kind, len(key), columns))


def compute_shares(
    timeline: Timeline, span_kinds: NDArray[np.int64], kind_count: int, columns: int
) -> NDArray[np.float64]:
    """Which part of each column of time a rank's compute lane spends on each kind.

    `span_kinds` has an entry from 0 to kinds - 1 for every span.  The span is cut into equal
    columns; of a pair run together each half counts half.  Shape (ranks, columns, kinds), each from
    0 to 1.
    """
    spans, second = timeline.spans, timeline.is_second_of_pair
    weight = np.ones(len(spans))
    weight[second] = 0.5
    weight[np.flatnonzero(second) - 1] = 0.5
    share = np.zeros((timeline.ranks, columns, kind_count))
    edges = np.linspace(0, timeline.span, columns + 1)
    busy = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & (spans["end"] > spans["start"]))
    group = spans["rank"][busy].astype(np.int64) * kind_count + span_kinds[busy]
    order = np.lexsort((spans["start"][busy], group))
    busy, group = busy[order], group[order]
    for own in np.split(busy, np.flatnonzero(np.diff(group)) + 1) if len(busy) else ():
        start, end = (spans[at][own] - timeline.start_time for at in ("start", "end"))
        # Time spent until t: a line that rises from start to end, and is level in between.
        times = np.stack([start, end], 1).reshape(-1)
        spent = np.cumsum(np.stack([0 * start, weight[own] * (end - start)], 1).reshape(-1))
        until = np.interp(edges, np.maximum.accumulate(times), spent, 0.0, spent[-1])
        part = np.diff(until) / (timeline.span / columns)
        share[spans["rank"][own[0]], :, span_kinds[own[0]]] = np.clip(part, 0, 1)
    return share
