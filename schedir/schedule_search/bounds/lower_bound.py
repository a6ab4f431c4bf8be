"""`lower_bound`: the best lower bound on the time of any schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.bounds.closed_form_bounds import compute_closed_bound
from schedir.schedule_search.bounds.earliest_start import compute_earliest_bound, make_relaxations
from schedir.schedule_search.bounds.round_trip import compute_round_trip_bound
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.search_budget import require_seconds
from schedir.schedule_search.search_results import LowerBound

# How long pure Python takes to find the earliest start of a piece of work, in seconds.
_SECONDS_PER_TASK: Final = 4e-6


def lower_bound(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
    seconds: float = 0.005,
) -> LowerBound:
    """Below what no schedule of a shape can be within a limit of memory, and why.

    `memory_limit`, `in_flight`, `objective` and `split_backward` are those of `search`.
    `LowerBound.value` is in the unit of the costs; `LowerBound.why` is the proof in words.  In
    about so many `seconds` it is the tightest bound that is known; the clock does not decide it, so
    that it is always the same. The formulas, and their proofs, are on the page of the search.

    Raises what `search` raises for a shape, costs, sizes or a limit that it does not take.

    >>> from schedir import Costs, PipelineShape, lower_bound
    >>> least = lower_bound(PipelineShape(ranks=4, microbatches=8), Costs(F=1, I=1, W=1),
    ...     in_flight=4)
    >>> least.value
    27.0
    >>> print(least.explanation)
    rank 0 works 24 and holds 4: it idles 3 between its 4th F and its first I
    """
    taken = require_seconds(seconds)
    problem = make_problem(
        shape,
        costs,
        sizes,
        memory_limit,
        in_flight=in_flight,
        objective=objective,
        split_backward=split_backward,
    )
    return compute_bound(problem, taken)


def compute_bound(problem: SchedulingProblem, seconds: float = 0.005) -> LowerBound:
    """The largest bound of a SchedulingProblem that is found in about so many seconds, as its size
    says.

    Without any time it is the closed one, which takes some milliseconds however large it is.
    """
    found = max(
        compute_closed_bound(problem),
        compute_round_trip_bound(problem),
        key=lambda bound: bound.value,
    )
    if problem.num_tasks * _SECONDS_PER_TASK > seconds:
        return found
    for known in make_relaxations(problem):
        if (other := compute_earliest_bound(known)).value > found.value * (1 + RELATIVE_TOLERANCE):
            found = other  # else the closed one is easier to follow
    return found
