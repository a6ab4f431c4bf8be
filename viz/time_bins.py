"""Compute the memory curves of a chart, and the busy share of each column of the chart."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import find_used_tiers
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import Lane, Opcode, Value
from schedir.predict.timeline import Timeline


def find_local_stages(timeline: Timeline) -> NDArray[np.int64]:
    """Return the local stage of each span, from 0, shape (n,).

    Args:
        timeline: The timeline.
    """
    return timeline.program.shape.local_stage(timeline.spans["stage"], timeline.spans["rank"])


class MemoryCurve(NamedTuple):
    """The memory of each rank over time.

    Args:
        name: "in flight", "memory", or the name of a tier.
        unit: "B" for bytes, "" for a number of activations.
        steps: For each rank, times from the start of the timeline, and the memory from each time
            on.
        static_layers: Memory that is used during the full step. For each name, the top of its layer
            on each rank. The layers are stacked from the bottom.
    """

    name: str
    unit: str
    steps: list[tuple[NDArray[np.float64], NDArray[np.float64]]]
    static_layers: dict[str, NDArray[np.float64]] = {}  # noqa: RUF012


def compute_in_flight_curve(timeline: Timeline) -> MemoryCurve:
    """Return the curve of the (stage, mb) pairs in flight.

    Args:
        timeline: The timeline.
    """
    curves = (timeline.count_in_flight(rank) for rank in range(timeline.ranks))
    return MemoryCurve("in flight", "", [_sort_curve(timeline, times, n) for times, n in curves])


def compute_memory_curve(timeline: Timeline) -> MemoryCurve:
    """Return the curve of the bytes on the device. Without sizes, it counts activations.

    Args:
        timeline: The timeline.
    """
    steps = [_sort_curve(timeline, curve.times, curve.total) for curve in timeline.memory]
    floors, top = {}, np.zeros(timeline.ranks)
    for name, sizes in timeline.static_memory.items():
        floors[name] = top = top + sizes
    return MemoryCurve("memory", "" if timeline.sizes is None else "B", steps, floors)


def compute_tier_curves(timeline: Timeline) -> list[MemoryCurve]:
    """Return a curve of the bytes on each tier below the device that the program uses.

    Args:
        timeline: The timeline.
    """
    return [
        MemoryCurve(
            tier, "B", [_sort_curve(timeline, curve.times, curve.total) for curve in curves]
        )
        for tier, curves in (
            (tier, timeline.memory_on(tier)) for tier in list_lower_tiers(timeline)
        )
    ]


def list_lower_tiers(timeline: Timeline) -> tuple[str, ...]:
    """Return the tiers below the device that the program uses; none without sizes.

    Args:
        timeline: The timeline.
    """
    return find_used_tiers(timeline.program)[1:] if timeline.sizes is not None else ()


def _sort_curve(
    timeline: Timeline, times: NDArray[np.float64], values: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a step curve in the order of time, without steps of length 0."""
    order = np.argsort(times, kind="stable")
    times = times[order] - timeline.start_time
    values = values[order].astype(float)
    has_duration = np.ones(len(times), bool)
    has_duration[:-1] = np.diff(times) > 0
    return times[has_duration], values[has_duration]


class UnshardedIntervals(NamedTuple):
    """The intervals in which stages are unsharded, from each Unshard to its Reshard.

    There are none if stages are not sharded. Each array has one entry per interval, in order of
    rank.

    Args:
        rank: The rank.
        stage: The stage.
        local_stage: The local stage.
        start: The start, as a time since the start of the timeline.
        end: The end, as a time since the start of the timeline.
        row: The row of the interval in the chart, from 0. Intervals of a rank that overlap have
            different rows.
    """

    rank: NDArray[np.int64]
    stage: NDArray[np.int64]
    local_stage: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    row: NDArray[np.int64]

    @classmethod
    def empty(cls) -> UnshardedIntervals:
        """Return an empty set of intervals."""
        integers, times = np.empty(0, np.int64), np.empty(0)
        return cls(integers, integers, integers, times, times, integers)

    @property
    def row_count(self) -> int:
        """The largest number of stages of a rank that are unsharded at once."""
        return int(self.row.max(initial=-1)) + 1


def find_unsharded_intervals(timeline: Timeline) -> UnshardedIntervals:
    """Return the intervals in which stages are unsharded, each in the first row that is free.

    Args:
        timeline: The timeline.
    """
    spans, program = timeline.spans, timeline.program
    if program.is_draft:
        return UnshardedIntervals.empty()
    lives = Dataflow.from_program(program).find_lifetimes(Value.UNSHARDED_PARAMS)
    rank, stage = (spans[name][lives.filled_at].astype(np.int64) for name in ("rank", "stage"))
    start, end = spans["start"][lives.filled_at], spans["end"][lives.freed_at]
    local_stage, row = find_local_stages(timeline)[lives.filled_at], np.zeros(len(rank), np.int64)
    free_times: dict[int, list[float]] = {}
    for k in np.lexsort((start, rank)).tolist():
        rows = free_times.setdefault(int(rank[k]), [])
        row[k] = next(
            (row_index for row_index, free_time in enumerate(rows) if free_time <= start[k]),
            len(rows),
        )
        rows[row[k] : row[k] + 1] = [end[k]]
    return UnshardedIntervals(
        rank, stage, local_stage, start - timeline.start_time, end - timeline.start_time, row
    )


class BinnedRun(NamedTuple):
    """The compute of each rank in time bins of equal length. A chart has a column for each bin.

    Args:
        kinds: The kinds of boxes, as (opcode, local stage).
        share: The share of a bin that a rank's compute lane spends on a kind, from 0 to 1. The
            shape is (ranks, columns, kinds).
    """

    kinds: list[tuple[int, int]]
    share: NDArray[np.float64]


def bin_timeline(timeline: Timeline, columns: int) -> BinnedRun:
    """Divide the span of a run into equal columns, and return the share of each kind of box.

    Args:
        timeline: The run.
        columns: The number of columns.
    """
    ops = len(Opcode)
    key, kind = np.unique(
        find_local_stages(timeline) * ops + timeline.spans["op"], return_inverse=True
    )
    kinds = [(k % ops, k // ops) for k in key.tolist()]
    return BinnedRun(kinds, compute_shares(timeline, kind, len(key), columns))


def compute_shares(
    timeline: Timeline, span_kinds: NDArray[np.int64], kind_count: int, columns: int
) -> NDArray[np.float64]:
    """Divide a run into columns of equal time, and return the share of each kind in each column.

    The share is the part of the column's time in which the compute lane of a rank runs instructions
    of this kind. Each of two instructions that run together is counted as half.

    Args:
        timeline: The run.
        span_kinds: The kind of each span, from 0 to `kind_count` - 1, shape (n,).
        kind_count: The number of kinds.
        columns: The number of equal columns into which the span of the run is divided.

    Returns:
        Shares from 0 to 1, of shape (ranks, columns, kinds).
    """
    spans, is_second = timeline.spans, timeline.is_second_of_pair
    weight = np.ones(len(spans))
    weight[is_second] = 0.5
    weight[np.flatnonzero(is_second) - 1] = 0.5
    share = np.zeros((timeline.ranks, columns, kind_count))
    edges = np.linspace(0, timeline.span, columns + 1)
    indices = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & (spans["end"] > spans["start"]))
    group = spans["rank"][indices].astype(np.int64) * kind_count + span_kinds[indices]
    order = np.lexsort((spans["start"][indices], group))
    indices, group = indices[order], group[order]
    for group_indices in (
        np.split(indices, np.flatnonzero(np.diff(group)) + 1) if len(indices) else ()
    ):
        start, end = (
            spans[field][group_indices] - timeline.start_time for field in ("start", "end")
        )
        # The busy time up to a time t grows during each span, and is constant between spans.
        times = np.stack([start, end], 1).reshape(-1)
        busy_sums = np.cumsum(
            np.stack([0 * start, weight[group_indices] * (end - start)], 1).reshape(-1)
        )
        busy_until = np.interp(edges, np.maximum.accumulate(times), busy_sums, 0.0, busy_sums[-1])
        column_shares = np.diff(busy_until) / (timeline.span / columns)
        share[spans["rank"][group_indices[0]], :, span_kinds[group_indices[0]]] = np.clip(
            column_shares, 0, 1
        )
    return share
