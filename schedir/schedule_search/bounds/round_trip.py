"""Lower bounds from the round trip of forwards and backwards.

Where fewer microbatches fit than there are ranks, a rank waits for one to come back before it may
begin another, and how long that takes sets the pace.  Two that are away at once meet: the later
one's F and the earlier one's I want the same rank.  Unless the second began a certain time after
the first, one of them is late.  These times are few, and whether two of them add up to the pace is
a matter of the costs; where they do not, the pace is slower.  docs/search.md has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from schedir.schedule_search.bounds.closed_form_bounds import compute_closed_bound, rank_bounds
from schedir.schedule_search.bounds.memory_precedences import MemoryLags
from schedir.schedule_search.bounds.microbatch_latency import MicrobatchLatency
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.search_results import LowerBound

_LATENESS_WEIGHTS: Final = [k / 8 for k in range(9)]


def compute_round_trip_bound(problem: SchedulingProblem) -> LowerBound:
    """The bound by what crosses behind the stage that sets the pace; of spans."""
    paths, lags = MicrobatchLatency.from_problem(problem), MemoryLags.from_problem(problem)
    m, stages = problem.microbatches, problem.shape.stages
    best = LowerBound(0.0, "")
    if problem.objective != "span":
        return best
    waits = {lag.stage: lag.lag for lag in lags.F_after_W if lag.stage == lag.before_stage}
    pace = [0.0] * stages
    for s in range(stages - 1):
        k = lags.max_forwards_ahead(problem, s)
        rest = problem.W[s] if waits.get(s, m) <= k else 0.0
        pace[s] = (problem.F[s] + paths.forward_to_backward[s] + problem.I[s] + rest) / k
    s = max(range(stages), key=pace.__getitem__)
    k = lags.max_forwards_ahead(problem, s)
    if k < 2 or m < 2 * k + 2:
        return best
    away = k * pace[s]
    late = _min_average_delay(problem, paths, s, away)
    if not late > 0:
        return best
    for often in ((m - 2) // k, (m - 2) // k - 1):
        first, second = (
            _min_remaining_time(problem, paths, lags, s, m - often * k - c) for c in range(2)
        )
        after = (first + problem.F[s] + second) / 2
        value = paths.until_forward[s] + often * away + (often - 1) * late + after
        if value > best.value:
            best = LowerBound(
                value,
                f"rank {problem.rank_of[s]} may have {k} microbatches away: {away:.6g} after one "
                f"another may come, {often} times; their forwards cross what comes back, and so "
                f"they are {late:.6g} late on average; what is left then takes {after:.6g}",
            )
    return best


def _min_average_delay(
    problem: SchedulingProblem, latency: MicrobatchLatency, stage: int, round_trip: float
) -> float:
    """The least, on average, that microbatches are late which cross behind a stage."""
    options = [*crossing_delays(problem, latency, stage, round_trip)]
    return max(
        min(x + weight * max(y - x, 0.0) for x, y in options) / (1 + 2 * weight)
        for weight in _LATENESS_WEIGHTS
    )


def crossing_delays(
    problem: SchedulingProblem, latency: MicrobatchLatency, stage: int, round_trip: float
) -> Iterator[tuple[float, float]]:
    """How three microbatches can cross, the second between the first and the one that may come when
    that is back: what the second is late at least, and all three together."""
    stages, turn = range(stage, problem.shape.stages), latency.forward_to_backward
    loop = [problem.F[r] + turn[r] + problem.I[r] for r in range(problem.shape.stages)]
    for r in stages:
        for q in range(stage, r + 1):
            x = max(round_trip - turn[r] - turn[q], 0.0)
            both = r < stages[-1]  # else x is the larger one
            y = loop[r + 1] + loop[q + 1] - round_trip if both else x
            yield x, max(x, y)
    rest = round_trip - loop[stage]  # one is back before the next one comes
    least = min(problem.F[stage], min(loop[stage:]) - rest)
    yield 0.0, max(least, 0.0)


def _min_remaining_time(
    problem: SchedulingProblem,
    latency: MicrobatchLatency,
    lags: MemoryLags,
    stage: int,
    microbatches: int,
) -> float:
    """The least time from an F on, with that many microbatches left, to the end of the run."""
    rank = problem.rank_of[stage]
    left = replace(problem, shape=replace(problem.shape, microbatches=microbatches))
    if stage == 0:
        return compute_closed_bound(left).value
    if len(problem.stages_of_rank[rank]) > 1:
        return problem.F[stage] + latency.forward_to_backward[stage] + problem.I[stage]
    return (
        max(bound.value for bound in rank_bounds(left, latency, lags, rank))
        - latency.until_forward[stage]
    )
