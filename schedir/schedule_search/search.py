"""Search for the shortest schedule within a memory limit, and compute a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, Literal, get_args

from schedir.call_errors import explain_wrong_calls
from schedir.compiler.compile import resolve_shape
from schedir.errors import UsageError, describe, require_type
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.placement import Placement
from schedir.ir.program import Program
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.cp_sat import SolverResult, import_cp_sat, solve
from schedir.schedule_search.heuristics.heuristic_search import HeuristicSearch
from schedir.schedule_search.heuristics.initial_orders import list_initial_orders
from schedir.schedule_search.heuristics.program_builder import BuiltProgram, ProgramBuilder
from schedir.schedule_search.problem import Objective, SchedulingProblem, make_problem
from schedir.schedule_search.rank_order import Order
from schedir.schedule_search.search_arguments import (
    DEFAULT_TIME_LIMIT,
    require_evaluations,
    require_integer,
    require_seconds,
)
from schedir.schedule_search.search_results import SearchResult, SearchStep, StopReason
from schedir.schedules.schedule_algebra import Schedule

BoundMethod = Literal["closed", "solver"]
_EXAMPLE: Final = "search_schedule(ranks=4, microbatches=8)"  # A correct call, for errors.
_BOUND_METHODS: Final = get_args(BoundMethod)
_HEURISTIC_SHARE: Final = 0.3  # The share of the time for the heuristic search before the solver.
# A pilot is a short search that estimates the memory of messages. The three constants are the
# largest number of pilots, the largest number of evaluations of a pilot, and the share of the time
# for a pilot.
_MAX_PILOTS: Final = 8
_PILOT_EVALUATIONS: Final = 400
_PILOT_SECONDS_SHARE: Final = 0.04
_BUILD_SECONDS_PER_TASK: Final = 2e-5  # Seconds per task, reserved to compile programs.


def _require_bound_method(bound: object) -> None:
    if bound not in _BOUND_METHODS:
        raise UsageError(
            f"bound must be 'closed' or 'solver', not {describe(bound)}", fields=["bound"]
        )


class _BoundedSearch:
    """A search for an order, and the lower bound that the search improves."""

    def __init__(
        self,
        problem: SchedulingProblem,
        time_limit: float,
        seed: int,
        report: Callable[[SearchStep, float], None] | None,
    ) -> None:
        self.problem = problem
        self.time_limit = time_limit
        self.seed = seed
        self.report = report
        self.bound = compute_bound(problem)

    def report_step(self, step: SearchStep) -> None:
        """Call the user's function, if there is one, with a step and the bound."""
        if self.report is not None:
            self.report(step, self.bound.value)

    def tighten_bound(self) -> float:
        """Compute the bound again with more time. Keep and return the larger bound."""
        tighter = compute_bound(self.problem, self.time_limit / 20)
        self.bound = max(self.bound, tighter, key=lambda bound: bound.value)
        return self.bound.value

    def run(
        self,
        heuristic_search: HeuristicSearch,
        orders: Sequence[tuple[str, Order]],
        *,
        uses_solver: bool,
    ) -> StopReason:
        """Search from initial orders, and then by CP-SAT. Return why the search stopped."""
        stop_reason: StopReason = "limit"
        try:
            heuristic_search.add_initial_orders(orders)
            if heuristic_search.run(self.tighten_bound):
                stop_reason = "no better"
            if uses_solver and not heuristic_search.is_proved:
                solution = self._solve_with_cp_sat(heuristic_search)
                self.bound = solution.bound
                if solution.order is not None:
                    heuristic_search.add_order(solution.value, solution.order, "CP-SAT")
                if solution.interrupted:
                    raise KeyboardInterrupt
                stop_reason = "no better" if solution.is_proved else "limit"
        except KeyboardInterrupt:
            stop_reason = "interrupted"
        return stop_reason

    def _solve_with_cp_sat(self, heuristic_search: HeuristicSearch) -> SolverResult:
        """Run CP-SAT for the remaining time, from the best order of the heuristic search."""
        known_bound = self.bound

        def report_progress(value: float, bound: float) -> None:
            if self.report is not None:
                shortest = min(value, heuristic_search.length)
                step = SearchStep(heuristic_search.elapsed, "CP-SAT", shortest)
                self.report(step, max(bound, known_bound.value))

        seconds_left = max(self.time_limit - heuristic_search.elapsed, 0.0)
        hint = heuristic_search.best_order if heuristic_search.shortest_orders else None
        return solve(
            self.problem, seconds_left, hint=hint, known_bound=known_bound, seed=self.seed,
            report=report_progress,
        )  # fmt: skip


@explain_wrong_calls("search_schedule(ranks=4, microbatches=8, max_in_flight=4)")
def search_schedule(
    shape: PipelineShape | None = None,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    memory_limit: float | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    placement: Placement | None = None,
    max_in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
    time_limit: float = DEFAULT_TIME_LIMIT,
    max_evaluations: int | None = None,
    seed: int = 0,
    initial_schedules: Sequence[Schedule | Program] = (),
    bound: BoundMethod = "closed",
    report: Callable[[SearchStep, float], None] | None = None,
) -> SearchResult:
    """Search for the shortest schedule within a memory limit, and compute a lower bound.

    The search first evaluates the built-in and the initial schedules that fit. The result is never
    longer than any of these schedules. Then list scheduling builds schedules by dispatch policies,
    and varies the best policies. Finally, simulated annealing moves tasks in the best schedules.

    The search ends with a proof, after `time_limit`, after `max_evaluations`, or after many failed
    attempts. Ctrl-C also ends the search, and the function returns the best schedule so far. The
    search finds no schedules with activation recomputation, which may be shorter with little
    memory.

    Args:
        shape: The pipeline shape. You can give its fields as keywords instead.
        costs: The costs of stages. By default `Costs()`.
        sizes: The sizes in bytes, required with `memory_limit`.
        memory_limit: The memory of each rank, in bytes. By default there is no limit.
        ranks: The number of pipeline ranks.
        microbatches: The number of microbatches.
        stages_per_rank: The number of stages on each rank.
        placement: The rank of each stage. See `compile`.
        max_in_flight: The largest number of (stage, microbatch) pairs in flight on a rank. An
            integer, or a function of the rank, as in `greedy_schedule`. Do not give both this
            argument and `memory_limit`.
        objective: The length to minimize. "span": the span of the run. "active_span": the longest
            active span of a rank.
        split_backward: True to split backwards into I and W. If a full backward takes less than
            I and W together, the bound applies only to split backwards.
        time_limit: The longest time of the search, in seconds.
        max_evaluations: The largest number of evaluated orders. If the search evaluates this number
            before `time_limit`, the result depends only on `seed`. By default there is no limit.
        seed: The random seed.
        initial_schedules: Schedule functions or programs from which the search starts, in addition
            to the built-in schedules. Their backwards are split or joined as `split_backward`
            requires.
        bound: "closed" computes the bound from formulas. "solver" searches for 30 % of the time,
            and then runs CP-SAT (`pip install 'schedir[solver]'`). CP-SAT can prove small cases
            that the formulas cannot. The result of CP-SAT depends on time, not only on `seed`.
        report: A function of a `SearchStep` and of the bound. The search calls it for each shorter
            schedule. While CP-SAT runs, the search also calls it for each larger bound.

    Returns:
        The shortest schedule, its prediction, and the lower bound.

    Raises:
        UsageError: An argument is invalid, or no schedule fits into the limit. Or an initial
            schedule recomputes, does not train all stages, or has a different shape.
        CostsError: See `make_problem`.
        ShapeError: See `make_problem`.
        MemoryLimitError: No program fits into the limit with its messages.
        schedir.extras.MissingPackageError: `bound` is "solver", and OR-Tools is not installed.

    Example:
        >>> from schedir import Costs, search_schedule
        >>> result = search_schedule(costs=Costs(F=2, I=2, W=1), ranks=4, microbatches=8,
        ...     max_in_flight=4)
        >>> result.span
        49.0
        >>> result.timeline
        <predicted Timeline of search: span 49, bubble 18.4%>
    """
    shape = resolve_shape(
        _EXAMPLE, shape, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank,
        placement=placement,
    )  # fmt: skip
    require_type(shape, "shape", PipelineShape, _EXAMPLE)
    assert shape is not None
    time_limit = require_seconds(time_limit)
    max_evaluations = require_evaluations(max_evaluations)
    seed = require_integer(seed, "seed", "seed must be an integer")
    require_type(initial_schedules, "initial_schedules", Sequence, "[schedules.zb_h1]")
    if report is not None and not callable(report):
        raise UsageError(f"report must be a function, not {describe(report)}", fields=["report"])
    _require_bound_method(bound)
    start_time = perf_counter()
    uses_solver = bound == "solver"
    if uses_solver:
        import_cp_sat()
    costs = Costs() if costs is None else costs
    problem = make_problem(
        shape,
        costs,
        sizes,
        memory_limit,
        max_in_flight=max_in_flight,
        objective=objective,
        split_backward=split_backward,
    )
    search = _BoundedSearch(problem, time_limit, seed, report)
    builder = ProgramBuilder(problem, costs, sizes, memory_limit)
    orders = list(list_initial_orders(problem, initial_schedules))
    built, reduced_problem = _reserve_message_memory(
        builder, problem, orders, search.bound.value, time_limit, seed
    )
    build_seconds = min(problem.num_tasks * _BUILD_SECONDS_PER_TASK, time_limit / 2)
    search_seconds = time_limit * (_HEURISTIC_SHARE if uses_solver else 1) - build_seconds
    heuristic_search = HeuristicSearch(
        reduced_problem, search.bound.value, start_time=start_time, seconds=search_seconds,
        evaluations=max_evaluations, seed=seed, report=search.report_step,
    )  # fmt: skip
    stop_reason = search.run(heuristic_search, orders, uses_solver=uses_solver)
    num_evaluated = heuristic_search.num_evaluated
    built, is_interrupted = _build_shortest(
        builder, heuristic_search, built, start_time, time_limit
    )
    if is_interrupted:
        stop_reason = "interrupted"
    length, timeline = built or builder.build_smallest()
    lower_bound = search.bound.value
    assert lower_bound <= length * (1 + 1e-6), "a bug: the schedule is shorter than the lower bound"
    # The length and the bound are sums of floats in different orders, so they may be rounded
    # differently.
    if length <= lower_bound * (1 + RELATIVE_TOLERANCE):
        stop_reason, lower_bound = "proved", length
    return SearchResult(
        timeline.program, timeline, length, lower_bound, search.bound.explanation,
        tuple(heuristic_search.improvements), num_evaluated, seed, stop_reason,
        heuristic_search.numba,
    )  # fmt: skip


def _reserve_message_memory(
    builder: ProgramBuilder,
    problem: SchedulingProblem,
    orders: Sequence[tuple[str, Order]],
    bound: float,
    seconds: float,
    seed: int,
) -> tuple[BuiltProgram | None, SchedulingProblem]:
    """Return a first program that fits, and the problem with a capacity reduced for messages.

    The memory of messages depends on the order, so the function estimates it by short pilot
    searches. If the order of a pilot exceeds the limit with its messages, the next pilot has less
    capacity. The program is None if no pilot finds a program that fits.
    """
    best, reduced_problem, best_problem = None, problem, problem
    for _ in range(_MAX_PILOTS if builder.counts_messages else 0):
        pilot = HeuristicSearch(
            reduced_problem, bound, start_time=perf_counter(),
            seconds=seconds * _PILOT_SECONDS_SHARE, evaluations=_PILOT_EVALUATIONS,
            seed=seed, report=lambda _: None,
        )  # fmt: skip
        pilot.add_initial_orders(orders)
        pilot.run()
        if not pilot.shortest_orders:
            break
        built = builder.build_shortest(pilot.shortest_orders[:1])
        if built is not None and (best is None or built.length < best.length):
            best, best_problem = built, reduced_problem
        smaller_problem = builder.reserve_message_memory(pilot.best_order, reduced_problem)
        if smaller_problem == reduced_problem:
            break
        reduced_problem = smaller_problem
    return best, best_problem if best is not None else reduced_problem


def _build_shortest(
    builder: ProgramBuilder,
    heuristic_search: HeuristicSearch,
    built: BuiltProgram | None,
    start_time: float,
    time_limit: float,
) -> tuple[BuiltProgram | None, bool]:
    """Return the shortest program of the orders that were found, and whether Ctrl-C was pressed.

    If no program of these orders is shorter than `built`, return `built`.
    """
    try:
        built = builder.build_shortest(heuristic_search.shortest_orders[:1], built)
        # The program of an initial order may be shorter than the program of the shortest order,
        # because its messages may wait less.
        built = builder.build_shortest(heuristic_search.initial_orders, built)
        deadline = start_time + time_limit
        built = builder.build_shortest(heuristic_search.list_finalists(), built, deadline)
    except KeyboardInterrupt:
        orders = heuristic_search.shortest_orders
        return built or builder.build_shortest(orders, deadline=start_time), True
    return built, False
