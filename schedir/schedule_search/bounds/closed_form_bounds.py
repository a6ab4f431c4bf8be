"""Compute lower bounds from the work and the idle time of one rank, in closed form.

A bound counts up to three parts of a rank's idle time, which do not overlap:

- Before its first I, a rank can run only as many F's as fit into its memory.
- After its last F, a rank can run only the I's and W's of microbatches in its memory.
- Between the F and the I of a microbatch, a rank can run only tasks of other microbatches that fit
  into its memory together with this microbatch.

So a rank needs at least its compute time plus these idle times. The page
docs/explanation/lower-bounds.md has the proofs.
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
    """Return the largest closed-form bound over all ranks.

    Args:
        problem: The problem.
    """
    latency = MicrobatchLatency.from_problem(problem)
    lags = MemoryLags.from_problem(problem)
    ranks = range(problem.shape.ranks)
    bounds = (bound for rank in ranks for bound in rank_bounds(problem, latency, lags, rank))
    return max(bounds, key=lambda bound: bound.value)


def rank_bounds(
    problem: SchedulingProblem, latency: MicrobatchLatency, lags: MemoryLags, rank: int
) -> Iterator[LowerBound]:
    """Yield the closed-form bounds of one rank.

    Args:
        problem: The problem.
        latency: The times of a microbatch that waits for no other microbatch.
        lags: The precedences that memory forces in the problem.
        rank: The rank.
    """
    return _RankIdleBounds(problem, latency, lags, rank).bounds()


class _WorkType(NamedTuple):
    """Equal tasks that a rank may run while it waits: the items of a knapsack.

    Attributes:
        time: The compute time of one task.
        memory: The memory that one task needs while the rank waits.
        number: The number of tasks.
    """

    time: float
    memory: float
    number: int


def _max_time_in_memory(work_types: Sequence[_WorkType], capacity: float) -> float:
    """Return the largest total time of tasks that fit into a memory capacity.

    This is a fractional knapsack: the last task may be divided. If all tasks need the same memory,
    only undivided tasks are included.
    """
    if (
        len({kind.memory for kind in work_types}) == 1
        and (size := work_types[0].memory)
        and capacity < inf
    ):
        capacity = size * count_fitting(capacity, size, sum(kind.number for kind in work_types))
    total, capacity = 0.0, max(capacity, 0.0)
    for kind in sorted(work_types, key=lambda kind: kind.memory / kind.time if kind.time else inf):
        number = min(float(kind.number), capacity / kind.memory if kind.memory else inf)
        total += number * kind.time
        capacity -= number * kind.memory
    return total


@dataclass(frozen=True)
class _RankIdleBounds:
    """Computes the least idle times of a rank, in the unit of the costs."""

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
    def _backward(self) -> str:
        """The letter of the backward: I if backwards are split, else B."""
        return "I" if self.problem.split_backward else "B"

    @cached_property
    def max_forwards_ahead(self) -> int:
        """The number of F's that the rank's last stage can start before its first I ends."""
        return self.lags.max_forwards_ahead(self.problem, self.stages[-1])

    @cached_property
    def max_other_work(self) -> float:
        """The largest time of I's and W's between the last F and the first I of a microbatch.

        These I's and W's belong to other microbatches, which must fit into the rank's memory
        together with this microbatch.
        """
        problem, stages, other_mbs = self.problem, self.stages, self.problem.microbatches - 1
        capacity = problem.rounded_capacity[self.rank] - sum(problem.saved[s] for s in stages)
        all_work = other_mbs * sum(problem.I[s] + problem.W[s] for s in stages)
        if len(stages) > 1:
            work_types = [
                _WorkType(problem.I[s] + problem.W[s], problem.saved[s], other_mbs) for s in stages
            ]
            work_types += [
                _WorkType(problem.W[s], problem.deferred_wgrad[s], other_mbs) for s in stages
            ]
            return min(_max_time_in_memory(work_types, capacity), all_work)
        (s,) = stages
        I = problem.I[s]
        W = problem.W[s]
        saved = problem.saved[s]
        deferred = problem.deferred_wgrad[s]
        max_saved = count_fitting(capacity, saved, other_mbs)
        if max_saved == other_mbs:
            return all_work
        task_counts = (
            (x, count_fitting(capacity - x * saved, deferred, other_mbs - x))
            for x in range(max_saved + 1)
        )
        return max((x * (I + W) + y * W for x, y in task_counts), default=0.0)

    @cached_property
    def idle_before_first_I(self) -> float:
        """The least idle time before the first I of the rank.

        Until its first I, the rank can run only F's.
        """
        problem, first, last = self.problem, self.stages[0], self.stages[-1]
        until_forward, m = self.latency.until_forward, problem.microbatches
        round_trip = (
            until_forward[last]
            - until_forward[first]
            + problem.F[last]
            + self.latency.forward_to_backward[last]
        )
        capacity = (
            problem.rounded_capacity[self.rank]
            + problem.saved[last]
            - problem.saved_and_deferred[last]
        )
        forward_work = _max_time_in_memory(
            [_WorkType(problem.F[s], problem.saved[s], m) for s in self.stages], capacity
        )
        return max(round_trip - forward_work, 0.0)

    @cached_property
    def round_trip_idle(self) -> tuple[int, float]:
        """The number of round trips that must follow each other, and the least idle time of each.

        In a round trip, a microbatch leaves the rank after its F and returns for its I. If memory
        holds k microbatches, microbatch j must return before microbatch j + k can start. The idle
        times before the first I and before the last I already cover the first and the last round
        trip, so these two trips are left out. For a rank with several stages, both numbers are 0.
        """
        num_trips = (self.problem.microbatches - 1) // self.max_forwards_ahead - 1
        if len(self.stages) > 1 or num_trips < 1:
            return 0, 0.0
        (s,) = self.stages
        other_work = (self.max_forwards_ahead - 1) * self.problem.F[s] + self.max_other_work
        return num_trips, max(self.latency.forward_to_backward[s] - other_work, 0.0)

    @cached_property
    def idle_before_last_I(self) -> float:
        """The least idle time between the last F and the last I of the rank."""
        problem, (first, *later), last = self.problem, self.stages, self.stages[-1]
        round_trip = self.latency.forward_to_backward[last]
        if later:
            round_trip += (
                problem.I[last]
                + self.latency.backward_to_stage_0[last]
                - self.latency.backward_to_stage_0[first]
            )
            round_trip -= problem.I[first]
        return max(
            round_trip - self.max_other_work - sum(problem.I[s] + problem.W[s] for s in later), 0.0
        )

    @cached_property
    def max_work_after_last_I(self) -> float:
        """The largest compute time after the last I: the W's that fit into memory."""
        problem, (first, *later) = self.problem, self.stages
        m = problem.microbatches
        capacity = problem.rounded_capacity[self.rank] - problem.saved_and_deferred[first]
        work_types = [_WorkType(problem.W[s], problem.deferred_wgrad[s], m) for s in later]
        work_types.append(_WorkType(problem.W[first], problem.deferred_wgrad[first], m - 1))
        return problem.W[first] + _max_time_in_memory(work_types, capacity)

    def bounds(self) -> Iterator[LowerBound]:
        """Yield two bounds from idle times and, with a memory limit, a bound from memory use."""
        problem = self.problem
        start, end = self.idle_before_first_I, self.idle_before_last_I
        # If all F's fit before the first I, the idle times `start` and `end` can overlap. Only the
        # longer of the two is used.
        if problem.microbatches <= self.max_forwards_ahead:
            start, end = (start, 0.0) if start > end else (0.0, end)
        num_trips, trip_idle = self.round_trip_idle
        active_time = start + num_trips * trip_idle + end + problem.get_compute_time(self.rank)
        idle_text = self._describe_idle(start, end)
        yield LowerBound(
            self.first_arrival + active_time + self.tail_time, idle_text + self._describe_ends()
        )
        outside_time = self.latency.outside_stage[self.stages[0]]
        work_after = self.max_work_after_last_I
        yield LowerBound(
            outside_time + active_time - work_after,
            f"{idle_text}; after its last {self._backward} it computes for at most "
            f"{work_after:.6g}; a microbatch takes {outside_time:.6g} to reach the rank and to "
            "return",
        )
        capacity = problem.capacity[self.rank]
        if 0 < capacity < inf:
            area = problem.microbatches * sum(map(self._memory_time_area, self.stages)) / capacity
            yield LowerBound(
                self.first_arrival + area + self.tail_time,
                f"rank {self.rank} stores each microbatch from its F to its {self._backward}"
                f"{' and to its W' * problem.split_backward}: within its memory limit this takes "
                f"{area:.6g}{self._describe_ends()}",
            )

    def _memory_time_area(self, stage: int) -> float:
        """Return the least integral over time of a microbatch's memory on a stage, from F to W."""
        problem = self.problem
        saved_time = problem.F[stage] + self.latency.forward_to_backward[stage]
        return (
            problem.saved[stage] * saved_time
            + problem.saved_and_deferred[stage] * problem.I[stage]
            + problem.deferred_wgrad[stage] * problem.W[stage]
        )

    def _describe_idle(self, start: float, end: float) -> str:
        """Return a sentence about the work and the idle times of the rank."""
        m, (num_trips, trip_idle) = self.problem.microbatches, self.round_trip_idle
        is_single_stage = len(self.stages) == 1
        forwards_text = (
            f"its {_format_ordinal(min(self.max_forwards_ahead, m))} F"
            if is_single_stage
            else "the F's that fit into memory"
        )
        idle_texts = [
            f"{start:.6g} between {forwards_text} and its first {self._backward}" * (start > 0),
            f"{num_trips} times {trip_idle:.6g} until a microbatch returns"
            * (num_trips * trip_idle > 0),
            f"{end:.6g} between its last F and its last {self._backward}" * (end > 0),
        ]
        *earlier_texts, last_text = filter(None, idle_texts) if any(idle_texts) else [""]
        limit = f" with at most {self.max_forwards_ahead} in flight" * (
            is_single_stage and self.max_forwards_ahead < m
        )
        text = (
            f"rank {self.rank} computes for {self.problem.get_compute_time(self.rank):.6g}{limit}"
        )
        idle_times = f"{', '.join(earlier_texts)}{', and ' * bool(earlier_texts)}{last_text}"
        return text + (f"; it is idle for {idle_times}" if last_text else "")

    def _describe_ends(self) -> str:
        """Return clauses about the times before and after the work of the rank."""
        begin = f"; its first activation arrives at {self.first_arrival:.6g}" * (
            self.first_arrival > 0
        )
        return begin + f"; its optimizer step takes {self.tail_time:.6g}" * (self.tail_time > 0)


def _format_ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
