"""The order of work of each rank without microbatch numbers, and its time.

Microbatches are alike, so a rank loses nothing by doing each kind of work of a stage in ascending
order: of any schedule, sort the starts of a kind, and the k-th F still follows the k-th F before
it, and what is held depends on counts alone (docs/search.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from schedir.ir.isa.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instr
from schedir.ir.program import Program, Stream
from schedir.schedule_search.problem import SchedulingProblem

KINDS: Final = 3
F, I, W = range(KINDS)

Order = tuple[tuple[int, ...], ...]  # by rank: KINDS * stage + kind


def order_of_program(program: Program, *, split_backward: bool) -> Order:
    """The order of a program's compute; its microbatches need not ascend.

    Where backwards are `split_backward`, a whole one is an I and its W; where they are not, an I is
    one.
    """
    of: dict[int, tuple[int, ...]] = {FORWARD: (F,), BACKWARD: (I, W) if split_backward else (I,)}
    of |= {BACKWARD_INPUT: (I,), BACKWARD_WEIGHT: (W,) if split_backward else ()}
    return tuple(
        tuple(
            KINDS * stage + kind
            for op, stage in zip(stream.op.tolist(), stream.stage.tolist(), strict=True)
            for kind in of.get(op, ())
        )
        for stream in program.streams
    )


def order_one_by_one(problem: SchedulingProblem) -> Order:
    """One microbatch after the other, forward and back, each W at once: what holds the least."""
    each = []
    for own in problem.stages_of_rank:
        there = [KINDS * stage + F for stage in own]
        back = [
            KINDS * s + kind for s in reversed(own) for kind in (I, W)[: problem.num_task_kinds - 1]
        ]
        each.append((*there, *back) * problem.microbatches)
    return tuple(each)


def draft_from_order(
    problem: SchedulingProblem, order: Sequence[Sequence[int]], name: str = "search"
) -> Program:
    """The draft of an order: each kind of work of a stage takes its microbatches in turn."""
    ops = (FORWARD, BACKWARD_INPUT if problem.split_backward else BACKWARD, BACKWARD_WEIGHT)
    streams = []
    for codes in order:
        done: dict[int, int] = {}
        own = []
        for code in codes:
            own.append(Instr(ops[code % KINDS], code // KINDS, done.setdefault(code, 0)))
            done[code] += 1
        streams.append(Stream.from_instructions(own))
    return Program(name, problem.shape, tuple(streams))


def compute_peaks(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> list[float]:
    """The most that each rank holds, in the unit of `SchedulingProblem.room`."""
    found = []
    for codes in order:
        held = most = 0.0
        for code in codes:
            stage, kind = divmod(code, KINDS)
            if kind == F:
                held += problem.saved[stage]
                most = max(most, held)
            elif kind == I:
                held -= problem.saved[stage]
                most = max(most, held + problem.saved_and_deferred[stage])
                held += problem.deferred_wgrad[stage]
            else:
                held -= problem.deferred_wgrad[stage]
        found.append(most)
    return found


def compute_starts(
    problem: SchedulingProblem, order: Sequence[Sequence[int]]
) -> list[list[float]] | None:
    """The earliest start of each piece of work, by rank; None for an order that never ends."""
    stages = problem.shape.stages
    F_end: list[list[float]] = [[] for _ in range(stages)]
    I_end: list[list[float]] = [[] for _ in range(stages)]
    started: list[list[float]] = [[] for _ in order]
    now, todo = [0.0] * len(order), set(range(len(order)))
    moved = True
    while moved:
        moved = False
        for rank in sorted(todo):
            codes, own, time = order[rank], started[rank], now[rank]
            while len(own) < len(codes):
                stage, kind = divmod(codes[len(own)], KINDS)
                ready = 0.0
                if kind == F:
                    k = len(F_end[stage])
                    if stage:
                        if len(F_end[stage - 1]) <= k:
                            break
                        ready = F_end[stage - 1][k] + problem.act_delay[stage - 1]
                elif kind == I:
                    k = len(I_end[stage])
                    if stage + 1 < stages:
                        if len(I_end[stage + 1]) <= k:
                            break
                        ready = I_end[stage + 1][k] + problem.grad_delay[stage + 1]
                    elif len(F_end[stage]) <= k:
                        break
                time = max(time, ready)
                own.append(time)
                time += (problem.F, problem.I, problem.W)[kind][stage]
                if kind == F:
                    F_end[stage].append(time)
                elif kind == I:
                    I_end[stage].append(time)
                moved = True
            now[rank] = time
            if len(own) == len(codes):
                todo.discard(rank)
    return None if todo else started


def compute_length(problem: SchedulingProblem, order: Sequence[Sequence[int]]) -> float | None:
    """What an order takes by the SchedulingProblem's objective; None for one that never ends."""
    started = compute_starts(problem, order)
    if started is None:
        return None
    cost = (problem.F, problem.I, problem.W)
    longest = 0.0
    for rank, (codes, own) in enumerate(zip(order, started, strict=True)):
        end = own[-1] + cost[codes[-1] % KINDS][codes[-1] // KINDS]
        longest = max(
            longest, end - own[0] if problem.objective == "own" else end + problem.tail_time[rank]
        )
    return longest
