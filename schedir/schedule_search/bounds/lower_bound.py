"""Compute the best lower bound on the time of every schedule of a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from schedir.call_errors import explain_wrong_calls
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.bounds.closed_form_bounds import compute_closed_bound
from schedir.schedule_search.bounds.earliest_start import compute_earliest_bound, make_relaxations
from schedir.schedule_search.bounds.round_trip import compute_round_trip_bound
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.search_arguments import require_seconds
from schedir.schedule_search.search_results import LowerBound

# The time to compute one earliest start in pure Python, in seconds.
_SECONDS_PER_TASK: Final = 4e-6


@explain_wrong_calls("lower_bound(PipelineShape(ranks=4, microbatches=8), Costs(F=1, B=2))")
def lower_bound(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    max_in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
    time_limit: float = 0.005,
) -> LowerBound:
    """Return a lower bound on the length of every schedule of a shape within a memory limit.

    Args:
        shape: The pipeline shape.
        costs: The costs of stages. By default `Costs()`.
        sizes: The sizes in bytes, required with `memory_limit`.
        memory_limit: The memory of each rank, in bytes. By default there is no limit.
        max_in_flight: The largest number of (stage, microbatch) pairs in flight on a rank, or a
            function of the rank. Do not give both this argument and `memory_limit`.
        objective: The length to bound: "span" or "active_span", see `search_schedule`.
        split_backward: True for schedules with split backwards, False for full backwards.
        time_limit: The approximate time for the computation, in seconds. The function estimates
            from the number of tasks which bounds it can compute in this time. The function uses no
            clock, so the result is deterministic.

    Returns:
        The largest of the computed bounds, in the unit of the costs, and its proof in words.

    Raises:
        UsageError: `time_limit` is not a positive number.
        SchedirError: See `make_problem`.

    Example:
        >>> from schedir import Costs, PipelineShape, lower_bound
        >>> least = lower_bound(PipelineShape(ranks=4, microbatches=8), Costs(F=1, I=1, W=1),
        ...     max_in_flight=4)
        >>> least.value
        27.0
        >>> least.explanation.split("; ")[0]
        'rank 0 computes for 24 with at most 4 in flight'
    """
    seconds = require_seconds(time_limit)
    problem = make_problem(
        shape,
        costs,
        sizes,
        memory_limit,
        max_in_flight=max_in_flight,
        objective=objective,
        split_backward=split_backward,
    )
    return compute_bound(problem, seconds)


def compute_bound(problem: SchedulingProblem, time_limit: float = 0.005) -> LowerBound:
    """Return the largest lower bound of a problem that can be computed in about the given time.

    Args:
        problem: The problem.
        time_limit: The approximate time for the computation, in seconds. With 0 the function
            computes only closed-form bounds, which take some milliseconds for any size.
    """
    best = max(
        compute_closed_bound(problem),
        compute_round_trip_bound(problem),
        key=lambda bound: bound.value,
    )
    if problem.num_tasks * _SECONDS_PER_TASK > time_limit:
        return best
    for relaxation in make_relaxations(problem):
        earliest_bound = compute_earliest_bound(relaxation)
        # If the bounds are equal, keep the closed form. Its proof is simpler.
        if earliest_bound.value > best.value * (1 + RELATIVE_TOLERANCE):
            best = earliest_bound
    return best
