"""How short any schedule can be: lower bounds on the time that a Problem takes."""

from __future__ import annotations

from schedir.shortest.found import Bound
from schedir.shortest.problem import Problem


def bound_of(problem: Problem) -> Bound:
    """The largest of the bounds that are known of a Problem."""
    rank = max(range(problem.plan.ranks), key=problem.work)
    return Bound(problem.work(rank), f"rank {rank} works {problem.work(rank):.6g}")
