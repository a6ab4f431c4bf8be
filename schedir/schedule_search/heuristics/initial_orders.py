"""Orders with which a search begins: built-in schedules, and those that a user gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedir.errors import SchedirError, UsageError
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.stage_segments import ranks_meet
from schedir.ir.program import Program
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, codes_of
from schedir.schedules import built_in
from schedir.schedules.schedule_algebra import Schedule, takes_v
from schedir.schedules.schedule_expansion import expand_schedule


def starts(
    problem: SchedulingProblem, given: Sequence[Schedule | Program]
) -> Iterator[tuple[str, Order]]:
    """The orders of what is given, and of built-in schedules for this shape, that fit."""
    for each in given:
        program = each if isinstance(each, Program) else expand_schedule(each, problem.shape)
        if how := unlike(program):
            raise UsageError(f"{program.name} {how}", fields=["start"])
        if program.shape != problem.shape:
            raise UsageError(
                f"{program.name} is of {program.shape}, not of {problem.shape}", fields=["start"]
            )
        yield from _complete(problem, program)
    for schedule in sorted(built_in().values(), key=takes_v):  # the plainest name of each first
        try:
            program = expand_schedule(schedule, problem.shape)
        except SchedirError:  # it is for other shapes
            continue
        yield from _complete(problem, program)


def unlike(program: Program) -> str:
    """What a program does that none does that is searched for, in words; else nothing."""
    for is_so, what in (
        (not program.trains, "has no backwards"),
        (program.frozen_stages, "has stages that are not trained"),
        (RECOMPUTE in program.ops, "runs forwards again"),
        (ranks_meet(program.segment_boundaries), "sums between pieces of stages"),
    ):
        if is_so:
            return f"{what}: a search is for a forward and a backward of each"
    return ""


def _complete(problem: SchedulingProblem, program: Program) -> Iterator[tuple[str, Order]]:
    """The order of a program that runs all of the SchedulingProblem's work."""
    order = codes_of(program, split=problem.split)
    whole = problem.microbatches * problem.kinds
    if all(len(codes) == len(own) * whole for codes, own in zip(order, problem.own, strict=True)):
        yield program.name, order
