"""Write a Timeline as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

Written after "Trace Event Format" (the Catapult project) and what Perfetto says of importing it:
complete slices (X) that do not overlap on a track, flows (s, f), counters (C), and metadata (M).
Times are in microseconds.
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
from schedir.io.terminal import replace_nonfinite
from schedir.ir.dataflow import Dataflow
from schedir.ir.isa.instructions import LANES, SEND_OPS, TIERS, TRANSFER_OPS, Lane, Value
from schedir.predict.bubble_causes import IdleCause, idleness
from schedir.predict.timeline import Timeline, require_timelines

Event = dict[str, Any]

MICROSECONDS_PER_UNIT: Final = {
    "s": 1e6,
    "": 1e3,
}  # of a unit; a unit of costs is shown as a millisecond
_MAX_NANOSECONDS: Final = 2**53  # nanoseconds: what a float tells apart
_IDLE_TRACK: Final = "idle"


def to_json(timeline: Timeline) -> str:
    """The whole trace: JSON, one event per line.

    A rank is a process, and its lanes are threads: compute, idle (the cause of every idle
    interval), and for each communication lane one thread or, where transfers overlap, several.
    A message is an arrow; what is in flight is a counter.  A pair run together is one slice.

    Raises UsageError for a run that is too long to be told in nanoseconds.
    """
    require_timelines([timeline])
    facts = {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "doubt": timeline.causality_warning,
        "model": timeline.progress_model,
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
    """All events: names first, then slices, arrows and counters."""
    sheet = _Tracks(timeline)
    yield from sheet.name_events()
    yield from sheet.slice_events()
    yield from sheet.arrow_events()
    yield from sheet.counter_events()


class _Tracks:
    """On which track each span is shown, and when, in whole nanoseconds."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, spans = timeline, timeline.spans
        self.idle = idleness(timeline)
        self.start, self.end = (
            self._to_nanoseconds(spans["start"]),
            self._to_nanoseconds(spans["end"]),
        )
        self.second_of_pair = timeline.is_second_of_pair  # shown with the first
        # Threads have a number of their own across all ranks, which is no rank's.
        self.thread_ids: dict[tuple[int, str], int] = {}
        self.span_threads = self._assign_spans()
        for rank in np.unique(self.idle["rank"]).tolist():
            self._assign_thread_id(rank, _IDLE_TRACK)

    def _to_nanoseconds(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Rounded alike everywhere, so that what did not overlap still does not."""
        with np.errstate(over="ignore"):
            since = (times - self.timeline.start_time) * (1e3 * _find_time_scale(self.timeline))
        if len(since) and not since.max() < _MAX_NANOSECONDS:
            raise UsageError(f"{self.timeline.program.name} is too long to be told in nanoseconds")
        return np.rint(since).astype(np.int64)

    def _assign_thread_id(self, rank: int, name: str) -> int:
        return self.thread_ids.setdefault((rank, name), self.timeline.ranks + len(self.thread_ids))

    def _assign_spans(self) -> list[int]:
        """The thread of each span: the first of its lane's that is free again."""
        spans = self.timeline.spans
        free: dict[tuple[int, str], list[int]] = defaultdict(list)  # when each thread is
        on = [0] * len(spans)
        order = np.lexsort((self.end, self.start))
        columns = (spans["rank"], spans["lane"], spans["op"], self.start, self.end)
        rows = zip(order.tolist(), *(c[order].tolist() for c in columns), strict=True)
        for at, rank, lane, op, start, end in rows:
            if self.second_of_pair[at]:
                continue
            name = Lane(lane).name.lower()
            if op in TRANSFER_OPS:
                name += " out" if op in SEND_OPS else " in"
            threads = free[rank, name]
            k = next((k for k, since in enumerate(threads) if since <= start), len(threads))
            threads[k : k + 1] = [end]
            on[at] = self._assign_thread_id(rank, f"{name} {k + 1}" if k else name)
        return on

    # ------------------------------------------------------------ events

    def name_events(self) -> Iterator[Event]:
        """Ranks in order; in each, compute first, then what it waits for, then its messages."""
        first, *others = LANES
        ways = ((row.lane.name.lower(), row.has_messages) for row in others)
        order = [first.lane.name.lower(), _IDLE_TRACK]
        order += [
            f"{lane}{way}" for lane, wire in ways for way in ([" in", " out"] if wire else [""])
        ]

        def place(name: str) -> tuple[int, str]:
            return next(k for k, one in enumerate(order) if name.startswith(one)), name

        def about(what: str, pid: int, tid: int | None, **args: object) -> Event:
            thread = {} if tid is None else {"tid": tid}
            return {"ph": "M", "name": what, "pid": pid, **thread, "args": args}

        for rank in range(self.timeline.ranks):
            yield about("process_name", rank, None, name=f"rank {rank}")
            yield about("process_sort_index", rank, None, sort_index=rank)
            own = sorted((name for r, name in self.thread_ids if r == rank), key=place)
            for k, name in enumerate(own):
                yield about("thread_name", rank, self.thread_ids[rank, name], name=name)
                yield about("thread_sort_index", rank, self.thread_ids[rank, name], sort_index=k)

    def slice_events(self) -> Iterator[Event]:
        """What runs, and what each rank waits for."""
        timeline = self.timeline
        offsets = timeline.program.offsets.tolist()
        names = [str(i) for s in timeline.program.streams for i in s]
        ranks = timeline.spans["rank"].tolist()
        second, joint = self.second_of_pair.tolist(), [*self.second_of_pair[1:].tolist(), False]
        for at, (start, end) in enumerate(zip(self.start.tolist(), self.end.tolist(), strict=True)):
            if second[at]:
                continue
            name = f"{names[at]} & {names[at + 1]}" if joint[at] else names[at]
            index = at - offsets[ranks[at]]
            yield _make_slice(ranks[at], self.span_threads[at], name, start, end, {"index": index})
        idle = self.idle
        columns = (idle["rank"], idle["cause"], idle["awaits"])
        times = (self._to_nanoseconds(idle["start"]), self._to_nanoseconds(idle["end"]))
        for rank, cause, awaits, start, end in zip(
            *(c.tolist() for c in (*columns, *times)), strict=True
        ):
            why = {} if awaits < 0 else {"awaits": f"{names[awaits]} on rank {ranks[awaits]}"}
            thread = self.thread_ids[rank, _IDLE_TRACK]
            yield _make_slice(rank, thread, IdleCause(cause).name.lower(), start, end, why)

    def arrow_events(self) -> Iterator[Event]:
        """From every send to its receive."""
        partner = self.timeline.graph.partner
        op, rank = self.timeline.spans["op"], self.timeline.spans["rank"].tolist()
        for at in np.flatnonzero(np.isin(op, SEND_OPS) & (partner >= 0)).tolist():
            to = int(partner[at])
            both = {"cat": "message", "name": "message", "id": at}
            start = {"pid": rank[at], "tid": self.span_threads[at], "ts": self.start[at] / 1e3}
            end = {"pid": rank[to], "tid": self.span_threads[to], "ts": self.start[to] / 1e3}
            yield {"ph": "s", **both, **start}
            yield {"ph": "f", "bp": "e", **both, **end}

    def counter_events(self) -> Iterator[Event]:
        """How many (stage, microbatch) each rank holds, and of how many stages the weights are
        whole, where they are gathered; where sizes are known, also bytes, on each tier."""

        def counter(name: str, rank: int, at: int, **args: float) -> Event:
            return {"ph": "C", "name": name, "pid": rank, "ts": at / 1e3, "args": args}

        for rank in range(self.timeline.ranks):
            times, counts = self.timeline.count_in_flight(rank)
            for at, count in zip(
                self._to_nanoseconds(times).tolist(), counts.tolist(), strict=True
            ):
                yield counter("in flight", rank, at, microbatches=count)
        yield from self._unsharded_events(counter)
        for tier in find_used_tiers(self.timeline.program) if self.timeline.sizes else ():
            name = "bytes" if tier == TIERS[0] else f"bytes on {tier}"
            for rank, curve in enumerate(self.timeline.memory_on(tier)):
                columns = zip(*(part.tolist() for part in curve.by_kind.values()), strict=True)
                for at, sizes in zip(
                    self._to_nanoseconds(curve.times).tolist(), columns, strict=True
                ):
                    yield counter(name, rank, at, **dict(zip(curve.by_kind, sizes, strict=True)))

    def _unsharded_events(self, make_counter: Callable[..., Event]) -> Iterator[Event]:
        """Of how many stages of each rank the weights are whole, from their Unshard on."""
        if self.timeline.program.is_draft:
            return
        lives = Dataflow.from_program(self.timeline.program).find_lifetimes(Value.UNSHARDED_PARAMS)
        for rank in range(self.timeline.ranks):
            own = lives.get_rank_slice(rank)
            at = np.concatenate([self.start[lives.filled_at[own]], self.end[lives.freed_at[own]]])
            change = np.repeat([1, -1], len(at) // 2)
            times, last = np.unique(np.sort(at), return_index=True)
            order = np.argsort(at, kind="stable")
            held = np.cumsum(change[order])[np.append(last[1:], len(at)) - 1] if len(at) else at
            for when, stages in zip(times.tolist(), held.tolist(), strict=True):
                yield make_counter("whole weights", rank, when, stages=stages)


def _make_slice(pid: int, tid: int, name: str, start: int, end: int, args: Event) -> Event:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid,
        "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
    }  # fmt: skip
