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

from schedir.schedule_search.bounds.memory_precedences import MemoryLags, count_fitting
from schedir.schedule_search.bounds.microbatch_latency import MicrobatchLatency
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.search_results import LowerBound


def compute_closed_bound(problem: SchedulingProblem) -> LowerBound:
    """The largest closed bound of a SchedulingProblem, over all ranks."""
    paths, lags = MicrobatchLatency.from_problem(problem), MemoryLags.from_problem(problem)
    ranks = range(problem.shape.ranks)
    each = (bound for rank in ranks for bound in rank_bounds(problem, paths, lags, rank))
    return max(each, key=lambda bound: bound.value)


def rank_bounds(
    problem: SchedulingProblem, latency: MicrobatchLatency, lags: MemoryLags, rank: int
) -> Iterator[LowerBound]:
    """The closed bounds of a rank."""
    return _RankWait(problem, latency, lags, rank).bounds()


class _WorkType(NamedTuple):
    """What can be taken: the time that one is worth, what it takes of the room, how many."""

    time: float
    memory: float
    number: int


def _max_time_in_memory(work_types: Sequence[_WorkType], capacity: float) -> float:
    """The most time that fits into a room: a knapsack whose last item may be cut."""
    if (
        len({kind.memory for kind in work_types}) == 1
        and (size := work_types[0].memory)
        and capacity < inf
    ):
        capacity = size * count_fitting(capacity, size, sum(kind.number for kind in work_types))
    worth, capacity = 0.0, max(capacity, 0.0)
    for kind in sorted(work_types, key=lambda kind: kind.memory / kind.time if kind.time else inf):
        number = min(float(kind.number), capacity / kind.memory if kind.memory else inf)
        worth += number * kind.time
        capacity -= number * kind.memory
    return worth


@dataclass(frozen=True)
class _RankWait:
    """A rank, and how long it must wait; times are those of `MicrobatchLatency` and
    `MemoryLags`."""

    problem: SchedulingProblem
    latency: MicrobatchLatency
    lags: MemoryLags
    rank: int

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.problem.stages_of_rank[self.rank]

    @cached_property
    def first_arrival(self) -> float:
        return self.latency.until_forward[self.stages[0]] * (self.problem.objective == "span")

    @cached_property
    def tail_time(self) -> float:
        return self.problem.tail_time[self.rank] * (self.problem.objective == "span")

    @cached_property
    def max_forwards_ahead(self) -> int:
        """How many F's of the rank's last stage may be there before its first I has ended."""
        return self.lags.max_forwards_ahead(self.problem, self.stages[-1])

    @cached_property
    def max_other_work(self) -> float:
        """The most work that is left of other microbatches than one of which all F's have run."""
        problem, own, others = self.problem, self.stages, self.problem.microbatches - 1
        room = problem.rounded_capacity[self.rank] - sum(problem.saved[s] for s in own)
        all_of = others * sum(problem.I[s] + problem.W[s] for s in own)
        if len(own) > 1:
            kinds = [_WorkType(problem.I[s] + problem.W[s], problem.saved[s], others) for s in own]
            kinds += [_WorkType(problem.W[s], problem.deferred_wgrad[s], others) for s in own]
            return min(_max_time_in_memory(kinds, room), all_of)
        (s,) = own
        I, W, saved, tape = problem.I[s], problem.W[s], problem.saved[s], problem.deferred_wgrad[s]
        whole = count_fitting(room, saved, others)
        if whole == others:
            return all_of
        each = ((x, count_fitting(room - x * saved, tape, others - x)) for x in range(whole + 1))
        return max((x * (I + W) + y * W for x, y in each), default=0.0)

    @cached_property
    def idle_before_first_I(self) -> float:
        """The idle time until the rank's first I starts; until then it can only run F's."""
        problem, first, last = self.problem, self.stages[0], self.stages[-1]
        head, m = self.latency.until_forward, problem.microbatches
        way = head[last] - head[first] + problem.F[last] + self.latency.forward_to_backward[last]
        room = (
            problem.rounded_capacity[self.rank]
            + problem.saved[last]
            - problem.saved_and_deferred[last]
        )
        ahead = _max_time_in_memory(
            [_WorkType(problem.F[s], problem.saved[s], m) for s in self.stages], room
        )
        return max(way - ahead, 0.0)

    @cached_property
    def round_trip_idle(self) -> tuple[int, float]:
        """How often a microbatch, neither the first nor the last, must be back before the next one
        of these may come, and the idle time while it is away; for a rank of one stage."""
        often = (self.problem.microbatches - 1) // self.max_forwards_ahead - 1
        if len(self.stages) > 1 or often < 1:
            return 0, 0.0
        (s,) = self.stages
        beside = (self.max_forwards_ahead - 1) * self.problem.F[s] + self.max_other_work
        return often, max(self.latency.forward_to_backward[s] - beside, 0.0)

    @cached_property
    def idle_before_last_I(self) -> float:
        """The idle time between the rank's last F and its last I."""
        problem, (first, *later), last = self.problem, self.stages, self.stages[-1]
        way = self.latency.forward_to_backward[last]
        if later:
            way += (
                problem.I[last]
                + self.latency.backward_to_stage_0[last]
                - self.latency.backward_to_stage_0[first]
            )
            way -= problem.I[first]
        return max(way - self.max_other_work - sum(problem.I[s] + problem.W[s] for s in later), 0.0)

    @cached_property
    def max_work_after_last_I(self) -> float:
        """The most that the rank can still work after its last I: W's of what it holds."""
        problem, (first, *later) = self.problem, self.stages
        m, room = (
            problem.microbatches,
            problem.rounded_capacity[self.rank] - problem.saved_and_deferred[first],
        )
        late = [_WorkType(problem.W[s], problem.deferred_wgrad[s], m) for s in later]
        late.append(_WorkType(problem.W[first], problem.deferred_wgrad[first], m - 1))
        return problem.W[first] + _max_time_in_memory(late, room)

    def bounds(self) -> Iterator[LowerBound]:
        """Each of the bounds of the rank."""
        problem = self.problem
        start, end = self.idle_before_first_I, self.idle_before_last_I
        if (
            problem.microbatches <= self.max_forwards_ahead
        ):  # the last F may come before the first I
            start, end = (start, 0.0) if start > end else (0.0, end)
        often, each = self.round_trip_idle
        busy = start + often * each + end + problem.get_compute_time(self.rank)
        said = self._describe_idle(start, end)
        yield LowerBound(self.first_arrival + busy + self.tail_time, said + self._describe_ends())
        around, left = self.latency.outside_stage[self.stages[0]], self.max_work_after_last_I
        yield LowerBound(
            around + busy - left,
            f"{said}, after which it can work {left:.6g}; to it and back from it a microbatch "
            f"takes {around:.6g}",
        )
        room = problem.capacity[self.rank]
        if 0 < room < inf:
            area = problem.microbatches * sum(map(self._memory_time_area, self.stages)) / room
            yield LowerBound(
                self.first_arrival + area + self.tail_time,
                f"rank {self.rank} holds each microbatch on its way there and back, and what "
                f"its W needs: within its limit that takes {area:.6g}{self._describe_ends()}",
            )

    def _memory_time_area(self, stage: int) -> float:
        """The least of memory times time that a microbatch takes on a stage."""
        problem = self.problem
        there = problem.F[stage] + self.latency.forward_to_backward[stage]
        return (
            problem.saved[stage] * there
            + problem.saved_and_deferred[stage] * problem.I[stage]
            + problem.deferred_wgrad[stage] * problem.W[stage]
        )

    def _describe_idle(self, start: float, end: float) -> str:
        """Work and idle times in words."""
        m, (often, each) = self.problem.microbatches, self.round_trip_idle
        one = len(self.stages) == 1
        ahead = (
            f"its {_format_ordinal(min(self.max_forwards_ahead, m))} F"
            if one
            else "the F's that fit"
        )
        idle = [
            f"{start:.6g} between {ahead} and its first I" * (start > 0),
            f"{often} times {each:.6g} while a microbatch is away" * (often * each > 0),
            f"{end:.6g} between its last F and its last I" * (end > 0),
        ]
        *rest, last = filter(None, idle) if any(idle) else [""]
        holds = f" and holds {self.max_forwards_ahead}" * (one and self.max_forwards_ahead < m)
        text = f"rank {self.rank} works {self.problem.get_compute_time(self.rank):.6g}{holds}"
        return text + (f": it idles {', '.join(rest)}{', and ' * bool(rest)}{last}" if last else "")

    def _describe_ends(self) -> str:
        """What is before and after the rank's work in words."""
        begin = f"; its first activation comes at {self.first_arrival:.6g}" * (
            self.first_arrival > 0
        )
        return begin + f"; its step takes {self.tail_time:.6g}" * (self.tail_time > 0)


def _format_ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
