"""Write a Timeline as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

The events are complete slices (X), flows (s, f), counters (C) and metadata (M). Slices of one track
do not overlap. Times are in microseconds.

References:
    "Trace Event Format", the Catapult project; the Perfetto documentation of its import.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.memory.footprint import find_used_tiers
from schedir.errors import UsageError
from schedir.io.terminal_output import replace_nonfinite
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import LANES, SEND_OPS, TIERS, TRANSFER_OPS, Lane, Value
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.timeline import Timeline, require_timeline

Event = dict[str, Any]

# Unit of a timeline -> microseconds of a trace. A unit of cost ("") is shown as a millisecond.
MICROSECONDS_PER_UNIT: Final = {
    "s": 1e6,
    "": 1e3,
}
_MAX_NANOSECONDS: Final = 2**53  # A float can represent every integer up to this number.
_IDLE_TRACK: Final = "idle"


def to_json(timeline: Timeline) -> str:
    """Return a Timeline as a JSON trace, with one event per line.

    Each rank is a process, and its lanes are threads: compute, idle, and the communication lanes.
    The idle thread shows the cause of every idle interval. A lane of transfers has separate threads
    for incoming and outgoing transfers. The lane has more threads if transfers overlap. A message
    is an arrow. Activations in flight, unsharded stages and memory are counters. A pair of
    instructions that run together is one slice.

    Args:
        timeline: The timeline.

    Returns:
        The text of the file.

    Raises:
        UsageError: The timeline is too long for a trace in nanoseconds.
    """
    require_timeline(timeline, "timeline")
    facts = {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "causality_warning": timeline.causality_warning,
        "progress_model": timeline.progress_model,
        "unit": timeline.unit,
        "microseconds_per_unit": _find_time_scale(timeline),
    }
    lines = ",\n".join(_dump_json(event) for event in generate_events(timeline))
    return (
        f'{{"displayTimeUnit":"ms","otherData":{_dump_json(facts)},"traceEvents":[\n{lines}\n]}}\n'
    )


def _dump_json(value: object) -> str:
    return json.dumps(replace_nonfinite(value), separators=(",", ":"), allow_nan=False)


def _find_time_scale(timeline: Timeline) -> float:
    return MICROSECONDS_PER_UNIT.get(timeline.unit, MICROSECONDS_PER_UNIT[""])


def generate_events(timeline: Timeline) -> Iterator[Event]:
    """Yield all events of a trace: names first, then slices, arrows and counters.

    Args:
        timeline: The timeline.

    Yields:
        The events, as dictionaries of the trace format.

    Raises:
        UsageError: The timeline is too long for a trace in nanoseconds.
    """
    tracks = _Tracks(timeline)
    yield from tracks.name_events()
    yield from tracks.slice_events()
    yield from tracks.arrow_events()
    yield from tracks.counter_events()


class _Tracks:
    """The track of each span, and its start and end in integer nanoseconds."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.idle = idleness(timeline)
        self.start = self._to_nanoseconds(timeline.spans["start"])
        self.end = self._to_nanoseconds(timeline.spans["end"])
        # The second instruction of a pair shares the slice of the first.
        self.second_of_pair = timeline.is_second_of_pair
        # (rank, track) -> thread id. Thread ids are unique over all ranks, and differ from the
        # process ids, which are the ranks.
        self.thread_ids: dict[tuple[int, str], int] = {}
        self.span_threads = self._assign_spans()
        for rank in np.unique(self.idle["rank"]).tolist():
            self._assign_thread_id(rank, _IDLE_TRACK)

    def _to_nanoseconds(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return times as nanoseconds since the start of the timeline.

        All times are rounded in the same way, so that rounding does not make spans overlap.
        """
        with np.errstate(over="ignore"):
            elapsed = (times - self.timeline.start_time) * (1e3 * _find_time_scale(self.timeline))
        if len(elapsed) and not elapsed.max() < _MAX_NANOSECONDS:
            name = self.timeline.program.name
            raise UsageError(
                f"cannot write {name} for Perfetto: it has times above "
                f"{_MAX_NANOSECONDS} ns, the limit of Perfetto"
            )
        return np.rint(elapsed).astype(np.int64)

    def _assign_thread_id(self, rank: int, name: str) -> int:
        return self.thread_ids.setdefault((rank, name), self.timeline.ranks + len(self.thread_ids))

    def _assign_spans(self) -> list[int]:
        """Return, for each span, the first thread of its lane that is free when the span starts."""
        spans = self.timeline.spans
        # (rank, track) -> the time from which each thread is free.
        free_times: dict[tuple[int, str], list[int]] = defaultdict(list)
        thread_ids = [0] * len(spans)
        order = np.lexsort((self.end, self.start))
        columns = (spans["rank"], spans["lane"], spans["op"], self.start, self.end)
        rows = zip(order.tolist(), *(c[order].tolist() for c in columns), strict=True)
        for position, rank, lane, op, start, end in rows:
            if self.second_of_pair[position]:
                continue
            name = Lane(lane).name.lower()
            if op in TRANSFER_OPS:
                name += " out" if op in SEND_OPS else " in"
            threads = free_times[rank, name]
            k = next((k for k, free_time in enumerate(threads) if free_time <= start), len(threads))
            threads[k : k + 1] = [end]
            thread_ids[position] = self._assign_thread_id(rank, f"{name} {k + 1}" if k else name)
        return thread_ids

    # ------------------------------------------------------------ events

    def name_events(self) -> Iterator[Event]:
        """Yield the names and the order of ranks and threads: compute, idle, then transfers."""
        compute_row, *transfer_rows = LANES
        lanes = ((row.lane.name.lower(), row.has_messages) for row in transfer_rows)
        order = [compute_row.lane.name.lower(), _IDLE_TRACK]
        order += [
            f"{lane}{direction}"
            for lane, has_messages in lanes
            for direction in ([" in", " out"] if has_messages else [""])
        ]

        def sort_key(name: str) -> tuple[int, str]:
            return next(k for k, prefix in enumerate(order) if name.startswith(prefix)), name

        def make_metadata(event_name: str, pid: int, tid: int | None, **args: object) -> Event:
            thread = {} if tid is None else {"tid": tid}
            return {"ph": "M", "name": event_name, "pid": pid, **thread, "args": args}

        for rank in range(self.timeline.ranks):
            yield make_metadata("process_name", rank, None, name=f"rank {rank}")
            yield make_metadata("process_sort_index", rank, None, sort_index=rank)
            names = sorted((name for r, name in self.thread_ids if r == rank), key=sort_key)
            for k, name in enumerate(names):
                yield make_metadata("thread_name", rank, self.thread_ids[rank, name], name=name)
                yield make_metadata(
                    "thread_sort_index", rank, self.thread_ids[rank, name], sort_index=k
                )

    def slice_events(self) -> Iterator[Event]:
        """Yield a slice for each instruction, and for each idle interval."""
        timeline = self.timeline
        offsets = timeline.program.offsets.tolist()
        names = [str(i) for s in timeline.program.streams for i in s]
        ranks = timeline.spans["rank"].tolist()
        is_second = self.second_of_pair.tolist()
        is_first = [*is_second[1:], False]
        for k, (start, end) in enumerate(zip(self.start.tolist(), self.end.tolist(), strict=True)):
            if is_second[k]:
                continue
            name = f"{names[k]} & {names[k + 1]}" if is_first[k] else names[k]
            index = k - offsets[ranks[k]]
            yield _make_slice(ranks[k], self.span_threads[k], name, start, end, {"index": index})
        idle = self.idle
        columns = (idle["rank"], idle["cause"], idle["awaited_span"])
        times = (self._to_nanoseconds(idle["start"]), self._to_nanoseconds(idle["end"]))
        for rank, cause, awaits, start, end in zip(
            *(c.tolist() for c in (*columns, *times)), strict=True
        ):
            args = {} if awaits < 0 else {"awaits": f"{names[awaits]} on rank {ranks[awaits]}"}
            thread = self.thread_ids[rank, _IDLE_TRACK]
            yield _make_slice(rank, thread, IdleCause(cause).name.lower(), start, end, args)

    def arrow_events(self) -> Iterator[Event]:
        """Yield an arrow from every send to its receive."""
        partner = self.timeline.graph.partner
        op, rank = self.timeline.spans["op"], self.timeline.spans["rank"].tolist()
        for send in np.flatnonzero(np.isin(op, SEND_OPS) & (partner >= 0)).tolist():
            receive = int(partner[send])
            shared_fields = {"cat": "message", "name": "message", "id": send}
            start, end = (
                {"pid": rank[k], "tid": self.span_threads[k], "ts": self.start[k] / 1e3}
                for k in (send, receive)
            )
            yield {"ph": "s", **shared_fields, **start}
            yield {"ph": "f", "bp": "e", **shared_fields, **end}

    def counter_events(self) -> Iterator[Event]:
        """Yield the counters of each rank.

        The counters are the (stage, microbatch) pairs in flight, the unsharded stages if stages are
        sharded, and the bytes on each tier if the timeline has sizes.
        """

        def make_counter(name: str, rank: int, time: int, **args: float) -> Event:
            return {"ph": "C", "name": name, "pid": rank, "ts": time / 1e3, "args": args}

        for rank in range(self.timeline.ranks):
            times, counts = self.timeline.count_in_flight(rank)
            for time, count in zip(
                self._to_nanoseconds(times).tolist(), counts.tolist(), strict=True
            ):
                yield make_counter("in flight", rank, time, microbatches=count)
        yield from self._unsharded_events(make_counter)
        for tier in find_used_tiers(self.timeline.program) if self.timeline.sizes else ():
            name = "bytes" if tier == TIERS[0] else f"bytes on {tier}"
            for rank, curve in enumerate(self.timeline.memory_on(tier)):
                columns = zip(*(part.tolist() for part in curve.by_kind.values()), strict=True)
                for time, sizes in zip(
                    self._to_nanoseconds(curve.times).tolist(), columns, strict=True
                ):
                    yield make_counter(
                        name, rank, time, **dict(zip(curve.by_kind, sizes, strict=True))
                    )

    def _unsharded_events(self, make_counter: Callable[..., Event]) -> Iterator[Event]:
        """Yield the number of unsharded stages of each rank, from each Unshard to its Reshard."""
        if self.timeline.program.is_draft:
            return
        lives = Dataflow.from_program(self.timeline.program).find_lifetimes(Value.UNSHARDED_PARAMS)
        for rank in range(self.timeline.ranks):
            rank_slice = lives.get_rank_slice(rank)
            change_times = np.concatenate(
                [self.start[lives.filled_at[rank_slice]], self.end[lives.freed_at[rank_slice]]]
            )
            change = np.repeat([1, -1], len(change_times) // 2)
            times, first_indices = np.unique(np.sort(change_times), return_index=True)
            order = np.argsort(change_times, kind="stable")
            unsharded = (
                np.cumsum(change[order])[np.append(first_indices[1:], len(change_times)) - 1]
                if len(change_times)
                else change_times
            )
            for time, stages in zip(times.tolist(), unsharded.tolist(), strict=True):
                yield make_counter("unsharded weights", rank, time, stages=stages)


def _make_slice(pid: int, tid: int, name: str, start: int, end: int, args: Event) -> Event:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid,
        "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
    }  # fmt: skip
