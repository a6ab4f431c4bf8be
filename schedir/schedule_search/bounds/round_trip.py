"""Compute lower bounds from the round trip of forwards and backwards.

If fewer microbatches than ranks fit into memory, a rank must wait for the return of one microbatch
before it can start another. The time of a round trip then decides how often the rank starts
microbatches.

Two microbatches on a round trip at the same time cross: the F of the later microbatch and the I of
the earlier microbatch need the same rank. Usually one of the two tasks must wait. If neither task
waits, the time between the starts of the two microbatches has one of a few values. If no two of
these values add up to the time of a round trip, microbatches start later.

Proof. Take a stage A whose memory is sufficient for k microbatches. Let D(r) be the least time from
the end of an F to the start of the I of the same microbatch on stage r, and T(r) = F + D(r) + I.
The round trip P is the least time between the starts of the F's of microbatches j and j + k on A:
F + D + I, plus W if only the end of W frees enough memory. If the I of a microbatch on A starts a
time x after its earliest start, the microbatch is late by x.

1. Take two microbatches a and b that are away from A at the same time. Let d be the time from the
   start of the F of a to the start of the F of b on A.
2. On the stages from A to some stage r, the F of b runs before the I of a. On r, this I waits for
   the F of b, so a is late by at least d - D(r). On the later stages, the F of b waits for the I of
   a, so b is late by at least T(r + 1) - d.
3. Let c be the microbatch k microbatches after a. Its F on A waits until the I or the W of a has
   freed memory. Let the F of b on A start between those of a and c, and let e be the time from its
   start to that of the F of c. Then d + e is P plus the lateness of a, which here includes any
   further wait of c.
4. Let r be the stage of step 2 for the pair a, b, and q that for the pair b, c. Then a is late by
   at least d - D(r), and b by at least e - D(q). With step 3, b is late by at least P - D(r) -
   D(q).
5. By step 2, b is also late by at least T(r + 1) - d, and c by at least T(q + 1) - e. With step 3,
   the lateness of a, b and c adds up to at least T(r + 1) + T(q + 1) - P.
6. There is one case for each pair (r, q). In the remaining case, one pair is not away at the same
   time. Then the I of the earlier microbatch runs before the F of the later one, and the lateness
   of a, b and c adds up to at least min(F, T(A) + T - P), where T is the smallest T(r) of A and the
   later stages. In each case, take the weighted mean of the lateness of a, b and c, with weight 1
   for b, and a weight w from 0 to 1 for a and c. For every w, the minimum over all cases is a lower
   bound on the mean lateness. So on average, the F of j + k starts at least P plus this bound after
   the F of j.
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

# Weights of the delays of the first and the third microbatch in `_min_average_delay`. The delay of
# the second microbatch has the weight 1. Each value gives a valid bound of the average delay, and
# the largest bound is used.
_LATENESS_WEIGHTS: Final = [k / 8 for k in range(9)]


def compute_round_trip_bound(problem: SchedulingProblem) -> LowerBound:
    """Return the lower bound from pairs of microbatches that cross.

    The F of one and the I of the other need the same rank at the same time. Microbatches cross on
    the stages after the stage with the slowest round trips.

    Args:
        problem: The problem.

    Returns:
        The bound. The bound is 0 for the objective "active_span", and if the proof does not apply
        to the problem.
    """
    latency = MicrobatchLatency.from_problem(problem)
    lags = MemoryLags.from_problem(problem)
    m, stages = problem.microbatches, problem.shape.stages
    best = LowerBound(0.0, "")
    if problem.objective != "span":
        return best
    W_lags = {lag.stage: lag.lag for lag in lags.F_after_W if lag.stage == lag.before_stage}
    pace = [0.0] * stages
    for s in range(stages - 1):
        k = lags.max_forwards_ahead(problem, s)
        awaited_W = problem.W[s] if W_lags.get(s, m) <= k else 0.0
        pace[s] = (problem.F[s] + latency.forward_to_backward[s] + problem.I[s] + awaited_W) / k
    s = max(range(stages), key=pace.__getitem__)
    k = lags.max_forwards_ahead(problem, s)
    if k < 2 or m < 2 * k + 2:
        return best
    round_trip = k * pace[s]
    delay = _min_average_delay(problem, latency, s, round_trip)
    if not delay > 0:
        return best
    for num_trips in ((m - 2) // k, (m - 2) // k - 1):
        first, second = (
            _min_remaining_time(problem, latency, lags, s, m - num_trips * k - c) for c in range(2)
        )
        remaining_time = (first + problem.F[s] + second) / 2
        value = (
            latency.until_forward[s]
            + num_trips * round_trip
            + (num_trips - 1) * delay
            + remaining_time
        )
        if value > best.value:
            best = LowerBound(
                value,
                f"rank {problem.rank_of[s]} may have {k} microbatches on later stages: a forward "
                f"begins {round_trip:.6g} after the forward of {k} microbatches before, "
                f"{num_trips} times; forwards that cross backwards are {delay:.6g} late on "
                f"average; the rest takes {remaining_time:.6g}",
            )
    return best


def _min_average_delay(
    problem: SchedulingProblem, latency: MicrobatchLatency, stage: int, round_trip: float
) -> float:
    """Return the least average delay of microbatches that cross after a stage."""
    delay_pairs = [*crossing_delays(problem, latency, stage, round_trip)]
    return max(
        min(x + weight * max(y - x, 0.0) for x, y in delay_pairs) / (1 + 2 * weight)
        for weight in _LATENESS_WEIGHTS
    )


def crossing_delays(
    problem: SchedulingProblem, latency: MicrobatchLatency, stage: int, round_trip: float
) -> Iterator[tuple[float, float]]:
    """Yield the ways in which three microbatches can cross after a stage, as pairs of delays.

    The third microbatch can start when the first returns. The second microbatch starts after the
    first and before the third.

    Args:
        problem: The problem.
        latency: The times of a microbatch that waits for no other microbatch.
        stage: The stage with the slowest round trips.
        round_trip: The time from the start of the first microbatch to the start of the third,
            without delays.

    Yields:
        The least delay of the second microbatch, and the least total delay of the three.
    """
    stages, forward_to_backward = range(stage, problem.shape.stages), latency.forward_to_backward
    round_trips = [
        problem.F[r] + forward_to_backward[r] + problem.I[r] for r in range(problem.shape.stages)
    ]
    for r in stages:
        for q in range(stage, r + 1):
            x = max(round_trip - forward_to_backward[r] - forward_to_backward[q], 0.0)
            # The last stage has no stage r + 1: `y` is then `x`.
            has_next_stage = r < stages[-1]
            y = round_trips[r + 1] + round_trips[q + 1] - round_trip if has_next_stage else x
            yield x, max(x, y)
    # The other case: the first microbatch returns before the second starts.
    slack = round_trip - round_trips[stage]
    min_delay = min(problem.F[stage], min(round_trips[stage:]) - slack)
    yield 0.0, max(min_delay, 0.0)


def _min_remaining_time(
    problem: SchedulingProblem,
    latency: MicrobatchLatency,
    lags: MemoryLags,
    stage: int,
    microbatches: int,
) -> float:
    """Return the least time from an F of a stage to the end of the run.

    `microbatches` is the number of microbatches that the stage has not run yet.
    """
    rank = problem.rank_of[stage]
    remaining_problem = replace(problem, shape=replace(problem.shape, microbatches=microbatches))
    if stage == 0:
        return compute_closed_bound(remaining_problem).value
    if len(problem.stages_of_rank[rank]) > 1:
        return problem.F[stage] + latency.forward_to_backward[stage] + problem.I[stage]
    return (
        max(bound.value for bound in rank_bounds(remaining_problem, latency, lags, rank))
        - latency.until_forward[stage]
    )
