"""List the orders of the built-in and the user's schedules from which a search starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schedir.errors import SchedirError, UsageError
from schedir.ir.isa.instructions import RECOMPUTE
from schedir.ir.pipeline.stage_segments import has_collectives
from schedir.ir.program import Program
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import Order, order_of_program
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule, has_free_v
from schedir.schedules.schedule_expansion import expand_schedule


def list_initial_orders(
    problem: SchedulingProblem, schedules: Sequence[Schedule | Program]
) -> Iterator[tuple[str, Order]]:
    """Yield the name and the order of each schedule from which a search starts.

    The search starts from `schedules` and from the built-in schedules that support the shape. A
    schedule that does not run exactly the tasks of the problem is left out.

    Args:
        problem: The problem.
        schedules: The schedules of the user.

    Raises:
        UsageError: A schedule of the user recomputes, does not train all stages, has no backwards
            or has tensor-parallel collectives between stage segments. Or the schedule has a
            different shape than the problem.
    """
    for user_schedule in schedules:
        program = (
            user_schedule
            if isinstance(user_schedule, Program)
            else expand_schedule(user_schedule, problem.shape)
        )
        if reason := describe_unsearchable(program):
            raise UsageError(f"{program.name} {reason}", fields=["initial_schedules"])
        if program.shape != problem.shape:
            raise UsageError(
                f"{program.name} has the shape {program.shape}, but the search has the shape "
                f"{problem.shape}",
                fields=["initial_schedules"],
            )
        yield from _order_if_complete(problem, program)
    # If two schedules have the same order, the search reports the name of the first of them.
    # Schedules without a parameter `v` come first.
    for schedule in sorted(get_built_in_schedules().values(), key=has_free_v):
        try:
            program = expand_schedule(schedule, problem.shape)
        except SchedirError:  # The schedule does not support this shape.
            continue
        yield from _order_if_complete(problem, program)


def describe_unsearchable(program: Program) -> str:
    """Return why a search cannot start from a program, as the rest of a sentence, or "".

    Args:
        program: The program.
    """
    for condition, reason in (
        (not program.has_backward, "has no backwards"),
        (program.frozen_stages, "has frozen stages"),
        (RECOMPUTE in program.used_opcodes, "recomputes forwards"),
        (has_collectives(program.segment_boundaries), "has collectives between stage segments"),
    ):
        if condition:
            return (
                f"{reason}: a search supports only one forward and one backward of each microbatch"
            )
    return ""


def _order_if_complete(problem: SchedulingProblem, program: Program) -> Iterator[tuple[str, Order]]:
    """Yield the name and the order of a program if it runs all tasks of the problem."""
    order = order_of_program(program, split_backward=problem.split_backward)
    tasks_per_stage = problem.microbatches * problem.num_task_kinds
    if all(
        len(codes) == len(local_stages) * tasks_per_stage
        for codes, local_stages in zip(order, problem.stages_of_rank, strict=True)
    ):
        yield program.name, order
