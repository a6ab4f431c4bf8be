"""`search_schedule`: find the shortest schedule within a memory limit, with a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, Literal, get_args

from schedir.errors import UsageError, describe, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.cp_sat import SolverResult, import_cp_sat, solve
from schedir.schedule_search.heuristics.initial_orders import list_initial_orders
from schedir.schedule_search.heuristics.local_search import LocalSearch
from schedir.schedule_search.heuristics.program_builder import BuiltProgram, ProgramBuilder
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.rank_order import Order
from schedir.schedule_search.search_budget import (
    require_evaluations,
    require_integer,
    require_seconds,
)
from schedir.schedule_search.search_results import LowerBound, SearchResult, SearchStep, StopReason
from schedir.schedules.schedule_algebra import Schedule

ProofMethod = Literal["closed", "solver"]
_PROOF_METHODS: Final = get_args(ProofMethod)
_HEURISTIC_SHARE: Final = 0.3  # of the seconds that a search takes before the solver
_MAX_PILOTS: Final = 8  # short hunts at most, for the room of messages
_PILOT_EVALUATIONS: Final = 400  # evaluations of one, and its part of the seconds
_PILOT_SECONDS_SHARE: Final = 0.04
_BUILD_SECONDS_PER_TASK: Final = 2e-5  # seconds for each piece of work, to make programs at last


def search_schedule(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    initial_schedules: Sequence[Schedule | Program] = (),
    prove: ProofMethod = "closed",
    report: Callable[[SearchStep, float], None] | None = None,
) -> SearchResult:
    """The shortest schedule that is found in some seconds, and a bound below which there is none.

    `costs` are of stages, and each rank holds at most `memory_limit` bytes of `sizes`, or
    `in_flight` (stage, mb) as `greedy_schedule` counts them; without either there is no limit.
    What is short is the span of the run, or with the objective "own" the longest time that any rank
    takes from its first compute to its last.  Backwards are I and W, or with `split=False` whole;
    where a whole one is told to take less than I and W together, the bound is of split ones alone.

    Built-in schedules that fit, and those of `initial_schedules`, are looked at first, with their
    backwards split, or whole; nothing longer is found.  Then idle ranks decide by policies of many
    kinds, the best of these are changed, and at last single pieces of work are moved about.  It
    ends with a proof, with `seconds`, after that many `evaluations` of orders, or where nothing
    better comes any more.  With `evaluations`, and enough seconds for them, what is found depends
    on `seed` alone.  Ctrl-C ends it, too: what has been found until then is returned.

    `prove="solver"` looks for three tenths of the time, and gives what is left to CP-SAT, which
    proves small cases that the bound in closed form leaves open (`pip install 'schedir[solver]'`).
    How far that gets depends on time, and not on `seed` alone.  `report` is called with each better
    schedule, and with the bound; then with each better bound, too.

    Each forward runs once: one that recomputes may be shorter within little memory.

    Raises UsageError for a limit within which no schedule works, and for a start that recomputes,
    or trains not all; CostsError for `FB` that are less than a forward and a backward, as no pairs
    are looked at; and what `compile` raises.

    >>> from schedir import Costs, PipelineShape, search_schedule
    >>> found = search_schedule(PipelineShape(ranks=4, microbatches=8), Costs(F=2, I=2, W=1),
    ...     in_flight=4)
    >>> found.span
    49.0
    >>> found.timeline
    <predicted Timeline of search: span 49, bubble 18.4%>
    """
    seconds = require_seconds(seconds)
    evaluations = require_evaluations(evaluations)
    seed = require_integer(seed, "seed", "a seed is a whole number")
    require_type(initial_schedules, Sequence, "[schedules.zb_h1]")
    if report is not None and not callable(report):
        raise UsageError(f"report is a function, not {describe(report)}", fields=["report"])
    if prove not in _PROOF_METHODS:
        raise UsageError(f"prove is 'closed' or 'solver', not {describe(prove)}", fields=["prove"])
    begin = perf_counter()
    by_solver = prove == "solver"
    if by_solver:
        import_cp_sat()
    costs = Costs() if costs is None else costs
    problem = make_problem(
        shape,
        costs,
        sizes,
        memory_limit,
        in_flight=in_flight,
        objective=objective,
        split_backward=split_backward,
    )
    least = compute_bound(problem)

    def told(step: SearchStep) -> None:
        if report is not None:
            report(step, least.value)

    def tighter() -> float:
        nonlocal least
        least = max(least, compute_bound(problem, seconds / 20), key=lambda bound: bound.value)
        return least.value

    maker = ProgramBuilder(problem, costs, sizes, memory_limit)
    orders = list(list_initial_orders(problem, initial_schedules))
    made, within = _reserve_message_memory(maker, problem, orders, least.value, seconds, seed)
    making = min(problem.num_tasks * _BUILD_SECONDS_PER_TASK, seconds / 2)
    hunting = seconds * (_HEURISTIC_SHARE if by_solver else 1) - making
    hunt = LocalSearch(
        within, least.value, start_time=begin, seconds=hunting,
        evaluations=evaluations, seed=seed,
        report=told,
    )  # fmt: skip
    stopped: StopReason = "time"
    try:
        hunt.add_initial_orders(orders)
        if hunt.run(tighter):
            stopped = "no better"
        if by_solver and not hunt.is_proved:
            solved = _solve_with_cp_sat(problem, hunt, least, seconds, seed, report)
            least = solved.bound
            if solved.order is not None:
                hunt.add_order(solved.value, solved.order, "CP-SAT")
            if solved.interrupted:
                raise KeyboardInterrupt
            stopped = "no better" if solved.is_proved else "time"
    except KeyboardInterrupt:
        stopped = "interrupted"
    tried = hunt.num_evaluated
    try:
        made = maker.build_shortest(hunt.shortest_orders[:1], made)
        made = maker.build_shortest(
            hunt.initial_orders, made
        )  # their messages may wait less for each other
        made = maker.build_shortest(hunt.list_finalists(), made, begin + seconds)
    except KeyboardInterrupt:
        stopped, made = (
            "interrupted",
            made or maker.build_shortest(hunt.shortest_orders, deadline=begin),
        )
    length, timeline = made or maker.build_smallest()
    assert least.value <= length * (1 + 1e-6), "a bug: this is shorter than any schedule can be"
    bound = least.value
    if length <= bound * (
        1 + RELATIVE_TOLERANCE
    ):  # they are sums of floats, each in an order of its own
        stopped, bound = "proved", length
    return SearchResult(
        timeline.program, timeline, length, bound, least.explanation, tuple(hunt.improvements),
        tried,
        seed, stopped, hunt.numba,
    )  # fmt: skip


def _reserve_message_memory(
    builder: ProgramBuilder,
    problem: SchedulingProblem,
    orders: Sequence[tuple[str, Order]],
    bound: float,
    seconds: float,
    seed: int,
) -> tuple[BuiltProgram | None, SchedulingProblem]:
    """The Problem with as little less room as messages need, and a first program that fits.

    How much they need is up to the order.  So short hunts are made, each with less room by what the
    last one's order held too much.
    """
    best, within, found = None, problem, problem
    for _ in range(_MAX_PILOTS if builder.counts_messages else 0):
        pilot = LocalSearch(
            within, bound, start_time=perf_counter(), seconds=seconds * _PILOT_SECONDS_SHARE,
            evaluations=_PILOT_EVALUATIONS, seed=seed, report=lambda _: None,
        )  # fmt: skip
        pilot.add_initial_orders(orders)
        pilot.run()
        if not pilot.shortest_orders:
            break
        made = builder.build_shortest(pilot.shortest_orders[:1])
        if made is not None and (best is None or made.length < best.length):
            best, found = made, within
        smaller = builder.reserve_message_memory(pilot.best_order, within)
        if smaller == within:
            break
        within = smaller
    return best, found if best is not None else within


def _solve_with_cp_sat(
    problem: SchedulingProblem,
    local_search: LocalSearch,
    known_bound: LowerBound,
    seconds: float,
    seed: int,
    report: Callable[[SearchStep, float], None] | None,
) -> SolverResult:
    """Let CP-SAT go on where a hunt has ended, for what is left of its time."""

    def told(value: float, bound: float) -> None:
        if report is not None:
            shortest = min(value, local_search.length)
            report(
                SearchStep(local_search.elapsed, "CP-SAT", shortest), max(bound, known_bound.value)
            )

    left = max(seconds - local_search.elapsed, 0.0)
    hint = local_search.best_order if local_search.shortest_orders else None
    return solve(problem, left, hint=hint, known_bound=known_bound, seed=seed, report=told)
