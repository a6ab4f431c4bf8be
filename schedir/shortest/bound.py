"""How short any schedule can be: lower bounds on the time that a Problem takes."""

from __future__ import annotations

from collections.abc import Callable

from schedir.ir.costs import Costs
from schedir.ir.plan import Plan
from schedir.ir.sizes import Sizes
from schedir.shortest.found import Bound
from schedir.shortest.problem import Objective, Problem, problem_of


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
    """The largest of the bounds that are known of a Problem."""
    rank = max(range(problem.plan.ranks), key=problem.work)
    return Bound(problem.work(rank), f"rank {rank} works {problem.work(rank):.6g}")
