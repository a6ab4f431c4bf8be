"""Find the precedences between tasks of one rank that a memory limit forces."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor
from typing import NamedTuple

from schedir.schedule_search.problem import SchedulingProblem


def count_fitting(capacity: float, size: float, max_count: int) -> int:
    """Return the number of values of a size that fit into a capacity.

    Args:
        capacity: `SchedulingProblem.rounded_capacity` minus the memory of other values. The
            difference still includes the rounding tolerance of the full capacity.
        size: The size of one value, in the same unit.
        max_count: The largest result.

    Returns:
        The number, at most `max_count`. -1 if `capacity` is negative.
    """
    if capacity < 0:
        return -1
    return max_count if capacity >= max_count * size else floor(capacity / size)


class MemoryLag(NamedTuple):
    """A precedence on one rank that a memory limit forces.

    The task of microbatch j on one stage starts after the task of microbatch j - `lag` on another
    stage has ended.

    Attributes:
        stage: The stage of the later task.
        before_stage: The stage of the earlier task.
        lag: The distance in microbatches.
    """

    stage: int
    before_stage: int
    lag: int


class MemoryLags(NamedTuple):
    """The I's and W's that must have ended on a rank before an F or an I can start there.

    The lag of an F is at least 1. If a lag is at least the number of microbatches, it forces
    nothing and is left out.

    The proof for F j (the F of microbatch j) of stage s on a rank, and a stage q of the same rank:

    - `F_after_I`, q = s or q after s: Until I a on q ends, the microbatches from a on have freed no
      memory on the stages up to q. The stages up to s save the microbatches a to j. The stages
      after s, up to q, save at least microbatch a, and the I on q needs `saved_and_deferred`. All
      this must fit.
    - `F_after_I`, q before s: If q has run i I's, the stages up to q save j + 1 - i microbatches.
      The stages after q, up to s, save at least one microbatch.
    - `F_after_W`: Until W a on q ends, each of the microbatches a to j - 1 uses memory. This memory
      has deferred weight gradients on q, or activations that the stages up to s save. If q is not
      after s, only the activations that the stages up to q save are included. The proof counts the
      smaller of the two sizes. In addition, the stages up to s save microbatch j.

    The proof of `I_after_W`: I j of stage s uses `saved_and_deferred`, and the stages before s save
    microbatch j. The stages after s have already run I j. The rest of the memory can have deferred
    weight gradients of stage q.

    Attributes:
        F_after_I: The lags of F's after I's.
        F_after_W: The lags of F's after W's.
        I_after_W: The lags of I's after W's.
    """

    F_after_I: tuple[MemoryLag, ...]
    F_after_W: tuple[MemoryLag, ...]
    I_after_W: tuple[MemoryLag, ...]

    @classmethod
    def from_problem(cls, problem: SchedulingProblem) -> MemoryLags:
        """Return the lags of all ranks of a problem.

        Args:
            problem: The problem.
        """
        lags_by_kind: tuple[list[MemoryLag], ...] = ([], [], [])
        for rank in range(problem.shape.ranks):
            for all_lags, rank_lags in zip(lags_by_kind, _rank_lags(problem, rank), strict=True):
                all_lags += (lag for lag in rank_lags if lag.lag < problem.microbatches)
        return cls(*map(tuple, lags_by_kind))

    def max_forwards_ahead(self, problem: SchedulingProblem, stage: int) -> int:
        """Return the largest number of F's of a stage that start before the stage's first I ends.

        Args:
            problem: The problem of the lags.
            stage: The stage.
        """
        stage_lags = (lag.lag for lag in self.F_after_I if lag.stage == lag.before_stage == stage)
        return min(stage_lags, default=problem.microbatches)


def _rank_lags(problem: SchedulingProblem, rank: int) -> Iterator[list[MemoryLag]]:
    """Yield the lists `F_after_I`, `F_after_W` and `I_after_W` of a rank."""
    local_stages = problem.stages_of_rank[rank]
    saved = problem.saved
    deferred = problem.deferred_wgrad
    capacity, saved_up_to, saved_sum = problem.rounded_capacity[rank], {}, 0.0
    for s in local_stages:
        saved_sum += saved[s]
        saved_up_to[s] = saved_sum
    F_I, F_W, I_W = [], [], []

    def fit(free_memory: float, size: float) -> int:
        return count_fitting(free_memory, size, problem.microbatches)

    for s in local_stages:
        saved_below = saved_up_to[s] - saved[s]
        for q in local_stages:
            free_memory = capacity - abs(saved_up_to[s] - saved_up_to[q])
            if q >= s:
                free_memory -= problem.saved_and_deferred[q] - saved[q]
            F_I.append(MemoryLag(s, q, max(fit(free_memory, saved_up_to[min(s, q)]), 1)))
            if not problem.split_backward:
                continue
            if q > s:
                count = fit(capacity - saved_up_to[s], min(saved_up_to[s], deferred[q])) + 1
            elif deferred[q] <= saved_up_to[q]:
                count = fit(capacity - saved_up_to[s], deferred[q]) + 1
            else:
                count = fit(capacity - (saved_up_to[s] - saved_up_to[q]), saved_up_to[q])
            F_W.append(MemoryLag(s, q, max(count, 1)))
            if q >= s:  # The stages after s have already run the I of this microbatch.
                free_memory = capacity - saved_below - problem.saved_and_deferred[s]
                I_W.append(MemoryLag(s, q, max(fit(free_memory, deferred[q]) + (q == s), 0)))
    yield from (F_I, F_W, I_W)
