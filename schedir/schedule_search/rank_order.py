"""Represent the order of the tasks of each rank, without microbatch numbers, and compute its time.

A task is one F, I or W of a microbatch on a stage. All microbatches have equal times and sizes. So
a rank loses no time if it runs each kind of task of a stage in ascending order of microbatches.
After sorting, the k-th task still follows the k-th tasks that it needs. The memory stays the same,
because it depends only on how many tasks of each kind and stage have run
(docs/explanation/lower-bounds.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from schedir.ir.isa.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instr
from schedir.ir.program import Program, Stream
from schedir.schedule_search.problem import SchedulingProblem

KINDS: Final = 3
F, I, W = range(KINDS)

Order = tuple[tuple[int, ...], ...]  # For each rank the codes of its tasks: KINDS * stage + kind.


def order_of_program(program: Program, *, split_backward: bool) -> Order:
    """Return the order of the compute instructions of a program.

    Args:
        program: The program. Its microbatches can have any order.
        split_backward: If True, a full backward becomes an I and a W. If False, an I becomes a full
            backward, and a W is left out.
    """
    kinds_of_op: dict[int, tuple[int, ...]] = {
        FORWARD: (F,),
        BACKWARD: (I, W) if split_backward else (I,),
    }
    kinds_of_op |= {BACKWARD_INPUT: (I,), BACKWARD_WEIGHT: (W,) if split_backward else ()}
    return tuple(
        tuple(
            KINDS * stage + kind
            for op, stage in zip(stream.op.tolist(), stream.stage.tolist(), strict=True)
            for kind in kinds_of_op.get(op, ())
        )
        for stream in program.streams
    )


def order_one_by_one(problem: SchedulingProblem) -> Order:
    """Return the order that runs one microbatch at a time, which needs the least memory.

    Each microbatch runs forward and then backward, and each W follows its I.

    Args:
        problem: The problem.
    """
    codes_by_rank = []
    for local_stages in problem.stages_of_rank:
        forwards = [KINDS * stage + F for stage in local_stages]
        backwards = [
            KINDS * s + kind
            for s in reversed(local_stages)
            for kind in (I, W)[: problem.num_task_kinds - 1]
        ]
        codes_by_rank.append((*forwards, *backwards) * problem.microbatches)
    return tuple(codes_by_rank)


def draft_from_order(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> Program:
    """Convert an order into a draft. Tasks of one kind and stage have ascending microbatches.

    Args:
        problem: The problem of the order.
        order: For each rank, the codes of its tasks. See `Order`.
    """
    ops = (FORWARD, BACKWARD_INPUT if problem.split_backward else BACKWARD, BACKWARD_WEIGHT)
    streams = []
    for codes in order:
        next_mb: dict[int, int] = {}
        instructions = []
        for code in codes:
            instructions.append(
                Instr(ops[code % KINDS], code // KINDS, next_mb.setdefault(code, 0))
            )
            next_mb[code] += 1
        streams.append(Stream.from_instructions(instructions))
    return Program("search", problem.shape, tuple(streams))


def compute_peaks(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> list[float]:
    """Return the peak memory of each rank, in the unit of `SchedulingProblem.capacity`.

    Args:
        problem: The problem of the order.
        order: For each rank, the codes of its tasks. See `Order`.
    """
    peaks = []
    for codes in order:
        memory = peak = 0.0
        for code in codes:
            stage, kind = divmod(code, KINDS)
            if kind == F:
                memory += problem.saved[stage]
                peak = max(peak, memory)
            elif kind == I:
                memory -= problem.saved[stage]
                peak = max(peak, memory + problem.saved_and_deferred[stage])
                memory += problem.deferred_wgrad[stage]
            else:
                memory -= problem.deferred_wgrad[stage]
        peaks.append(peak)
    return peaks


def compute_starts(
    problem: SchedulingProblem, order: Sequence[Sequence[int]]
) -> list[list[float]] | None:
    """Return the earliest start of each task, in one list for each rank.

    Args:
        problem: The problem of the order.
        order: For each rank, the codes of its tasks. See `Order`.

    Returns:
        The starts in the order of the tasks, in the unit of the costs. None if the order deadlocks.
    """
    stages = problem.shape.stages
    F_end: list[list[float]] = [[] for _ in range(stages)]
    I_end: list[list[float]] = [[] for _ in range(stages)]
    starts: list[list[float]] = [[] for _ in order]
    rank_time, pending_ranks = [0.0] * len(order), set(range(len(order)))
    has_progress = True
    while has_progress:
        has_progress = False
        for rank in sorted(pending_ranks):
            codes, rank_starts, time = order[rank], starts[rank], rank_time[rank]
            while len(rank_starts) < len(codes):
                stage, kind = divmod(codes[len(rank_starts)], KINDS)
                ready_time = 0.0
                if kind == F:
                    k = len(F_end[stage])
                    if stage:
                        if len(F_end[stage - 1]) <= k:
                            break
                        ready_time = F_end[stage - 1][k] + problem.act_delay[stage - 1]
                elif kind == I:
                    k = len(I_end[stage])
                    if stage + 1 < stages:
                        if len(I_end[stage + 1]) <= k:
                            break
                        ready_time = I_end[stage + 1][k] + problem.grad_delay[stage + 1]
                    elif len(F_end[stage]) <= k:
                        break
                time = max(time, ready_time)
                rank_starts.append(time)
                time += (problem.F, problem.I, problem.W)[kind][stage]
                if kind == F:
                    F_end[stage].append(time)
                elif kind == I:
                    I_end[stage].append(time)
                has_progress = True
            rank_time[rank] = time
            if len(rank_starts) == len(codes):
                pending_ranks.discard(rank)
    return None if pending_ranks else starts


def compute_length(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> float | None:
    """Return the length of an order by the objective of the problem.

    Args:
        problem: The problem of the order.
        order: For each rank, the codes of its tasks. See `Order`.

    Returns:
        The length in the unit of the costs. None if the order deadlocks.
    """
    starts = compute_starts(problem, order)
    if starts is None:
        return None
    cost = (problem.F, problem.I, problem.W)
    longest = 0.0
    for rank, (codes, rank_starts) in enumerate(zip(order, starts, strict=True)):
        end = rank_starts[-1] + cost[codes[-1] % KINDS][codes[-1] // KINDS]
        longest = max(
            longest,
            end - rank_starts[0]
            if problem.objective == "active_span"
            else end + problem.tail_time[rank],
        )
    return longest
