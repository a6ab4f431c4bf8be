"""Find the causes of the idle time of each rank's compute lane."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedir.ir.instruction_index import NO_POSITION
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    EP_COLLECTIVE_OPS,
    FORWARD,
    INSTRUCTIONS,
    LANES,
    Lane,
    find_segment_collectives,
)
from schedir.predict.timeline import Timeline, require_timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class IdleCause(IntEnum):
    """The cause of an idle interval; `idleness` defines each cause."""

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
    ALL_TO_ALL = 13

    @property
    def text(self) -> str:
        """The name of the cause in text and in pictures, as in the glossary."""
        return self.name.lower()


# Opcode -> cause of the idle time of a rank that waits for a running instruction of this opcode.
_CAUSE_OF_OP: Final = [
    IdleCause[(row.idle_cause or LANES[row.lane].idle_cause).upper()] for row in INSTRUCTIONS
]
IDLE_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("cause", "i4"), ("awaited_span", "i8"), ("start", "f8"), ("end", "f8")]
)
# A gap is the idle time between two instructions of a compute lane. A wait is a part of a gap, and
# has one cause.
GAP_DTYPE: Final = np.dtype(
    [("rank", "i4"), ("before", "i8"), ("after", "i8"), ("start", "f8"), ("end", "f8")]
)
WAIT_DTYPE: Final = np.dtype(
    [("gap", "i8"), ("cause", "i4"), ("awaited_span", "i8"), ("start", "f8"), ("end", "f8")]
)


def idleness(timeline: Timeline) -> NDArray[Any]:
    """Return all idle intervals of all ranks, each with one cause.

    Between two instructions of its compute lane, a rank waits for the inputs of the second
    instruction. The search for the causes begins at the start of the second instruction, and goes
    back in time. Each step goes to the predecessor that ended last
    (`Graph.find_last_predecessors`). The search ends at the end of the first instruction. The
    causes are:

    - MESSAGE: The rank waits for a transfer or a gather that is in progress.
    - SUM: The rank waits for a collective between the segments of a stage (TPReduceAct,
      TPReduceGrad). With sequence parallelism, these collectives include gathers.
    - ALL_TO_ALL: The rank waits for tokens, for outputs of experts, or for their gradients
      (Dispatch, Combine, DispatchGrad, CombineGrad).
    - REDUCTION: The rank waits for a reduction in progress that all members have joined.
    - WEIGHTS: The rank waits for the gather of a stage's weights (Unshard).
    - SNAPSHOT: The optimizer step waits for the copy of a stage to the host (Snapshot).
    - OFFLOAD: The rank waits for a copy from the host (Reload), or for a copy to the host (Offload)
      that must free memory first.
    - DISK: The rank waits for a copy between the host and its disk (ReloadFromDisk, OffloadToDisk).
    - STEP: The rank waits for weights that the host updates (HostOptimizerStep).
    - HOST: All predecessors have ended, and the instruction has not started. The prediction of a
      program that contains its transfers has no such interval.
    - WARMUP, PEER, COOLDOWN: The rank waits for an instruction of another rank's compute lane. This
      wait covers the rest of the idle time before the waiting instruction. The cause is WARMUP
      until the first backward of the waiting rank starts. The cause is COOLDOWN from the end of the
      rank's last forward on, but not before its first backward. Between these times, the cause is
      PEER.
    - IMBALANCE: In any order of instructions, a rank is idle at least for the difference between
      its work and the work of the busiest rank. So this part of the rank's waits for other ranks
      has the cause IMBALANCE. This time is taken first from PEER waits, then from waits after the
      rank's first instruction, then from waits before its first instruction.

    Before the first instruction of a rank the causes are the same, but each wait for another rank
    is WARMUP. After its last instruction, the cause is COOLDOWN, and `awaited_span` is -1.

    Args:
        timeline: A predicted or measured run.

    Returns:
        A structured array with the fields of `IDLE_DTYPE`, sorted by rank and start. `cause` is an
        IdleCause. `awaited_span` is the index in `timeline.spans` of the awaited instruction, or
        -1. For HOST, `awaited_span` is the index of the instruction that starts late. The intervals
        of a rank do not overlap, and their lengths add up to `timeline.idle[rank]`.

    Raises:
        UsageError: `timeline` is not a Timeline.
    """
    require_timeline(timeline, "timeline")
    if not len(timeline):
        return np.empty(0, IDLE_DTYPE)
    gaps = _find_gaps(timeline)
    waits = _find_waits(timeline, gaps)
    idle = np.empty(len(waits), IDLE_DTYPE)
    for name in ("cause", "awaited_span", "start", "end"):
        idle[name] = waits[name]
    idle["rank"] = gaps["rank"][waits["gap"]]
    peer = waits["cause"] == IdleCause.PEER
    idle["cause"][peer] = _find_phase_causes(timeline, gaps)[waits["gap"][peer]]
    idle = _mark_imbalance(timeline, gaps, idle)
    return idle[np.lexsort((idle["start"], idle["rank"]))]


def sum_by_cause(idle: Any, ranks: int) -> Floats:
    """Return the idle time of each rank by cause.

    Args:
        idle: The intervals that `idleness` returns.
        ranks: The number of ranks.

    Returns:
        Times of shape (ranks, len(IdleCause)), in the unit of the timeline.
    """
    total = np.zeros((ranks, len(IdleCause)))
    np.add.at(total, (idle["rank"], idle["cause"]), idle["end"] - idle["start"])
    return total


def find_ready_gaps(timeline: Timeline) -> Floats:
    """Return the idle time before each compute that waits for no input.

    All inputs of such a compute are ready when the previous instruction of its compute lane ends.
    The idle time is from this end to the start of the compute.

    Args:
        timeline: A run of a program that contains its transfers.

    Returns:
        Times of shape (n,). In a prediction, all these times are 0.
    """
    before, after = _find_followers(timeline)
    spans = timeline.spans
    predecessor = timeline.critical_predecessor[after]
    predecessor_end = np.where(predecessor == NO_POSITION, -np.inf, spans["end"][predecessor])
    is_ready = predecessor_end <= spans["end"][before]
    gaps: Floats = (spans["start"][after] - spans["end"][before])[is_ready]
    return gaps


def find_steady_phase(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return the start and end of each rank's steady phase, between warmup and cooldown.

    The phase starts at the start of the rank's first backward. The phase ends at the end of the
    rank's last forward. If this end comes before the start, the phase has length 0.

    Args:
        timeline: A predicted or measured run.

    Returns:
        Starts and ends, shape (ranks,) each, on the time axis of `timeline.spans`. Both are
        infinite for a rank without a backward.
    """
    spans = timeline.spans
    begins = np.full(timeline.ranks, np.inf)
    ends = np.full(timeline.ranks, -np.inf)
    is_backward, is_forward = np.isin(spans["op"], BACKWARD_OPS), spans["op"] == FORWARD
    np.minimum.at(begins, spans["rank"][is_backward], spans["start"][is_backward])
    np.maximum.at(ends, spans["rank"][is_forward], spans["end"][is_forward])
    return begins, np.maximum(begins, ends)


def compute_exposed_share(timeline: Timeline) -> float:
    """Return the share of the steady phase in which ranks wait for a transfer or a gather.

    Args:
        timeline: A predicted or measured run.

    Returns:
        A share from 0 to 1; 0 if no rank has a steady phase.
    """
    begins, ends = find_steady_phase(timeline)
    idle = idleness(timeline)
    idle = idle[idle["cause"] == IdleCause.MESSAGE]
    rank = idle["rank"]
    waits = np.minimum(idle["end"], ends[rank]) - np.maximum(idle["start"], begins[rank])
    has_phase = np.isfinite(begins)
    steady_time = float((ends[has_phase] - begins[has_phase]).sum())
    return float(np.maximum(waits, 0.0).sum()) / steady_time if steady_time else 0.0


def _find_followers(timeline: Timeline) -> tuple[Ints, Ints]:
    """Return all pairs of consecutive instructions on the compute lane of a rank."""
    spans = timeline.spans
    computes = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.is_second_of_pair)
    is_same_rank = spans["rank"][computes[1:]] == spans["rank"][computes[:-1]]
    return computes[:-1][is_same_rank], computes[1:][is_same_rank]


def _find_gaps(timeline: Timeline) -> Any:
    """Return the gaps of all compute lanes, by rank and start, with the fields of `GAP_DTYPE`.

    `before` and `after` are the indices of the instructions around a gap, or -1.
    """
    spans = timeline.spans
    computes = np.flatnonzero((spans["lane"] == Lane.COMPUTE) & ~timeline.is_second_of_pair)
    rank_offsets = np.searchsorted(spans["rank"][computes], np.arange(timeline.ranks + 1))
    gaps = np.empty(len(computes) + timeline.ranks, GAP_DTYPE)
    gaps["rank"] = np.repeat(np.arange(timeline.ranks), np.diff(rank_offsets) + 1)
    gaps["after"] = after = np.insert(computes, rank_offsets[1:], NO_POSITION)
    gaps["before"] = before = np.insert(computes, rank_offsets[:-1], NO_POSITION)
    gaps["start"] = np.where(before == NO_POSITION, timeline.start_time, spans["end"][before])
    gaps["end"] = np.where(after == NO_POSITION, spans["end"].max(), spans["start"][after])
    return gaps[gaps["end"] > gaps["start"]]


def _find_waits(timeline: Timeline, gaps: Any) -> Any:
    """Return the waits of all gaps, in any order, with the fields of `WAIT_DTYPE`.

    The loop walks through all gaps in parallel, from their ends to their beginnings. At each step,
    `waiting` is the instruction that waits, and the time before `time` has no cause yet. Each step
    determines the cause of two intervals: the run of the predecessor, and the time from the
    predecessor's end to `time`.
    """
    spans, latest = timeline.spans, _find_latest(timeline)
    nothing_follows = gaps["after"] == NO_POSITION
    tail = np.flatnonzero(nothing_follows)
    no_instruction = np.full(len(tail), NO_POSITION)
    waits_by_step = [
        _make_waits(
            tail, IdleCause.COOLDOWN, no_instruction, gaps["start"][tail], gaps["end"][tail]
        )
    ]
    gap = np.flatnonzero(~nothing_follows)
    waiting, time = gaps["after"][gap], gaps["end"][gap]
    while len(gap):
        begin, awaited = gaps["start"][gap], latest[waiting]
        has_predecessor = awaited != NO_POSITION
        predecessor_end = np.where(
            has_predecessor, np.clip(spans["end"][awaited], begin, time), begin
        )
        waits_by_step.append(
            _make_waits(
                gap, *_explain_late_start(timeline, waiting, awaited), predecessor_end, time
            )
        )
        is_open = has_predecessor & (predecessor_end > begin)
        gap, begin = gap[is_open], begin[is_open]
        waiting, time = awaited[is_open], predecessor_end[is_open]

        cause = _explain_running(timeline, waiting)
        # A wait for another rank's compute covers the rest of the gap. The loop searches no earlier
        # causes in this gap.
        predecessor_start = np.where(cause == IdleCause.PEER, -np.inf, spans["start"][waiting])
        predecessor_start = np.clip(predecessor_start, begin, time)
        waits_by_step.append(_make_waits(gap, cause, waiting, predecessor_start, time))
        is_open = predecessor_start > begin
        gap, waiting, time = gap[is_open], waiting[is_open], predecessor_start[is_open]
    waits = np.concatenate(waits_by_step)
    return waits[waits["end"] > waits["start"]]


def _make_waits(gap: Ints, cause: ArrayLike, awaited_span: Ints, start: Floats, end: Floats) -> Any:
    waits = np.empty(len(gap), WAIT_DTYPE)
    waits["gap"], waits["cause"], waits["awaited_span"] = gap, cause, awaited_span
    waits["start"], waits["end"] = start, end
    return waits


def _explain_late_start(timeline: Timeline, waiting: Ints, awaited: Ints) -> tuple[Ints, Ints]:
    """Return the cause and the awaited instruction of the time after the predecessor has ended.

    If the waiting instruction and its predecessor are computes of different ranks, as in a draft,
    the cause is the message between these ranks. Otherwise the cause is the host.
    """
    lane, rank = timeline.spans["lane"], timeline.spans["rank"]
    computes = (lane[waiting] == Lane.COMPUTE) & (lane[awaited] == Lane.COMPUTE)
    message = (awaited != NO_POSITION) & computes & (rank[waiting] != rank[awaited])
    cause = np.where(message, IdleCause.MESSAGE, IdleCause.HOST)
    return cause, np.where(message, awaited, waiting)


def _explain_running(timeline: Timeline, awaited: Ints) -> Ints:
    """Return the cause of waits for instructions that are running."""
    cause = np.array(_CAUSE_OF_OP)
    sums = {*find_segment_collectives(timeline.program.sequence_parallel)} - {*EP_COLLECTIVE_OPS}
    cause[[*sums]] = IdleCause.SUM
    return np.asarray(cause[timeline.spans["op"][awaited]])


def _find_latest(timeline: Timeline) -> Ints:
    """Return, for each instruction, the predecessor that ends last.

    If several predecessors end at the same time, the result is a compute if one of them is a
    compute.
    """
    spans = timeline.spans
    order = np.lexsort((spans["lane"] == Lane.COMPUTE, spans["end"]))
    end_order = np.full(len(spans) + 1, -1.0)  # the last entry belongs to NO_POSITION
    end_order[order] = np.arange(len(spans))
    return timeline.graph.find_last_predecessors(end_order[:-1])


def _find_phase_causes(timeline: Timeline, gaps: Any) -> Ints:
    """Return the cause of waits for other ranks in each gap: the phase of the waiting rank."""
    begins, ends = (times[gaps["rank"]] for times in find_steady_phase(timeline))
    is_filling = np.isfinite(begins) & (gaps["end"] <= begins)
    return np.select(
        [is_filling | (gaps["before"] == NO_POSITION), gaps["start"] >= ends],
        [IdleCause.WARMUP, IdleCause.COOLDOWN],
        IdleCause.PEER,
    )


def _mark_imbalance(timeline: Timeline, gaps: Any, idle: Any) -> NDArray[Any]:
    """Change the cause of some waits for other ranks to IMBALANCE.

    For each rank, the total time of the changed waits is at most the busy time of the busiest rank
    minus the busy time of this rank.
    """
    rank = idle["rank"]
    first_start = np.full(timeline.ranks, -np.inf)  # start of the first instruction
    first_gaps = gaps[gaps["before"] == NO_POSITION]
    first_start[first_gaps["rank"]] = first_gaps["end"]
    rank_waits = np.flatnonzero(
        np.isin(idle["cause"], (IdleCause.WARMUP, IdleCause.COOLDOWN, IdleCause.PEER))
    )
    priority = (idle["cause"] != IdleCause.PEER).astype(int) + (idle["start"] < first_start[rank])
    rank_waits = rank_waits[
        np.lexsort((idle["start"][rank_waits], priority[rank_waits], rank[rank_waits]))
    ]
    lengths = idle["end"][rank_waits] - idle["start"][rank_waits]
    total = np.concatenate([[0.0], np.cumsum(lengths)])
    rank_base = total[np.searchsorted(rank[rank_waits], rank[rank_waits])]
    imbalance_left = (timeline.busy.max() - timeline.busy)[rank[rank_waits]] - (
        total[:-1] - rank_base
    )
    complete = rank_waits[imbalance_left >= lengths]
    partial = rank_waits[(imbalance_left > 0) & (imbalance_left < lengths)]
    idle["cause"][complete] = IdleCause.IMBALANCE
    remainder = idle[partial].copy()
    remainder["start"] += imbalance_left[(imbalance_left > 0) & (imbalance_left < lengths)]
    idle["end"][partial] = remainder["start"]
    idle["cause"][partial] = IdleCause.IMBALANCE
    return np.concatenate([idle, remainder[remainder["end"] > remainder["start"]]])
