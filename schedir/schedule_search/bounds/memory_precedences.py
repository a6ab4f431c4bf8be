"""Find precedences between microbatches that a memory limit forces."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor
from typing import NamedTuple

from schedir.schedule_search.problem import SchedulingProblem


def count_fitting(capacity: float, size: float, max_count: int) -> int:
    """How many of a size fit into a room, at most `max_count`; -1 where there is less than no room.

    The room is `SchedulingProblem.ample`, less what else is there: that allows for rounding, which
    may be more than a part of what is left.
    """
    if capacity < 0:
        return -1
    return max_count if capacity >= max_count * size else floor(capacity / size)


class MemoryLag(NamedTuple):
    """Before the work of microbatch j on one stage, that of j - `lag` on another has ended."""

    stage: int
    before_stage: int
    lag: int


class MemoryLags(NamedTuple):
    """What must have ended on a rank before an F or an I may start there: Is and Ws.

    `F_after_I` has the lags of F's behind I's, and so on.  Where there is no room for less than one
    microbatch behind another, the lag is 1; a lag of all microbatches is not said.

    Why they hold.  Let F j of stage s start on a rank.  `F_after_I`: until the I of a microbatch a
    on stage q, at or behind s, has ended, nothing of a and of what follows it has gone from the
    stages up to q; all from a to j are on those up to s, and a must get to q, too: so that fits,
    with
    `saved_and_deferred` for a on q.  Of a stage q before s: if it has run i I's, stages up to q
    hold j + 1 - i microbatches whole, and those between q and s one.  `F_after_W`: until the W of a
    on q has ended, each from a to j - 1 has its tape there, or is whole on the stages up to s.
    Where q is not behind s and a tape is no larger than that, j is whole up to s, and the rest are
    tapes.
    `I_after_W`: while I j of stage s runs, it holds `saved_and_deferred`, and stages before s hold
    j; on q there are tapes, and stages behind s have run I j.
    """

    F_after_I: tuple[MemoryLag, ...]
    F_after_W: tuple[MemoryLag, ...]
    I_after_W: tuple[MemoryLag, ...]

    @classmethod
    def from_problem(cls, problem: SchedulingProblem) -> MemoryLags:
        """Those of a SchedulingProblem."""
        kinds: tuple[list[MemoryLag], ...] = ([], [], [])
        for rank in range(problem.shape.ranks):
            for found, lags in zip(kinds, _rank_lags(problem, rank), strict=True):
                found += (lag for lag in lags if lag.lag < problem.microbatches)
        return cls(*map(tuple, kinds))

    def max_forwards_ahead(self, problem: SchedulingProblem, stage: int) -> int:
        """How many F's of a stage may have started before its first I has ended."""
        found = (lag.lag for lag in self.F_after_I if lag.stage == lag.before_stage == stage)
        return min(found, default=problem.microbatches)


def _rank_lags(problem: SchedulingProblem, rank: int) -> Iterator[list[MemoryLag]]:
    own, never, saved, tape = (
        problem.stages_of_rank[rank],
        problem.microbatches,
        problem.saved,
        problem.deferred_wgrad,
    )
    room, whole, sum_ = problem.rounded_capacity[rank], {}, 0.0
    for s in own:
        sum_ += saved[s]
        whole[s] = sum_
    F_I, F_W, I_W = [], [], []
    for s in own:
        below = whole[s] - saved[s]
        for q in own:
            if q >= s:
                others = room - (whole[q] - whole[s]) - (problem.saved_and_deferred[q] - saved[q])
                F_I.append(MemoryLag(s, q, max(count_fitting(others, whole[s], never), 1)))
            else:
                others = room - (whole[s] - whole[q])
                F_I.append(MemoryLag(s, q, max(count_fitting(others, whole[q], never), 1)))
            if not problem.split_backward:
                continue
            if q > s:
                tapes = count_fitting(room - whole[s], min(whole[s], tape[q]), never) + 1
            elif tape[q] <= whole[q]:
                tapes = count_fitting(room - whole[s], tape[q], never) + 1
            else:
                tapes = count_fitting(room - (whole[s] - whole[q]), whole[q], never)
            F_W.append(MemoryLag(s, q, max(tapes, 1)))
            if q >= s:  # behind s it has run the I of this microbatch, too
                tapes = count_fitting(
                    room - below - problem.saved_and_deferred[s], tape[q], never
                ) + (q == s)
                I_W.append(MemoryLag(s, q, max(tapes, 0)))
    yield from (F_I, F_W, I_W)
