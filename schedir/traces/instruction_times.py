"""Find when a rank ran each instruction, from profiler ranges and kernels.

On a CPU, the time of an instruction is the time of its range, without the waits for messages inside
the range. For example, torch's runtime waits for a receive inside of the F or B that needs it. A
range of Gloo gives the end of a wait. The wait starts at the end of the previous operator.

On a GPU, the ranges of the host only show which instruction launched which kernels. The time of an
instruction is the time of the kernels launched in its range. The launching thread is the thread of
the range or, for a backward, a thread of autograd. The time of a message is the time of NCCL's
kernels.
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

# (operator, True inside a forward or False inside a backward) -> opcode of the posted message.
_POSTED_ACTIONS: Final = {
    ("send", True): ACTIONS["SEND_F"],
    ("recv", True): ACTIONS["RECV_F"],
    ("send", False): ACTIONS["SEND_B"],
    ("recv", False): ACTIONS["RECV_B"],
}


class ExecutedSpan(NamedTuple):
    """The instructions of one profiler range, with their time by the clock of the host.

    Attributes:
        actions: The instructions.
        start: The start, in nanoseconds.
        end: The end, in nanoseconds. None for a posted message whose arrival is not recorded.
        wait_time: The time that the rank waited for messages within the profiler range, in
            nanoseconds. The time from `start` to `end` does not include these waits.
        is_joined: True if the instructions are in one group with the previous span (`&` in the text
            form).
        has_operators: True if an operator ran within the profiler range.
    """

    actions: tuple[NamedInstruction, ...]
    start: int
    end: int | None
    wait_time: int = 0
    is_joined: bool = False
    has_operators: bool = False


@dataclass
class _RangeItem:
    """A range, its instructions, and the messages posted inside of it."""

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
    """Return the spans of a rank between two times, split into repetitions of its schedule.

    Args:
        trace: The trace of the rank.
        interval: The start and the end, in nanoseconds by the clock of the host.
        default_stage: The stage of ranges that do not name a stage.

    Returns:
        One list for each repetition, in the order in which the host issued the instructions.

    Raises:
        TraceError: A range has an invalid name. Or the run used NCCL, and the trace has no kernels,
            so only the times of launches are recorded.
    """
    items, waits = _collect_items(trace, interval, default_stage)
    if items and trace.kernels is None and "nccl" in trace.backend and not trace.receive_waits:
        raise TraceError(
            f"{trace.path} is from a run over NCCL, but has no kernels: its ranges have only the "
            "times when the host launched instructions",
            hint="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    items = _add_posted_messages(trace, items)
    get_span = _make_gpu_timer(items, trace) if trace.kernels else _make_cpu_timer(trace, waits)
    repetitions: list[list[ExecutedSpan]] = []
    seen_actions: set[NamedInstruction] = set()
    for item in items:
        # An instruction occurs again, so the rank ran its schedule again.
        if not repetitions or not seen_actions.isdisjoint(item.actions):
            repetitions.append([])
            seen_actions.clear()
        seen_actions.update(item.actions)
        receives = [entry for entry in item.nested_messages if entry.actions[0].op in RECV_OPS]
        sends = [entry for entry in item.nested_messages if entry not in receives]
        repetitions[-1] += [
            get_span(entry)._replace(
                is_joined=entry.is_joined,
                has_operators=entry.is_compute and _has_operators(trace, entry.range),
            )
            for entry in (*receives, item, *sends)
        ]
    return (
        [_merge_batches(repetition) for repetition in repetitions] if trace.kernels else repetitions
    )


def _merge_batches(spans: list[ExecutedSpan]) -> list[ExecutedSpan]:
    """Set the time of all messages of a batch to the time of the batch's kernel.

    A batch has one kernel, which is launched with its last message.
    """
    batches: list[list[ExecutedSpan]] = []
    for span in spans:
        if not span.is_joined:
            batches.append([])
        batches[-1].append(span)
    merged_spans = []
    for batch in batches:
        kernels = [span for span in batch if span.end is not None]
        if batch[0].actions[0].op in TRANSFER_OPS and kernels:
            start = min(span.start for span in kernels)
            end = max(span.end or 0 for span in kernels)
            batch = [span._replace(start=start, end=end) for span in batch]
        merged_spans += batch
    return merged_spans


def _has_operators(trace: Trace, item_range: ProfilerRange) -> bool:
    """Return whether an operator ended in a range, on its thread or on a thread of autograd."""
    for thread in {item_range.thread, *trace.autograd_threads} & trace.op_end_times.keys():
        lo, hi = np.searchsorted(trace.op_end_times[thread], [item_range.start, item_range.end + 1])
        if lo < hi:
            return True
    return False


def _collect_items(
    trace: Trace, interval: tuple[int, int], default_stage: int
) -> tuple[list[_RangeItem], list[_RangeItem]]:
    """Return the ranges of instructions, and of waits for messages, that start in an interval."""
    items: list[_RangeItem] = []
    waits: list[_RangeItem] = []
    for item_range in trace.instruction_ranges:
        if not interval[0] <= item_range.start < interval[1]:
            continue
        mark = parse_range_name(item_range.name)
        actions = tuple(
            action._replace(stage=default_stage) if action.stage == UNSPECIFIED_STAGE else action
            for action in mark.actions
        )
        if actions:
            (waits if mark.is_wait else items).append(
                _RangeItem(actions, item_range, mark.is_joined)
            )
    return items, waits


def _add_posted_messages(trace: Trace, items: list[_RangeItem]) -> list[_RangeItem]:
    """If no range marks a message, add the messages posted inside of each forward and backward.

    If a message was posted outside of all forwards and backwards, its instruction is ambiguous.
    Then no messages are added.
    """
    if not items or any(action.op in TRANSFER_OPS for item in items for action in item.actions):
        return items
    first_start, last_end = items[0].range.start, max(item.range.end for item in items)
    threads = {item.range.thread for item in items}
    nested_items: list[list[_RangeItem]] = [[] for _ in items]
    starts = np.array([item.range.start for item in items])
    for message in trace.messages:
        if message.thread not in threads or not first_start <= message.start < last_end:
            continue
        k = int(np.searchsorted(starts, message.start, side="right")) - 1
        item = items[k]
        if message.end > item.range.end or not item.is_compute:
            return items
        op = _POSTED_ACTIONS[message.name, item.actions[0].op == FORWARD]
        action = item.actions[0]._replace(op=op)
        posted_messages = [
            nested_item for nested_item in nested_items[k] if nested_item.actions[0] == action
        ]
        if posted_messages:  # a boundary of several tensors is one message
            posted_messages[0].range = posted_messages[0].range._replace(end=message.end)
        else:
            nested_items[k].append(_RangeItem((action,), message))
    return [
        replace(item, nested_messages=tuple(nested))
        for item, nested in zip(items, nested_items, strict=True)
    ]


# ---------------------------------------------------------------- on a CPU


def _make_cpu_timer(trace: Trace, waits: list[_RangeItem]) -> Callable[[_RangeItem], ExecutedSpan]:
    """Return a function that finds the time of an item from the ranges of the host."""
    starts = np.array([wait_range.start for wait_range in trace.receive_waits], np.int64)
    ends = np.array([wait_range.end for wait_range in trace.receive_waits], np.int64)
    wait_ends = np.sort(ends)
    arrival_by_action: dict[NamedInstruction, int] = {}
    for wait in waits:
        for action in wait.actions:
            arrival_by_action[action] = max(arrival_by_action.get(action, 0), wait.range.end)
    marked_waits = sorted((wait.range.start, wait.range.end) for wait in waits)

    def get_span(item: _RangeItem) -> ExecutedSpan:
        start, end = item.range.start, item.range.end
        if item.is_compute:
            lo, hi = np.searchsorted(wait_ends, [start, end], side="right")
            wait_intervals = list(
                _list_wait_intervals(trace, item.range, wait_ends[lo:hi].tolist())
            )
            marked_inside = marked_waits[
                bisect_left(marked_waits, (start, 0)) : bisect_left(marked_waits, (end + 1, 0))
            ]
            wait_intervals += [
                (wait_start, wait_end) for wait_start, wait_end in marked_inside if wait_end <= end
            ]
            send_starts = [
                e.range.start for e in item.nested_messages if e.actions[0].op not in RECV_OPS
            ]
            compute_end = min(send_starts, default=end)
            wait_time = min(_union_length(wait_intervals), compute_end - start)
            return ExecutedSpan(item.actions, start + wait_time, compute_end, wait_time)
        if not any(action.op in RECV_OPS for action in item.actions):
            return ExecutedSpan(item.actions, start, end)
        lo, hi = np.searchsorted(starts, [start, end + 1])
        arrivals = [int(e) for e in ends[lo:hi]] + [
            arrival_by_action[a] for a in item.actions if a in arrival_by_action
        ]
        return ExecutedSpan(item.actions, start, max([end, *arrivals]) if arrivals else None)

    return get_span


def _list_wait_intervals(
    trace: Trace, item_range: ProfilerRange, wait_ends: list[int]
) -> Iterator[tuple[int, int]]:
    """Yield the waits inside of a range: each starts at the end of the previous operator."""
    op_ends = trace.op_end_times.get(item_range.thread, np.empty(0, np.int64))
    for end in wait_ends:
        k = int(np.searchsorted(op_ends, end)) - 1
        yield max(item_range.start, int(op_ends[k]) if k >= 0 else 0), end


def _union_length(intervals: list[tuple[int, int]]) -> int:
    total, covered_end = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, covered_end))
        covered_end = max(covered_end, end)
    return total


# ---------------------------------------------------------------- on a GPU


def _make_gpu_timer(items: list[_RangeItem], trace: Trace) -> Callable[[_RangeItem], ExecutedSpan]:
    """Return a function that finds the time of an item from the kernels launched in it."""
    kernels = trace.kernels
    assert kernels is not None
    all_items = [entry for item in items for entry in (item, *item.nested_messages)]
    owner = _find_owners(all_items, kernels, trace.autograd_threads)
    order = np.argsort(owner, kind="stable")
    lo = np.searchsorted(owner[order], np.arange(len(all_items)), side="left")
    hi = np.searchsorted(owner[order], np.arange(len(all_items)), side="right")
    item_number = {id(entry): k for k, entry in enumerate(all_items)}
    streams = _find_compute_streams(
        [order[lo[k] : hi[k]] for k, entry in enumerate(all_items) if entry.is_compute], kernels
    )
    is_on_stream = np.isin(kernels.stream, streams)
    last_end = 0  # the end of the last compute: a rank's computes do not overlap

    def get_span(item: _RangeItem) -> ExecutedSpan:
        nonlocal last_end
        k = item_number[id(item)]
        indices = order[lo[k] : hi[k]]
        is_nccl = kernels.is_nccl[indices]
        # Collectives of tensor-parallel ranks run between the other kernels of an instruction, so
        # the time of the instruction includes them. Copies on other streams are left out, because
        # they may run while the instruction waits.
        is_included = ~is_nccl if item.is_compute else is_nccl
        indices = indices[is_included] if is_included.any() else indices
        if item.is_compute and is_on_stream[indices].any():
            indices = indices[is_on_stream[indices]]
        if not len(indices):
            time = last_end or item.range.start
            is_message = item.actions[0].op in TRANSFER_OPS
            return ExecutedSpan(item.actions, time, None if is_message else time)
        start = int(kernels.start[indices].min())
        end = int(kernels.end[indices].max())
        if item.is_compute:
            start, end = max(start, last_end), max(end, last_end)
            last_end = end
        return ExecutedSpan(item.actions, start, end)

    return get_span


def _find_owners(items: list[_RangeItem], kernels: GpuKernels, autograd: set[int]) -> Ints:
    """Return the index of the innermost item that launched each kernel, or -1."""
    owner = np.full(len(kernels.launch_time), -1, np.int64)
    by_launch = np.argsort(kernels.launch_time, kind="stable")
    launch = kernels.launch_time[by_launch]
    for k, item in enumerate(items):  # nested items come after the outer ones
        lo, hi = np.searchsorted(launch, [item.range.start, item.range.end + 1])
        launched_kernels = by_launch[lo:hi]
        is_backward = any(action.op in BACKWARD_OPS for action in item.actions)
        threads = [item.range.thread, *(autograd if is_backward else ())]
        owner[launched_kernels[np.isin(kernels.launch_thread[launched_kernels], threads)]] = k
    return owner


def _find_compute_streams(kernels_per_item: list[Ints], kernels: GpuKernels) -> Ints:
    """Return the streams on which at least one instruction spends most of its kernel time."""
    durations = np.where(kernels.is_nccl, 0, kernels.end - kernels.start)
    compute_streams = set()
    for indices in kernels_per_item:
        streams, stream_indices = np.unique(kernels.stream[indices], return_inverse=True)
        if durations[indices].any():
            compute_streams.add(
                int(streams[np.bincount(stream_indices, durations[indices]).argmax()])
            )
    return np.array(sorted(compute_streams), np.int64)
