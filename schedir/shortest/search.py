"""Search: the shortest schedule within a memory limit, with a proof of how short any can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schedir.compiler.compile import compile
from schedir.ir.costs import Costs
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.predict.simulate import simulate
from schedir.schedules.greedy import greedy
from schedir.schedules.words import Schedule
from schedir.shortest.bound import bound_of
from schedir.shortest.found import Found, Step
from schedir.shortest.problem import Objective, problem_of


def search(
    plan: Plan,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split: bool = True,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    start: Sequence[Schedule | Program] = (),
    prove: str = "closed",
    report: Callable[[Step, float], None] | None = None,
) -> Found:
    """The shortest schedule that is found in some seconds, and a bound below which there is none.

    A stand-in: one microbatch at a time.
    """
    problem = problem_of(
        plan, costs, sizes, limit, in_flight=in_flight, objective=objective, split=split
    )
    least = bound_of(problem)
    drafted = greedy(plan, "FIW" if split else "BF", max(map(len, plan.stages_of)), costs, "search")
    program = compile(drafted, costs=costs)
    timeline = simulate(program, costs, sizes=sizes)
    trail = (Step(0.0, "greedy", timeline.span),)
    return Found(
        program, timeline, timeline.span, least.value, least.why, trail, 1, seed, "no better"
    )
