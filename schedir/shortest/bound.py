"""How short any schedule can be: lower bounds on the time that a Problem takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from schedir.ir.costs import Costs
from schedir.ir.plan import Plan
from schedir.ir.sizes import Sizes
from schedir.shortest.closed import closed_bound
from schedir.shortest.earliest import earliest_bound
from schedir.shortest.found import Bound
from schedir.shortest.problem import Objective, Problem, problem_of

_FEW: Final = 1200  # pieces of work that can all be looked at in 5 milliseconds


def bound(
    plan: Plan,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split: bool = True,
) -> Bound:
    """Below what no schedule of a plan can be within a limit of memory, and why.

    `limit`, `in_flight`, `objective` and `split` are those of `search`.  `Bound.value` is in the
    unit of the costs; `Bound.why` is the proof in words, on the rank that it is of.

    Raises what `search` raises for a plan, costs, sizes or a limit that it does not take.

    >>> from schedir import Costs, Plan, bound
    >>> bound(Plan(ranks=2, microbatches=3), Costs(F=1, I=1, W=1)).value
    9.0
    """
    return bound_of(
        problem_of(plan, costs, sizes, limit, in_flight=in_flight, objective=objective, split=split)
    )


def bound_of(problem: Problem) -> Bound:
    """The largest bound of a Problem that takes no longer than some milliseconds.

    Of a small Problem that is the tightest that is known.
    """
    pieces = (2 + problem.split) * problem.plan.stages * problem.microbatches
    return tighter_bound(problem) if pieces <= _FEW else closed_bound(problem)


def tighter_bound(problem: Problem) -> Bound:
    """The largest bound of a Problem that is known: some microseconds for each piece of work."""
    found = (earliest_bound(problem), closed_bound(problem))
    return max(found, key=lambda bound: bound.value)
