"""Find when a rank ran each instruction, from profiler ranges and kernels.

On a CPU an instruction's time is that of its range, but what the host waits in it for a message is
not: torch's runtime waits for a receive inside of the F or B that needs it.  Gloo says until when
somebody waited, and the last operator before says since when.

On a GPU the host's ranges say only who launched what.  An instruction's time is that of the kernels
launched in its range, by the thread of the range or, for a backward, by those of autograd; a
message's is that of NCCL's kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from schedir.errors import TraceError
from schedir.io.profiler_range_names import UNSPECIFIED_STAGE, NamedInstruction, parse_range_name
from schedir.io.torch_csv import ACTIONS
from schedir.ir.isa.instructions import BACKWARD_OPS, COMPUTE_OPS, FORWARD, RECV_OPS, TRANSFER_OPS
from schedir.traces.kineto import GpuKernels, Ints, ProfilerRange, Trace

# What a message is that is posted inside of a forward, and of a backward.
_POSTED_ACTIONS: Final = {
    ("send", True): ACTIONS["SEND_F"],
    ("recv", True): ACTIONS["RECV_F"],
    ("send", False): ACTIONS["SEND_B"],
    ("recv", False): ACTIONS["RECV_B"],
}


class ExecutedSpan(NamedTuple):
    """What ran as one, from `start` to `end` in nanoseconds by the clock of the host.

    With `is_joined` it ran as one with what was seen before it.
    `wait_time` nanoseconds of its range were a wait for messages, and are not in it.  Of a message
    that was posted, and of which nothing says when it was there, `end` is None.  `has_operators`
    says whether an operator ran in its range.
    """

    actions: tuple[NamedInstruction, ...]
    start: int
    end: int | None
    wait_time: int = 0
    is_joined: bool = False
    has_operators: bool = False


@dataclass
class _RangeItem:
    """A range, what it says, and of a forward or backward the messages posted inside."""

    actions: tuple[NamedInstruction, ...]
    range: ProfilerRange
    is_joined: bool = False
    nested_messages: tuple[_RangeItem, ...] = ()

    @property
    def is_compute(self) -> bool:
        return self.actions[0].op in COMPUTE_OPS


def split_repetitions(
    trace: Trace, interval: tuple[int, int], default_stage: int
) -> list[list[ExecutedSpan]]:
    """What a rank did between two times, once for each time that it ran its schedule.

    `default_stage` is that of marks which say none.  Each list is in the order in which the host
    issued.

    Raises TraceError for a mark that says nothing that is known, and for a run over NCCL without
    kernels, of which only launches are there.
    """
    items, waits = _collect_items(trace, interval, default_stage)
    if items and trace.kernels is None and "nccl" in trace.backend and not trace.receive_waits:
        raise TraceError(
            f"{trace.path} is of a run over NCCL, and has no kernels: its ranges say when the host "
            "launched them, not when they ran",
            hint="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    items = _add_posted_messages(trace, items)
    when = _make_gpu_timer(items, trace) if trace.kernels else _make_cpu_timer(trace, waits)
    parts: list[list[ExecutedSpan]] = []
    known: set[NamedInstruction] = set()
    for item in items:
        if not parts or not known.isdisjoint(item.actions):  # a step ran its schedule again
            parts.append([])
            known.clear()
        known.update(item.actions)
        received = [each for each in item.nested_messages if each.actions[0].op in RECV_OPS]
        sent = [each for each in item.nested_messages if each not in received]
        parts[-1] += [
            when(each)._replace(
                is_joined=each.is_joined,
                has_operators=each.is_compute and _has_operators(trace, each.range),
            )
            for each in (*received, item, *sent)
        ]
    return [_merge_batches(part) for part in parts] if trace.kernels else parts


def _merge_batches(spans: list[ExecutedSpan]) -> list[ExecutedSpan]:
    """Messages that are issued as one have one kernel, which was launched with the last of them."""
    batches: list[list[ExecutedSpan]] = []
    for seen in spans:
        if not seen.is_joined:
            batches.append([])
        batches[-1].append(seen)
    found = []
    for batch in batches:
        kernels = [seen for seen in batch if seen.end is not None]
        if batch[0].actions[0].op in TRANSFER_OPS and kernels:
            began = min(seen.start for seen in kernels)
            ended = max(seen.end or 0 for seen in kernels)
            batch = [seen._replace(start=began, end=ended) for seen in batch]
        found += batch
    return found


def _has_operators(trace: Trace, item_range: ProfilerRange) -> bool:
    """Whether an operator ended in a range, on its thread or on one of autograd."""
    for thread in {item_range.thread, *trace.autograd_threads} & trace.op_end_times.keys():
        lo, hi = np.searchsorted(trace.op_end_times[thread], [item_range.start, item_range.end + 1])
        if lo < hi:
            return True
    return False


def _collect_items(
    trace: Trace, interval: tuple[int, int], default_stage: int
) -> tuple[list[_RangeItem], list[_RangeItem]]:
    """What is marked between two times, and the marked waits for messages."""
    items: list[_RangeItem] = []
    waits: list[_RangeItem] = []
    for each in trace.instruction_ranges:
        if not interval[0] <= each.start < interval[1]:
            continue
        mark = parse_range_name(each.name)
        actions = tuple(
            action._replace(stage=default_stage) if action.stage == UNSPECIFIED_STAGE else action
            for action in mark.actions
        )
        if actions:
            (waits if mark.is_wait else items).append(_RangeItem(actions, each, mark.is_joined))
    return items, waits


def _add_posted_messages(trace: Trace, items: list[_RangeItem]) -> list[_RangeItem]:
    """Forwards and backwards with the messages posted inside, where messages are not marked.

    If some are posted outside, which are whose is not known, and none is told.
    """
    if not items or any(action.op in TRANSFER_OPS for item in items for action in item.actions):
        return items
    first, last = items[0].range.start, max(item.range.end for item in items)
    threads = {item.range.thread for item in items}
    inside: list[list[_RangeItem]] = [[] for _ in items]
    starts = np.array([item.range.start for item in items])
    for each in trace.messages:
        if each.thread not in threads or not first <= each.start < last:
            continue
        k = int(np.searchsorted(starts, each.start, side="right")) - 1
        item = items[k]
        if each.end > item.range.end or not item.is_compute:
            return items
        op = _POSTED_ACTIONS[each.name, item.actions[0].op == FORWARD]
        action = item.actions[0]._replace(op=op)
        same = [one for one in inside[k] if one.actions[0] == action]
        if same:  # a boundary of several tensors is one message
            same[0].range = same[0].range._replace(end=each.end)
        else:
            inside[k].append(_RangeItem((action,), each))
    return [
        replace(item, nested_messages=tuple(nested))
        for item, nested in zip(items, inside, strict=True)
    ]


# ---------------------------------------------------------------- on a CPU


def _make_cpu_timer(trace: Trace, waits: list[_RangeItem]) -> Callable[[_RangeItem], ExecutedSpan]:
    """When each item was under way, by the host's ranges."""
    starts = np.array([each.start for each in trace.receive_waits], np.int64)
    ends = np.array([each.end for each in trace.receive_waits], np.int64)
    told = np.sort(ends)
    awaited: dict[NamedInstruction, int] = {}
    for wait in waits:
        for action in wait.actions:
            awaited[action] = max(awaited.get(action, 0), wait.range.end)
    marked = sorted((wait.range.start, wait.range.end) for wait in waits)

    def when(item: _RangeItem) -> ExecutedSpan:
        start, end = item.range.start, item.range.end
        if item.is_compute:
            lo, hi = np.searchsorted(told, [start, end], side="right")
            spells = list(_list_wait_intervals(trace, item.range, told[lo:hi].tolist()))
            inside = marked[bisect_left(marked, (start, 0)) : bisect_left(marked, (end + 1, 0))]
            spells += [(since, until) for since, until in inside if until <= end]
            sent = [e.range.start for e in item.nested_messages if e.actions[0].op not in RECV_OPS]
            stop = min(sent, default=end)
            waited = min(_union_length(spells), stop - start)
            return ExecutedSpan(item.actions, start + waited, stop, waited)
        if not any(action.op in RECV_OPS for action in item.actions):
            return ExecutedSpan(item.actions, start, end)
        lo, hi = np.searchsorted(starts, [start, end + 1])
        seen = [int(e) for e in ends[lo:hi]] + [awaited[a] for a in item.actions if a in awaited]
        return ExecutedSpan(item.actions, start, max([end, *seen]) if seen else None)

    return when


def _list_wait_intervals(
    trace: Trace, item_range: ProfilerRange, wait_ends: list[int]
) -> Iterator[tuple[int, int]]:
    """The waits that ended at these times inside of a range: each since the operator before."""
    ops = trace.op_end_times.get(item_range.thread, np.empty(0, np.int64))
    for end in wait_ends:
        k = int(np.searchsorted(ops, end)) - 1
        yield max(item_range.start, int(ops[k]) if k >= 0 else 0), end


def _union_length(intervals: list[tuple[int, int]]) -> int:
    """How long some intervals are, together."""
    total, over = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, over))
        over = max(over, end)
    return total


# ---------------------------------------------------------------- on a GPU


def _make_gpu_timer(items: list[_RangeItem], trace: Trace) -> Callable[[_RangeItem], ExecutedSpan]:
    """When each item was under way, by what was launched in it."""
    kernels = trace.kernels
    assert kernels is not None
    flat = [each for item in items for each in (item, *item.nested_messages)]
    owner = _find_owners(flat, kernels, trace.autograd_threads)
    order = np.argsort(owner, kind="stable")
    lo = np.searchsorted(owner[order], np.arange(len(flat)), side="left")
    hi = np.searchsorted(owner[order], np.arange(len(flat)), side="right")
    number = {id(each): k for k, each in enumerate(flat)}
    streams = _find_compute_streams(
        [order[lo[k] : hi[k]] for k, each in enumerate(flat) if each.is_compute], kernels
    )
    on_stream = np.isin(kernels.stream, streams)
    free = 0  # when the last compute ended: no GPU of ours computes two things at once

    def when(item: _RangeItem) -> ExecutedSpan:
        nonlocal free
        k = number[id(item)]
        own = order[lo[k] : hi[k]]
        of_nccl = kernels.is_nccl[own]
        # A collective among tensor-parallel ranks lies between an instruction's other kernels.
        # What another stream fetches ahead or brings away does not: it may run while this waits.
        wanted = ~of_nccl if item.is_compute else of_nccl
        own = own[wanted] if wanted.any() else own
        if item.is_compute and on_stream[own].any():
            own = own[on_stream[own]]
        if not len(own):
            at = free or item.range.start
            message = item.actions[0].op in TRANSFER_OPS
            return ExecutedSpan(item.actions, at, None if message else at)
        start, end = int(kernels.start[own].min()), int(kernels.end[own].max())
        if item.is_compute:
            start, end = max(start, free), max(end, free)
            free = end
        return ExecutedSpan(item.actions, start, end)

    return when


def _find_owners(items: list[_RangeItem], kernels: GpuKernels, autograd: set[int]) -> Ints:
    """Which item launched each kernel, or -1; the innermost, of those that lie in each other."""
    owner = np.full(len(kernels.launch_time), -1, np.int64)
    by_launch = np.argsort(kernels.launch_time, kind="stable")
    launch = kernels.launch_time[by_launch]
    for k, item in enumerate(items):  # what is nested comes behind what it is nested in
        lo, hi = np.searchsorted(launch, [item.range.start, item.range.end + 1])
        own = by_launch[lo:hi]
        back = any(action.op in BACKWARD_OPS for action in item.actions)
        threads = [item.range.thread, *(autograd if back else ())]
        owner[own[np.isin(kernels.launch_thread[own], threads)]] = k
    return owner


def _find_compute_streams(kernels_per_item: list[Ints], kernels: GpuKernels) -> Ints:
    """The streams that compute: those on which some instruction spends most of its time."""
    took = np.where(kernels.is_nccl, 0, kernels.end - kernels.start)
    found = set()
    for own in kernels_per_item:
        streams, at = np.unique(kernels.stream[own], return_inverse=True)
        if took[own].any():
            found.add(int(streams[np.bincount(at, took[own]).argmax()]))
    return np.array(sorted(found), np.int64)
