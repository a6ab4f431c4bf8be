"""Find the shortest schedule at each memory limit, with lower bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from time import perf_counter
from typing import Final, NamedTuple

from schedir.analysis.numba_jit import Numba
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, SchedirError, UsageError, describe
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import BACKWARD, BACKWARD_INPUT
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.possible_saving import ROUNDING
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedule_search.bounds.lower_bound import bound_of
from schedir.schedule_search.problem import SchedulingProblem, problem_of, whole_is_less
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_budget import evaluations_of, seconds_of
from schedir.schedule_search.search_results import SearchResult, SearchStep, combined
from schedir.schedules import built_in
from schedir.schedules.schedule_algebra import Schedule, takes_v

_DRAWN: Final = 60  # limits for which there is a bound
_HALVES: Final = 30  # of a range, until a limit is found


class FrontierLevel(NamedTuple):
    """Within a limit, in bytes or in flight: the shortest run that was found, and its bound."""

    limit: float
    run: Timeline
    bound: float


@dataclass(frozen=True)
class MemoryFrontier:
    """Memory against time: `levels` of ascending limits, and `runs` that others have made.

    A level's run is never longer than that of a smaller limit, since what fits there fits here.
    After the last level nothing is gained any more, or it is not known.  `bounds` has more limits:
    (limit, bound), never ascending, the last without any limit.  Limits are in bytes of a rank, or
    where the runs have no sizes they count (stage, mb) in flight.  `complete` is False where
    somebody has interrupted it.  `numba` is that of `SearchResult`, for all searches together.
    """

    shape: PipelineShape
    levels: tuple[FrontierLevel, ...]
    bounds: tuple[tuple[float, float], ...]
    runs: tuple[Timeline, ...]
    complete: bool = True
    numba: Numba = "not needed"

    @property
    def in_bytes(self) -> bool:
        """Whether limits are in bytes."""
        return self.levels[0].run.sizes is not None

    def bubble(self, span: float) -> float:
        """The idle share of all ranks in a run of these stages that takes so long."""
        return max(1 - float(self.levels[0].run.busy.sum()) / (self.shape.ranks * span), 0.0)

    def memory(self, run: Timeline) -> float:
        """What a run holds at most, in the unit of limits."""
        return float((run.peak_memory if self.in_bytes else run.peak_in_flight).max())


def memory_frontier(
    shape: PipelineShape,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    *,
    split: bool = True,
    levels: int = 16,
    seconds: float = 30.0,
    evaluations: int | None = None,
    seed: int = 0,
    start: Sequence[Schedule | Program] = (),
    report: Callable[[float, SearchStep, float], None] | None = None,
) -> MemoryFrontier:
    """What a search finds at each of some limits, in so many seconds, or evaluations, in all.

    Limits are bytes of `sizes`, or without these how many (stage, mb) are in flight.  About
    `levels` lie between the least that works and where the bound is that without any limit; each
    limit that a built-in schedule, or one of `start`, just fits is one, too.  A search begins with
    what the one before has found.  It ends where nothing can be shorter at any limit, or with
    Ctrl-C.  `report` is called with the limit, and with what `search_schedule` reports.

    Raises what `search_schedule` raises.

    >>> from schedir import Costs, PipelineShape, memory_frontier
    >>> found = memory_frontier(PipelineShape(ranks=4, microbatches=8), Costs(F=1, I=1, W=1),
    ...     evaluations=2000)
    >>> [(level.limit, level.run.span, level.bound) for level in found.levels]
    [(1.0, 72.0, 72.0), (2.0, 41.0, 40.0), (3.0, 32.0, 31.0), (4.0, 27.0, 27.0)]
    """
    if isinstance(levels, bool) or not isinstance(levels, int) or levels < 1:
        raise UsageError(f"levels are a whole number above 0, not {describe(levels)}")
    seconds, evaluations = seconds_of(seconds), evaluations_of(evaluations)
    began, costs = perf_counter(), Costs() if costs is None else costs
    free = _problem(shape, costs, sizes, None, split=split)
    runs = tuple(_runs(free, costs, sizes, start))
    peaks = [float((t.peak_memory if sizes else t.peak_in_flight).max()) for t in runs]
    limits = _limits(shape, costs, sizes, peaks, levels, split=split)
    never = bound_of(free).value
    found: list[FrontierLevel] = []
    complete, tried, uses = True, 0, set[Numba]()
    for k, limit in enumerate(limits):
        rest = len(limits) - k
        part = (seconds - (perf_counter() - began)) / rest
        if evaluations is not None:
            part = seconds / len(limits)  # no clock decides how much is proven
        try:
            last = _search(
                shape, costs, sizes, limit,
                split=split,
                seconds=max(part, 0.01),
                evaluations=None if evaluations is None else max((evaluations - tried) // rest, 1),
                seed=seed,
                start=[*start, *(level.run.program for level in found[-1:])],
                report=None if report is None else _at(report, limit),
            )  # fmt: skip
        except MemoryLimitError:  # there is no room for messages
            if k + 1 == len(limits):
                raise
            continue
        run, tried = last.timeline, tried + last.tried
        uses.add(last.numba)
        if found and found[-1].run.span < run.span:
            run = found[-1].run
        found.append(FrontierLevel(limit, run, last.bound))
        if last.stopped == "interrupted":
            complete = False
            break
        if run.span <= never * (1 + ROUNDING):
            break
    bounds = _bounds(shape, costs, sizes, limits, found, never, split=split)
    below = dict(bounds)
    tight = tuple(_tight(level, below[level.limit]) for level in found)
    return MemoryFrontier(shape, tight, bounds, runs, complete, combined(uses))


def _tight(level: FrontierLevel, bound: float) -> FrontierLevel:
    """The level with this bound; sums of floats, each in an order of its own, may differ a bit."""
    span = level.run.span
    return level._replace(bound=span if span <= bound * (1 + ROUNDING) else bound)


def _at(
    report: Callable[[float, SearchStep, float], None], limit: float
) -> Callable[[SearchStep, float], None]:
    return lambda step, bound: report(limit, step, bound)


def _problem(
    shape: PipelineShape, costs: Costs, sizes: Sizes | None, limit: float | None, *, split: bool
) -> SchedulingProblem:
    if sizes is not None:
        return problem_of(shape, costs, sizes, inf if limit is None else limit, split=split)
    few = None if limit is None else int(limit)
    return problem_of(shape, costs, in_flight=few, split=split)


def _search(
    shape: PipelineShape, costs: Costs, sizes: Sizes | None, limit: float, **how: object
) -> SearchResult:
    if sizes is not None:
        return search_schedule(shape, costs, sizes, limit, **how)  # type: ignore[arg-type]
    return search_schedule(shape, costs, in_flight=int(limit), **how)  # type: ignore[arg-type]


def _runs(
    problem: SchedulingProblem,
    costs: Costs,
    sizes: Sizes | None,
    start: Sequence[Schedule | Program],
) -> Iterator[Timeline]:
    """What is given, and the built-in schedules of this shape, each once.

    A bound of split backwards says nothing of whole ones that take less than both halves, and one
    of whole ones nothing of split ones: these are left out.
    """
    shape, seen = problem.shape, set[str]()
    shorter = whole_is_less(costs, shape)
    for schedule in (*start, *sorted(built_in().values(), key=takes_v)):
        try:
            program = compile(schedule, shape, costs=costs)
        except SchedirError:  # it is for other shapes
            continue
        ops = program.ops
        of_others = BACKWARD in ops and shorter if problem.split else BACKWARD_INPUT in ops
        if (
            program.shape == shape
            and program.trains
            and program.digest not in seen
            and not of_others
        ):
            seen.add(program.digest)
            yield simulate(program, costs, sizes=sizes)


def _limits(
    shape: PipelineShape,
    costs: Costs,
    sizes: Sizes | None,
    peaks: Sequence[float],
    levels: int,
    *,
    split: bool,
) -> list[float]:
    """Limits to search, ascending."""
    free = _problem(shape, costs, sizes, None, split=split)
    weights = [0.0] * shape.ranks
    all_held = max(map(len, shape.stages_of)) * float(shape.microbatches)
    if sizes is not None:
        each = sizes.of("model_states", shape.stages)
        weights = [float(each[list(own)].sum()) for own in shape.stages_of]
        all_held = max(
            sum((free.saved[s] + free.both[s]) * shape.microbatches for s in own) + weights[rank]
            for rank, own in enumerate(shape.stages_of)
        )
    least = max(free.least_room(rank) + weights[rank] for rank in range(shape.ranks))
    never = bound_of(free, 0).value

    def gains(limit: float) -> bool:
        return bound_of(_problem(shape, costs, sizes, limit, split=split), 0).value > never * (
            1 + ROUNDING
        )

    low, most = least, max(least, all_held)
    for _ in range(_HALVES if gains(least) else 0):
        middle = (low + most) / 2
        if not gains(middle):
            most = middle
        else:
            low = middle
    if sizes is None:
        most = ceil(most)
    step = (most - least) / max(levels - 1, 1) or 1.0
    if sizes is None:
        step = max(round(step), 1)
    # What a bound does not say to gain nothing may do so: as many again lie behind.
    last = min(max(most, *peaks, least), most + levels * step)
    between = [least + step * k for k in range(2 * levels) if least + step * k <= last]
    return sorted({*between, most, *(peak for peak in peaks if peak >= least)})


def _bounds(
    shape: PipelineShape,
    costs: Costs,
    sizes: Sizes | None,
    limits: Sequence[float],
    found: Sequence[FrontierLevel],
    never: float,
    *,
    split: bool,
) -> tuple[tuple[float, float], ...]:
    """Bounds of more limits than are searched.  One of a larger limit holds for a smaller, too."""
    low, high = limits[0], limits[-1]
    between = [low + (high - low) * k / _DRAWN for k in range(_DRAWN + 1)]
    if sizes is None:
        between = [float(round(limit)) for limit in between]
    known = {level.limit: level.bound for level in found}
    best, tight = never, [(inf, never)]
    for limit in sorted({*between, *limits}, reverse=True):
        own = bound_of(_problem(shape, costs, sizes, limit, split=split)).value
        best = max(best, own, known.get(limit, 0.0))
        tight.append((limit, best))
    return tuple(reversed(tight))
