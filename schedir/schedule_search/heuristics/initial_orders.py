"""Orders with which a search begins: built-in schedules, and those that a user gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedir.errors import SchedirError, UsageError
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.stage_segments import has_tp_collectives
from schedir.ir.program import Program
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, order_of_program
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule, has_free_v
from schedir.schedules.schedule_expansion import expand_schedule


def list_initial_orders(
    problem: SchedulingProblem, schedules: Sequence[Schedule | Program]
) -> Iterator[tuple[str, Order]]:
    """The orders of what is given, and of built-in schedules for this shape, that fit."""
    for each in schedules:
        program = each if isinstance(each, Program) else expand_schedule(each, problem.shape)
        if how := describe_unsearchable(program):
            raise UsageError(f"{program.name} {how}", fields=["initial_schedules"])
        if program.shape != problem.shape:
            raise UsageError(
                f"{program.name} is of {program.shape}, not of {problem.shape}",
                fields=["initial_schedules"],
            )
        yield from _order_if_complete(problem, program)
    for schedule in sorted(
        get_built_in_schedules().values(), key=has_free_v
    ):  # the plainest name of each first
        try:
            program = expand_schedule(schedule, problem.shape)
        except SchedirError:  # it is for other shapes
            continue
        yield from _order_if_complete(problem, program)


def describe_unsearchable(program: Program) -> str:
    """What a program does that none does that is searched for, in words; else nothing."""
    for is_so, what in (
        (not program.has_backward, "has no backwards"),
        (program.frozen_stages, "has stages that are not trained"),
        (RECOMPUTE in program.used_opcodes, "runs forwards again"),
        (has_tp_collectives(program.segment_boundaries), "sums between pieces of stages"),
    ):
        if is_so:
            return f"{what}: a search is for a forward and a backward of each"
    return ""


def _order_if_complete(problem: SchedulingProblem, program: Program) -> Iterator[tuple[str, Order]]:
    """The order of a program that runs all of the SchedulingProblem's work."""
    order = order_of_program(program, split_backward=problem.split_backward)
    whole = problem.microbatches * problem.num_task_kinds
    if all(
        len(codes) == len(own) * whole
        for codes, own in zip(order, problem.stages_of_rank, strict=True)
    ):
        yield program.name, order
