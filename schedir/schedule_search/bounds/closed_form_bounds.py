"""Lower bounds from the work and the waits of each rank, in formulas.

Each is of one rank.  Before its first I it can only run F's, as many as it may hold; after its last
F only what it still holds; and while a microbatch is on its way there and back, only what it may
hold beside that one.  These times do not overlap, so what it must wait in them adds up to its work.
docs/search.md has the proofs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from schedir.schedule_search.bounds.memory_precedences import MemoryLags, fit
from schedir.schedule_search.bounds.microbatch_latency import MicrobatchLatency
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.search_results import LowerBound


def closed_bound(problem: SchedulingProblem) -> LowerBound:
    """The largest closed bound of a SchedulingProblem, over all ranks."""
    paths, lags = MicrobatchLatency.of(problem), MemoryLags.of(problem)
    ranks = range(problem.shape.ranks)
    each = (bound for rank in ranks for bound in of_rank(problem, paths, lags, rank))
    return max(each, key=lambda bound: bound.value)


def of_rank(
    problem: SchedulingProblem, paths: MicrobatchLatency, lags: MemoryLags, rank: int
) -> Iterator[LowerBound]:
    """The closed bounds of a rank."""
    return _RankWait(problem, paths, lags, rank).bounds()


class _WorkType(NamedTuple):
    """What can be taken: the time that one is worth, what it takes of the room, how many."""

    worth: float
    size: float
    number: int


def _most(kinds: Sequence[_WorkType], room: float) -> float:
    """The most time that fits into a room: a knapsack whose last item may be cut."""
    if len({kind.size for kind in kinds}) == 1 and (size := kinds[0].size) and room < inf:
        room = size * fit(room, size, sum(kind.number for kind in kinds))
    worth, room = 0.0, max(room, 0.0)
    for kind in sorted(kinds, key=lambda kind: kind.size / kind.worth if kind.worth else inf):
        number = min(float(kind.number), room / kind.size if kind.size else inf)
        worth += number * kind.worth
        room -= number * kind.size
    return worth


@dataclass(frozen=True)
class _RankWait:
    """A rank, and how long it must wait; times are those of `MicrobatchLatency` and
    `MemoryLags`."""

    problem: SchedulingProblem
    paths: MicrobatchLatency
    lags: MemoryLags
    rank: int

    @cached_property
    def own(self) -> tuple[int, ...]:
        return self.problem.own[self.rank]

    @cached_property
    def begin(self) -> float:
        return self.paths.head[self.own[0]] * (self.problem.objective == "span")

    @cached_property
    def tail(self) -> float:
        return self.problem.tail[self.rank] * (self.problem.objective == "span")

    @cached_property
    def lag(self) -> int:
        """How many F's of the rank's last stage may be there before its first I has ended."""
        return self.lags.ahead(self.problem, self.own[-1])

    @cached_property
    def held(self) -> float:
        """The most work that is left of other microbatches than one of which all F's have run."""
        problem, own, others = self.problem, self.own, self.problem.microbatches - 1
        room = problem.ample[self.rank] - sum(problem.saved[s] for s in own)
        all_of = others * sum(problem.I[s] + problem.W[s] for s in own)
        if len(own) > 1:
            kinds = [_WorkType(problem.I[s] + problem.W[s], problem.saved[s], others) for s in own]
            kinds += [_WorkType(problem.W[s], problem.tape[s], others) for s in own]
            return min(_most(kinds, room), all_of)
        (s,) = own
        I, W, saved, tape = problem.I[s], problem.W[s], problem.saved[s], problem.tape[s]
        whole = fit(room, saved, others)
        if whole == others:
            return all_of
        each = ((x, fit(room - x * saved, tape, others - x)) for x in range(whole + 1))
        return max((x * (I + W) + y * W for x, y in each), default=0.0)

    @cached_property
    def before_first_I(self) -> float:
        """The idle time until the rank's first I starts; until then it can only run F's."""
        problem, first, last = self.problem, self.own[0], self.own[-1]
        head, m = self.paths.head, problem.microbatches
        way = head[last] - head[first] + problem.F[last] + self.paths.turn[last]
        room = problem.ample[self.rank] + problem.saved[last] - problem.both[last]
        ahead = _most([_WorkType(problem.F[s], problem.saved[s], m) for s in self.own], room)
        return max(way - ahead, 0.0)

    @cached_property
    def while_away(self) -> tuple[int, float]:
        """How often a microbatch, neither the first nor the last, must be back before the next one
        of these may come, and the idle time while it is away; for a rank of one stage."""
        often = (self.problem.microbatches - 1) // self.lag - 1
        if len(self.own) > 1 or often < 1:
            return 0, 0.0
        (s,) = self.own
        beside = (self.lag - 1) * self.problem.F[s] + self.held
        return often, max(self.paths.turn[s] - beside, 0.0)

    @cached_property
    def before_last_I(self) -> float:
        """The idle time between the rank's last F and its last I."""
        problem, (first, *later), last = self.problem, self.own, self.own[-1]
        way = self.paths.turn[last]
        if later:
            way += problem.I[last] + self.paths.back[last] - self.paths.back[first]
            way -= problem.I[first]
        return max(way - self.held - sum(problem.I[s] + problem.W[s] for s in later), 0.0)

    @cached_property
    def after_last_I(self) -> float:
        """The most that the rank can still work after its last I: W's of what it holds."""
        problem, (first, *later) = self.problem, self.own
        m, room = problem.microbatches, problem.ample[self.rank] - problem.both[first]
        late = [_WorkType(problem.W[s], problem.tape[s], m) for s in later]
        late.append(_WorkType(problem.W[first], problem.tape[first], m - 1))
        return problem.W[first] + _most(late, room)

    def bounds(self) -> Iterator[LowerBound]:
        """Each of the bounds of the rank."""
        problem = self.problem
        start, end = self.before_first_I, self.before_last_I
        if problem.microbatches <= self.lag:  # the last F may come before the first I
            start, end = (start, 0.0) if start > end else (0.0, end)
        often, each = self.while_away
        busy = start + often * each + end + problem.work(self.rank)
        said = self._said(start, end)
        yield LowerBound(self.begin + busy + self.tail, said + self._said_ends())
        around, left = self.paths.around[self.own[0]], self.after_last_I
        yield LowerBound(
            around + busy - left,
            f"{said}, after which it can work {left:.6g}; to it and back from it a microbatch "
            f"takes {around:.6g}",
        )
        room = problem.room[self.rank]
        if 0 < room < inf:
            area = problem.microbatches * sum(map(self._area, self.own)) / room
            yield LowerBound(
                self.begin + area + self.tail,
                f"rank {self.rank} holds each microbatch on its way there and back, and what "
                f"its W needs: within its limit that takes {area:.6g}{self._said_ends()}",
            )

    def _area(self, s: int) -> float:
        """The least of memory times time that a microbatch takes on a stage."""
        problem = self.problem
        there = problem.F[s] + self.paths.turn[s]
        return (
            problem.saved[s] * there
            + problem.both[s] * problem.I[s]
            + problem.tape[s] * problem.W[s]
        )

    def _said(self, start: float, end: float) -> str:
        """Work and idle times in words."""
        m, (often, each) = self.problem.microbatches, self.while_away
        one = len(self.own) == 1
        ahead = f"its {_ordinal(min(self.lag, m))} F" if one else "the F's that fit"
        idle = [
            f"{start:.6g} between {ahead} and its first I" * (start > 0),
            f"{often} times {each:.6g} while a microbatch is away" * (often * each > 0),
            f"{end:.6g} between its last F and its last I" * (end > 0),
        ]
        *rest, last = filter(None, idle) if any(idle) else [""]
        holds = f" and holds {self.lag}" * (one and self.lag < m)
        text = f"rank {self.rank} works {self.problem.work(self.rank):.6g}{holds}"
        return text + (f": it idles {', '.join(rest)}{', and ' * bool(rest)}{last}" if last else "")

    def _said_ends(self) -> str:
        """What is before and after the rank's work in words."""
        begin = f"; its first activation comes at {self.begin:.6g}" * (self.begin > 0)
        return begin + f"; its step takes {self.tail:.6g}" * (self.tail > 0)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
