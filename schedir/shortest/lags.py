"""Lags: which microbatch must have gone before another one may come, for want of memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, inf
from typing import NamedTuple

from schedir.shortest.problem import ROUNDING, Problem


def fit(room: float, size: float, most: int) -> int:
    """How many of a size fit into a room, at most `most`; -1 where there is less than no room."""
    room += ROUNDING * abs(room)
    if room < 0:
        return -1
    return most if room >= most * size or room == inf else floor(room / size + ROUNDING)


class Lag(NamedTuple):
    """Before the work of microbatch j on one stage, that of j - `lag` on another has ended."""

    stage: int
    before: int
    lag: int


class Lags(NamedTuple):
    """What must have ended on a rank before an F or an I may start there: Is and Ws.

    `F_I` has the lags of F's behind I's, and so on.  Where there is no room for less than one
    microbatch behind another, the lag is 1; a lag of all microbatches is not said.

    Why they hold.  Let F j of stage s start on a rank.  Each stage of the rank before s has run F
    j, and it has run I's of no microbatch that s has not.  So where stage q, at or before s, has
    run i I's, all stages up to q hold j + 1 - i microbatches whole, and those between q and s one:
    that fits, which is `F_I`.  If all these have gone back but j, what is left is one microbatch
    whole and tapes, as many as there are I's without a W: that fits, which is `F_W`.  While I j of
    stage s runs, it holds `both` instead, and stages behind s have run I j: `F_I` again, and `I_W`.
    """

    F_I: tuple[Lag, ...]
    F_W: tuple[Lag, ...]
    I_W: tuple[Lag, ...]

    @classmethod
    def of(cls, problem: Problem) -> Lags:
        """Those of a Problem."""
        kinds: tuple[list[Lag], ...] = ([], [], [])
        for rank in range(problem.plan.ranks):
            for found, lags in zip(kinds, _of_rank(problem, rank), strict=True):
                found += (lag for lag in lags if lag.lag < problem.microbatches)
        return cls(*map(tuple, kinds))

    def ahead(self, problem: Problem, stage: int) -> int:
        """How many F's of a stage may have started before its first I has ended."""
        found = (lag.lag for lag in self.F_I if lag.stage == lag.before == stage)
        return min(found, default=problem.microbatches)


def _of_rank(problem: Problem, rank: int) -> Iterator[list[Lag]]:
    own, never, saved, tape = problem.own[rank], problem.microbatches, problem.saved, problem.tape
    room, whole, sum_ = problem.room[rank], {}, 0.0
    for s in own:
        sum_ += saved[s]
        whole[s] = sum_
    F_I, F_W, I_W = [], [], []
    for s in own:
        beside = room - (whole[s] - saved[s]) - problem.both[s]  # while an I runs
        F_I.append(Lag(s, s, max(fit(beside, whole[s], never), 0) + 1))
        for q in own:
            if q <= s:
                others = room - (whole[s] - whole[q])
                F_I.append(Lag(s, q, max(fit(others, whole[q], never), 1)))
            if q <= s and problem.split:
                whole_ones = max(fit(others, whole[q], never), 1)
                tapes = max(fit(room - whole[s], tape[q], never), 0) + 1
                F_W.append(Lag(s, q, tapes if tape[q] <= whole[q] else whole_ones))
            if q >= s and problem.split:
                run = q > s  # it has run the I of this microbatch, too
                I_W.append(Lag(s, q, max(fit(beside, tape[q], never) + 1 - run, 0)))
    yield from (F_I, F_W, I_W)
