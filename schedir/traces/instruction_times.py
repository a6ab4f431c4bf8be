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
from schedir.io.profiler_range_names import OF_RANK, NamedInstruction, read_mark
from schedir.io.torch_csv import ACTIONS
from schedir.ir.isa.instructions import BACKWARDS, COMPUTE, FORWARD, RECEIVES, TRANSFERS
from schedir.traces.kineto import GpuKernels, Ints, ProfilerRange, Trace

# What a message is that is posted inside of a forward, and of a backward.
_POSTED: Final = {
    ("send", True): ACTIONS["SEND_F"],
    ("recv", True): ACTIONS["RECV_F"],
    ("send", False): ACTIONS["SEND_B"],
    ("recv", False): ACTIONS["RECV_B"],
}


class ExecutedSpan(NamedTuple):
    """What ran as one, from `began` to `ended` in nanoseconds by the clock of the host.

    With `joined` it ran as one with what was seen before it.
    `waited` nanoseconds of its range were a wait for messages, and are not in it.  Of a message
    that was posted, and of which nothing says when it was there, `ended` is None.  `ran` says
    whether an operator ran in its range.
    """

    actions: tuple[NamedInstruction, ...]
    began: int
    ended: int | None
    waited: int = 0
    joined: bool = False
    ran: bool = False


@dataclass
class _RangeItem:
    """A range, what it says, and of a forward or backward the messages posted inside."""

    actions: tuple[NamedInstruction, ...]
    range: ProfilerRange
    joined: bool = False
    nested: tuple[_RangeItem, ...] = ()

    @property
    def computes(self) -> bool:
        return self.actions[0].op in COMPUTE


def repetitions(trace: Trace, within: tuple[int, int], stage: int) -> list[list[ExecutedSpan]]:
    """What a rank did between two times, once for each time that it ran its schedule.

    `stage` is that of marks which say none.  Each list is in the order in which the host issued.

    Raises TraceError for a mark that says nothing that is known, and for a run over NCCL without
    kernels, of which only launches are there.
    """
    items, waits = _items(trace, within, stage)
    if items and trace.kernels is None and "nccl" in trace.backend and not trace.waited:
        raise TraceError(
            f"{trace.path} is of a run over NCCL, and has no kernels: its ranges say when the host "
            "launched them, not when they ran",
            hint="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    items = _with_posted(trace, items)
    when = _on_gpu(items, trace) if trace.kernels else _on_cpu(trace, waits)
    parts: list[list[ExecutedSpan]] = []
    known: set[NamedInstruction] = set()
    for item in items:
        if not parts or not known.isdisjoint(item.actions):  # a step ran its schedule again
            parts.append([])
            known.clear()
        known.update(item.actions)
        received = [each for each in item.nested if each.actions[0].op in RECEIVES]
        sent = [each for each in item.nested if each not in received]
        parts[-1] += [
            when(each)._replace(joined=each.joined, ran=each.computes and _ran(trace, each.range))
            for each in (*received, item, *sent)
        ]
    return [_batched(part) for part in parts] if trace.kernels else parts


def _batched(part: list[ExecutedSpan]) -> list[ExecutedSpan]:
    """Messages that are issued as one have one kernel, which was launched with the last of them."""
    batches: list[list[ExecutedSpan]] = []
    for seen in part:
        if not seen.joined:
            batches.append([])
        batches[-1].append(seen)
    found = []
    for batch in batches:
        kernels = [seen for seen in batch if seen.ended is not None]
        if batch[0].actions[0].op in TRANSFERS and kernels:
            began = min(seen.began for seen in kernels)
            ended = max(seen.ended or 0 for seen in kernels)
            batch = [seen._replace(began=began, ended=ended) for seen in batch]
        found += batch
    return found


def _ran(trace: Trace, within: ProfilerRange) -> bool:
    """Whether an operator ended in a range, on its thread or on one of autograd."""
    for thread in {within.thread, *trace.autograd} & trace.ops.keys():
        lo, hi = np.searchsorted(trace.ops[thread], [within.start, within.end + 1])
        if lo < hi:
            return True
    return False


def _items(
    trace: Trace, within: tuple[int, int], stage: int
) -> tuple[list[_RangeItem], list[_RangeItem]]:
    """What is marked between two times, and the marked waits for messages."""
    items: list[_RangeItem] = []
    waits: list[_RangeItem] = []
    for each in trace.marked:
        if not within[0] <= each.start < within[1]:
            continue
        mark = read_mark(each.name)
        actions = tuple(
            action._replace(stage=stage) if action.stage == OF_RANK else action
            for action in mark.actions
        )
        if actions:
            (waits if mark.waits else items).append(_RangeItem(actions, each, mark.joined))
    return items, waits


def _with_posted(trace: Trace, items: list[_RangeItem]) -> list[_RangeItem]:
    """Forwards and backwards with the messages posted inside, where messages are not marked.

    If some are posted outside, which are whose is not known, and none is told.
    """
    if not items or any(action.op in TRANSFERS for item in items for action in item.actions):
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
        if each.end > item.range.end or not item.computes:
            return items
        op = _POSTED[each.name, item.actions[0].op == FORWARD]
        action = item.actions[0]._replace(op=op)
        same = [one for one in inside[k] if one.actions[0] == action]
        if same:  # a boundary of several tensors is one message
            same[0].range = same[0].range._replace(end=each.end)
        else:
            inside[k].append(_RangeItem((action,), each))
    return [replace(item, nested=tuple(nested)) for item, nested in zip(items, inside, strict=True)]


# ---------------------------------------------------------------- on a CPU


def _on_cpu(trace: Trace, waits: list[_RangeItem]) -> Callable[[_RangeItem], ExecutedSpan]:
    """When each item was under way, by the host's ranges."""
    starts = np.array([each.start for each in trace.waited], np.int64)
    ends = np.array([each.end for each in trace.waited], np.int64)
    told = np.sort(ends)
    awaited: dict[NamedInstruction, int] = {}
    for wait in waits:
        for action in wait.actions:
            awaited[action] = max(awaited.get(action, 0), wait.range.end)
    marked = sorted((wait.range.start, wait.range.end) for wait in waits)

    def when(item: _RangeItem) -> ExecutedSpan:
        start, end = item.range.start, item.range.end
        if item.computes:
            lo, hi = np.searchsorted(told, [start, end], side="right")
            spells = list(_since(trace, item.range, told[lo:hi].tolist()))
            inside = marked[bisect_left(marked, (start, 0)) : bisect_left(marked, (end + 1, 0))]
            spells += [(since, until) for since, until in inside if until <= end]
            sent = [e.range.start for e in item.nested if e.actions[0].op not in RECEIVES]
            stop = min(sent, default=end)
            waited = min(_length(spells), stop - start)
            return ExecutedSpan(item.actions, start + waited, stop, waited)
        if not any(action.op in RECEIVES for action in item.actions):
            return ExecutedSpan(item.actions, start, end)
        lo, hi = np.searchsorted(starts, [start, end + 1])
        seen = [int(e) for e in ends[lo:hi]] + [awaited[a] for a in item.actions if a in awaited]
        return ExecutedSpan(item.actions, start, max([end, *seen]) if seen else None)

    return when


def _since(trace: Trace, within: ProfilerRange, until: list[int]) -> Iterator[tuple[int, int]]:
    """The waits that ended at these times inside of a range: each since the operator before."""
    ops = trace.ops.get(within.thread, np.empty(0, np.int64))
    for end in until:
        k = int(np.searchsorted(ops, end)) - 1
        yield max(within.start, int(ops[k]) if k >= 0 else 0), end


def _length(spells: list[tuple[int, int]]) -> int:
    """How long some intervals are, together."""
    total, over = 0, 0
    for start, end in sorted(spells):
        total += max(0, end - max(start, over))
        over = max(over, end)
    return total


# ---------------------------------------------------------------- on a GPU


def _on_gpu(items: list[_RangeItem], trace: Trace) -> Callable[[_RangeItem], ExecutedSpan]:
    """When each item was under way, by what was launched in it."""
    kernels = trace.kernels
    assert kernels is not None
    flat = [each for item in items for each in (item, *item.nested)]
    owner = _owners(flat, kernels, trace.autograd)
    order = np.argsort(owner, kind="stable")
    lo = np.searchsorted(owner[order], np.arange(len(flat)), side="left")
    hi = np.searchsorted(owner[order], np.arange(len(flat)), side="right")
    number = {id(each): k for k, each in enumerate(flat)}
    streams = _streams(
        [order[lo[k] : hi[k]] for k, each in enumerate(flat) if each.computes], kernels
    )
    on_stream = np.isin(kernels.stream, streams)
    free = 0  # when the last compute ended: no GPU of ours computes two things at once

    def when(item: _RangeItem) -> ExecutedSpan:
        nonlocal free
        k = number[id(item)]
        own = order[lo[k] : hi[k]]
        of_nccl = kernels.nccl[own]
        # A collective among tensor-parallel ranks lies between an instruction's other kernels.
        # What another stream fetches ahead or brings away does not: it may run while this waits.
        wanted = ~of_nccl if item.computes else of_nccl
        own = own[wanted] if wanted.any() else own
        if item.computes and on_stream[own].any():
            own = own[on_stream[own]]
        if not len(own):
            at = free or item.range.start
            message = item.actions[0].op in TRANSFERS
            return ExecutedSpan(item.actions, at, None if message else at)
        start, end = int(kernels.start[own].min()), int(kernels.end[own].max())
        if item.computes:
            start, end = max(start, free), max(end, free)
            free = end
        return ExecutedSpan(item.actions, start, end)

    return when


def _owners(items: list[_RangeItem], kernels: GpuKernels, autograd: set[int]) -> Ints:
    """Which item launched each kernel, or -1; the innermost, of those that lie in each other."""
    owner = np.full(len(kernels.launch), -1, np.int64)
    by_launch = np.argsort(kernels.launch, kind="stable")
    launch = kernels.launch[by_launch]
    for k, item in enumerate(items):  # what is nested comes behind what it is nested in
        lo, hi = np.searchsorted(launch, [item.range.start, item.range.end + 1])
        own = by_launch[lo:hi]
        back = any(action.op in BACKWARDS for action in item.actions)
        threads = [item.range.thread, *(autograd if back else ())]
        owner[own[np.isin(kernels.thread[own], threads)]] = k
    return owner


def _streams(each: list[Ints], kernels: GpuKernels) -> Ints:
    """The streams that compute: those on which some instruction spends most of its time."""
    took = np.where(kernels.nccl, 0, kernels.end - kernels.start)
    found = set()
    for own in each:
        streams, at = np.unique(kernels.stream[own], return_inverse=True)
        if took[own].any():
            found.add(int(streams[np.bincount(at, took[own]).argmax()]))
    return np.array(sorted(found), np.int64)
