"""Find the shortest schedule at each of several memory limits, with lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from time import perf_counter
from typing import Any, Final, NamedTuple

from schedir.analysis.numba_jit import NumbaStatus
from schedir.call_errors import explain_wrong_calls
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, SchedirError, UsageError, describe
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import BACKWARD, BACKWARD_INPUT
from schedir.ir.notebook_repr import render_html
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.problem import (
    SchedulingProblem,
    is_full_backward_cheaper,
    make_problem,
)
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_arguments import require_evaluations, require_seconds
from schedir.schedule_search.search_results import SearchStep, combine_numba
from schedir.schedules import get_built_in_schedules
from schedir.schedules.schedule_algebra import Schedule, has_free_v

_BOUND_SAMPLES: Final = 60  # The number of limits with a bound: enough for a smooth curve.
_BISECTION_STEPS: Final = 30  # Each step halves a range of limits: 30 steps divide it by 1e9.


class FrontierLevel(NamedTuple):
    """The shortest predicted run that the search found within one memory limit.

    Attributes:
        limit: The limit of a rank, in bytes or in (stage, microbatch) pairs in flight.
        timeline: The prediction of the run.
        bound: The lower bound on the span within the limit.
    """

    limit: float
    timeline: Timeline
    bound: float


@dataclass(frozen=True)
class MemoryFrontier:
    """The shortest runs at ascending memory limits, with lower bounds.

    With sizes, a limit is the number of bytes of a rank. Without sizes, a limit is the number of
    (stage, microbatch) pairs in flight on a rank.

    Attributes:
        shape: The pipeline shape.
        levels: The results at ascending limits. A run is never longer than the run at a smaller
            limit, because that run also fits into the larger limit. A limit above the last level
            makes no run shorter, or was not searched.
        bounds: Pairs (limit, bound) in ascending order of limits, also for limits that `levels`
            does not have. The bounds never increase. The last limit is infinite.
        timelines: The predictions of the initial and the built-in schedules.
        is_complete: False if Ctrl-C ended the search early.
        numba: The Numba status of all searches together. See `SearchResult`.
    """

    shape: PipelineShape
    levels: tuple[FrontierLevel, ...]
    bounds: tuple[tuple[float, float], ...]
    timelines: tuple[Timeline, ...]
    is_complete: bool = True
    numba: NumbaStatus = "not needed"

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def is_in_bytes(self) -> bool:
        """Return whether limits are in bytes."""
        return self.levels[0].timeline.sizes is not None

    def compute_bubble(self, span: float) -> float:
        """Return the bubble of a run of these stages: the idle share of the time of all ranks.

        Args:
            span: The span of the run, in the unit of the costs.
        """
        return max(1 - float(self.levels[0].timeline.busy.sum()) / (self.shape.ranks * span), 0.0)

    def measure_memory(self, timeline: Timeline) -> float:
        """Return the peak memory over all ranks of a run, in the unit of the limits.

        Args:
            timeline: The run, with sizes if the limits are in bytes.
        """
        return float((timeline.peak_memory if self.is_in_bytes else timeline.peak_in_flight).max())


@explain_wrong_calls("memory_frontier(PipelineShape(ranks=4, microbatches=8), Costs(F=1, B=2))")
def memory_frontier(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    *,
    split_backward: bool = True,
    levels: int = 16,
    time_limit: float = 30.0,
    max_evaluations: int | None = None,
    seed: int = 0,
    initial_schedules: Sequence[Schedule | Program] = (),
    report: Callable[[float, SearchStep, float], None] | None = None,
) -> MemoryFrontier:
    """Search for the shortest schedule at each of several memory limits.

    The limits range from the smallest possible limit to a limit above which the bound does not
    improve. The peak memory of each built-in and initial schedule is also a limit. Each search
    starts from the result of the previous limit. The searches end when no larger limit can make the
    schedule shorter, or with Ctrl-C.

    Args:
        shape: The pipeline shape.
        costs: The costs of stages. By default `Costs()`.
        sizes: The sizes of values, for limits in bytes. Without sizes, limits count the (stage,
            microbatch) pairs in flight.
        split_backward: True to split backwards into I and W.
        levels: The approximate number of limits to search.
        time_limit: The time of all searches together, in seconds.
        max_evaluations: The largest number of evaluated orders of all searches together. By default
            there is no limit.
        seed: The random seed.
        initial_schedules: Schedule functions or programs from which the searches start, in addition
            to the built-in schedules.
        report: A function of the limit, of a `SearchStep` and of the bound. The search calls this
            function as `search_schedule` calls its `report`.

    Returns:
        The frontier. It is incomplete if Ctrl-C ended the search.

    Raises:
        UsageError: `levels` is not a positive integer.
        SchedirError: See `search_schedule`.

    Example:
        >>> from schedir import Costs, PipelineShape, memory_frontier
        >>> frontier = memory_frontier(PipelineShape(ranks=4, microbatches=8), Costs(F=1, I=1, W=1),
        ...     max_evaluations=2000)
        >>> [(level.limit, level.timeline.span, level.bound) for level in frontier.levels]
        [(1.0, 72.0, 72.0), (2.0, 41.0, 40.0), (3.0, 32.0, 31.0), (4.0, 27.0, 27.0)]
    """
    if isinstance(levels, bool) or not isinstance(levels, int) or levels < 1:
        raise UsageError(f"levels must be an integer, 1 or more, not {describe(levels)}")
    time_limit = require_seconds(time_limit)
    max_evaluations = require_evaluations(max_evaluations)
    start_time = perf_counter()
    costs = Costs() if costs is None else costs

    def get_limit_arguments(limit: float) -> dict[str, Any]:
        if sizes is not None:
            return {"sizes": sizes, "memory_limit": limit}
        return {"max_in_flight": None if limit == inf else int(limit)}

    def make_limited_problem(limit: float) -> SchedulingProblem:
        return make_problem(
            shape, costs, split_backward=split_backward, **get_limit_arguments(limit)
        )

    unlimited_problem = make_limited_problem(inf)
    runs = tuple(_simulate_schedules(unlimited_problem, costs, sizes, initial_schedules))
    peaks = [float((t.peak_memory if sizes else t.peak_in_flight).max()) for t in runs]
    limits = _choose_limits(make_limited_problem, sizes, peaks, levels)
    unlimited_bound = compute_bound(unlimited_problem).value
    searched_levels: list[FrontierLevel] = []
    is_complete, num_evaluated, numba_statuses = True, 0, set[NumbaStatus]()
    for k, limit in enumerate(limits):
        num_left = len(limits) - k
        seconds = (time_limit - (perf_counter() - start_time)) / num_left
        if max_evaluations is not None:
            seconds = time_limit / len(limits)  # The bounds must not depend on the clock.
        try:
            result = search_schedule(
                shape, costs,
                **get_limit_arguments(limit),
                split_backward=split_backward,
                time_limit=max(seconds, 0.01),
                max_evaluations=None
                if max_evaluations is None
                else max((max_evaluations - num_evaluated) // num_left, 1),
                seed=seed,
                initial_schedules=[
                    *initial_schedules, *(level.timeline.program for level in searched_levels[-1:]),
                ],
                report=None if report is None else partial(report, limit),
            )  # fmt: skip
        except MemoryLimitError:  # No program fits into this limit with its messages.
            if k + 1 == len(limits):
                raise
            continue
        run, num_evaluated = result.timeline, num_evaluated + result.num_evaluated
        numba_statuses.add(result.numba)
        if searched_levels and searched_levels[-1].timeline.span < run.span:
            run = searched_levels[-1].timeline
        searched_levels.append(FrontierLevel(limit, run, result.bound))
        if result.stop_reason == "interrupted":
            is_complete = False
            break
        if run.span <= unlimited_bound * (1 + RELATIVE_TOLERANCE):
            break
    bounds = _compute_bounds(
        make_limited_problem, sizes is not None, limits, searched_levels, unlimited_bound
    )
    bound_by_limit = dict(bounds)
    for k, (limit, run, _) in enumerate(searched_levels):
        # Rounding can make a bound larger than the span, because both are sums of floats in
        # different orders.
        bound = bound_by_limit[limit]
        is_reached = run.span <= bound * (1 + RELATIVE_TOLERANCE)
        searched_levels[k] = FrontierLevel(limit, run, run.span if is_reached else bound)
    return MemoryFrontier(
        shape, tuple(searched_levels), bounds, runs, is_complete, combine_numba(numba_statuses)
    )


def _simulate_schedules(
    problem: SchedulingProblem,
    costs: Costs,
    sizes: Sizes | None,
    initial_schedules: Sequence[Schedule | Program],
) -> Iterator[Timeline]:
    """Yield the predictions of the initial and the built-in schedules of this shape, each once.

    Schedules to which the lower bound does not apply are left out. A bound for split backwards does
    not apply to full backwards that take less than I and W. A bound for full backwards does not
    apply to split backwards.
    """
    shape, seen_digests = problem.shape, set[str]()
    is_full_cheaper = is_full_backward_cheaper(costs, shape)
    for schedule in (
        *initial_schedules,
        *sorted(get_built_in_schedules().values(), key=has_free_v),
    ):
        try:
            program = compile(schedule, shape, costs=costs)
        except SchedirError:  # The schedule does not support this shape.
            continue
        ops = program.used_opcodes
        is_excluded = (
            BACKWARD in ops and is_full_cheaper if problem.split_backward else BACKWARD_INPUT in ops
        )
        if (
            program.shape == shape
            and program.has_backward
            and program.digest not in seen_digests
            and not is_excluded
        ):
            seen_digests.add(program.digest)
            yield simulate(program, costs, sizes=sizes)


def _choose_limits(
    make_limited_problem: Callable[[float], SchedulingProblem],
    sizes: Sizes | None,
    peaks: Sequence[float],
    num_levels: int,
) -> list[float]:
    """Return the memory limits to search, in ascending order."""
    unlimited_problem = make_limited_problem(inf)
    shape = unlimited_problem.shape
    weights = [0.0] * shape.ranks
    max_memory = max(map(len, shape.stages_on_rank)) * float(shape.microbatches)
    if sizes is not None:
        model_states = sizes.for_stages("model_states", shape.stages)
        weights = [
            float(model_states[list(local_stages)].sum()) for local_stages in shape.stages_on_rank
        ]
        max_memory = max(
            sum(
                (unlimited_problem.saved[s] + unlimited_problem.saved_and_deferred[s])
                * shape.microbatches
                for s in local_stages
            )
            + weights[rank]
            for rank, local_stages in enumerate(shape.stages_on_rank)
        )
    min_limit = max(
        unlimited_problem.get_min_capacity(rank) + weights[rank] for rank in range(shape.ranks)
    )
    unlimited_bound = compute_bound(unlimited_problem, 0).value

    def raises_bound(limit: float) -> bool:
        bound = compute_bound(make_limited_problem(limit), 0).value
        return bound > unlimited_bound * (1 + RELATIVE_TOLERANCE)

    low, max_limit = min_limit, max(min_limit, max_memory)
    for _ in range(_BISECTION_STEPS if raises_bound(min_limit) else 0):
        middle = (low + max_limit) / 2
        if not raises_bound(middle):
            max_limit = middle
        else:
            low = middle
    if sizes is None:
        max_limit = ceil(max_limit)
    step = (max_limit - min_limit) / max(num_levels - 1, 1) or 1.0
    if sizes is None:
        step = max(round(step), 1)
    # More memory may shorten the schedule even if the bound no longer improves. So up to
    # `num_levels` larger limits are added.
    last_limit = min(max(max_limit, *peaks, min_limit), max_limit + num_levels * step)
    grid_limits = [
        min_limit + step * k for k in range(2 * num_levels) if min_limit + step * k <= last_limit
    ]
    return sorted({*grid_limits, max_limit, *(peak for peak in peaks if peak >= min_limit)})


def _compute_bounds(
    make_limited_problem: Callable[[float], SchedulingProblem],
    is_in_bytes: bool,
    limits: Sequence[float],
    levels: Sequence[FrontierLevel],
    unlimited_bound: float,
) -> tuple[tuple[float, float], ...]:
    """Return pairs (limit, bound), also for limits that are not searched.

    A bound for a limit is also a bound for each smaller limit.
    """
    low, high = limits[0], limits[-1]
    grid_limits = [low + (high - low) * k / _BOUND_SAMPLES for k in range(_BOUND_SAMPLES + 1)]
    if not is_in_bytes:
        grid_limits = [float(round(limit)) for limit in grid_limits]
    bound_by_limit = {level.limit: level.bound for level in levels}
    best_bound, bounds = unlimited_bound, [(inf, unlimited_bound)]
    for limit in sorted({*grid_limits, *limits}, reverse=True):
        limit_bound = compute_bound(make_limited_problem(limit)).value
        best_bound = max(best_bound, limit_bound, bound_by_limit.get(limit, 0.0))
        bounds.append((limit, best_bound))
    return tuple(reversed(bounds))
