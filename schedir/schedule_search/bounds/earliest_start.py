"""Compute lower bounds from earliest starts that are propagated over all ranks.

Some of the tasks that precede a task on its rank are known: tasks of one kind and stage run in the
order of their microbatches, and a memory limit forces further precedences. Each preceding task has
an earliest start, and a rank runs one task at a time. These two facts give the earliest time at
which the last preceding task can end. The task does not start before this time.

The same computation backward in time gives the tail of each task: the least time from its end to
the end of the run. The length of Jackson's preemptive schedule of a rank, with these earliest
starts (releases) and tails, is a lower bound.

The code of a task is KINDS * stage + kind, where the kind is F, I or W. The code does not depend on
the microbatch.

References:
    Carlier, "The one-machine sequencing problem", EJOR 11, 1982.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from schedir.schedule_search.bounds.memory_precedences import MemoryLags
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import KINDS, F, I, W
from schedir.schedule_search.search_results import LowerBound

Times = list[list[float]]  # Indexed by the code of a task, and then by its microbatch.


class Precedence(NamedTuple):
    """A precedence between the tasks of two codes.

    The task of microbatch j starts at least `delay` after the predecessor of microbatch j - `lag`
    ends.

    Attributes:
        predecessor: The code of the earlier task.
        lag: The distance in microbatches.
        delay: The least time between the two tasks, in the unit of the costs.
    """

    predecessor: int
    lag: int
    delay: float


class PrecedenceTable(NamedTuple):
    """The precedences of the tasks of each code.

    Attributes:
        from_other_ranks: For each code, its precedences whose predecessors are on neighbouring
            stages. The task needs the values of these predecessors.
        on_same_rank: For each code, the precedences of tasks on the same rank.
        topological_order: All codes, in an order in which the tasks of one microbatch can run.
    """

    from_other_ranks: Sequence[Sequence[Precedence]]
    on_same_rank: Sequence[Sequence[Precedence]]
    topological_order: Sequence[int]

    def reverse_in_time(self) -> PrecedenceTable:
        """Return the precedences of a run backward in time."""
        return PrecedenceTable(
            _reverse_precedences(self.from_other_ranks),
            _reverse_precedences(self.on_same_rank),
            self.topological_order[::-1],
        )


def _reverse_precedences(precedences: Sequence[Sequence[Precedence]]) -> list[list[Precedence]]:
    reversed_precedences: list[list[Precedence]] = [[] for _ in precedences]
    for code, code_precedences in enumerate(precedences):
        for precedence in code_precedences:
            reversed_precedences[precedence.predecessor].append(
                precedence._replace(predecessor=code)
            )
    return reversed_precedences


def _build_precedence_table(problem: SchedulingProblem, first_stage: int) -> PrecedenceTable:
    """Return the precedences of the stages from `first_stage` on."""
    stages, m = problem.shape.stages, problem.microbatches
    from_other_ranks: list[list[Precedence]] = [[] for _ in range(KINDS * stages)]
    on_same_rank: list[list[Precedence]] = [[] for _ in range(KINDS * stages)]
    kinds, lags = (F, I, W) if problem.split_backward else (F, I), MemoryLags.from_problem(problem)
    for s in range(first_stage + 1, stages):
        from_other_ranks[KINDS * s + F].append(
            Precedence(KINDS * (s - 1) + F, 0, problem.act_delay[s - 1])
        )
        from_other_ranks[KINDS * (s - 1) + I].append(
            Precedence(KINDS * s + I, 0, problem.grad_delay[s])
        )
    active_stages: list[int] = []
    for local_stages in problem.stages_of_rank:
        active_stages = [s for s in local_stages if s >= first_stage]
        for s in active_stages:
            for kind in kinds:
                on_same_rank[KINDS * s + kind].append(Precedence(KINDS * s + kind, 1, 0.0))
            for q in active_stages:
                if q < s:
                    on_same_rank[KINDS * s + F].append(Precedence(KINDS * q + F, 0, 0.0))
                elif q > s:
                    on_same_rank[KINDS * s + I].append(Precedence(KINDS * q + I, 0, 0.0))
                for kind in kinds[1:]:
                    on_same_rank[KINDS * s + kind].append(Precedence(KINDS * q + F, 0, 0.0))
                if q >= s and problem.split_backward:
                    on_same_rank[KINDS * s + W].append(Precedence(KINDS * q + I, 0, 0.0))
    for kind, before_kind, rank_lags in (
        (F, I, lags.F_after_I),
        (F, W, lags.F_after_W),
        (I, W, lags.I_after_W),
    ):
        for lag in rank_lags:
            if lag.stage >= first_stage <= lag.before_stage:
                code = KINDS * lag.stage + kind
                on_same_rank[code].append(
                    Precedence(KINDS * lag.before_stage + before_kind, lag.lag, 0.0)
                )
    # On the last rank, an I of a microbatch runs after all F's of this microbatch on the rank, and
    # after its I's of later stages. On other ranks the same precedences would be wrong: they gave
    # bounds above optimal times.
    for lag in lags.F_after_I:
        if lag.before_stage in active_stages:
            code = KINDS * lag.stage + F
            for q in active_stages:
                if q > lag.before_stage:
                    on_same_rank[code] += (
                        Precedence(KINDS * q + kind, lag.lag, 0.0) for kind in (F, I)
                    )
    # If several precedences have the same predecessor, the smallest lag implies the others.
    for code, code_precedences in enumerate(on_same_rank):
        min_lags: dict[int, int] = {}
        for precedence in code_precedences:
            min_lags[precedence.predecessor] = min(
                precedence.lag, min_lags.get(precedence.predecessor, m)
            )
        on_same_rank[code] = [
            Precedence(predecessor, lag, 0.0) for predecessor, lag in min_lags.items() if lag < m
        ]
    topological_order = [KINDS * s + F for s in range(first_stage, stages)]
    for s in range(stages - 1, first_stage - 1, -1):
        topological_order += [KINDS * s + kind for kind in kinds[1:]]
    return PrecedenceTable(from_other_ranks, on_same_rank, topological_order)


class _SingleMachineSchedule:
    """Tasks that one rank runs in sequence. A task starts at its release or later.

    `ends[-1]` is the time at which all tasks have ended.
    """

    __slots__ = ("durations", "ends", "releases")

    def __init__(self) -> None:
        self.releases: list[float] = []
        self.durations: list[float] = []
        self.ends: list[float] = []  # The end of each task, in the order of releases.

    def add(self, release: float, duration: float) -> None:
        """Add a task, and update the ends of the tasks after it."""
        releases, durations, ends = self.releases, self.durations, self.ends
        end = ends[-1] if ends else -inf
        if not releases or release >= releases[-1]:
            releases.append(release)
            durations.append(duration)
            ends.append((release if release > end else end) + duration)
            return
        position = bisect_right(releases, release)
        releases.insert(position, release)
        durations.insert(position, duration)
        ends.insert(position, 0.0)
        end = ends[position - 1] if position else -inf
        for k in range(position, len(ends)):
            start = releases[k]
            end = (start if start > end else end) + durations[k]
            ends[k] = end


def _compute_earliest_starts(
    precedences: PrecedenceTable,
    durations: Sequence[float],
    min_starts: Sequence[float],
    microbatches: int,
) -> Times:
    """Return the earliest start of each task.

    `min_starts` has a lower bound of the starts of the tasks of each code.
    """
    from_other_ranks, on_same_rank, topological_order = precedences
    times: Times = [[] for _ in durations]
    machines = [_SingleMachineSchedule() for _ in durations]
    for j in range(microbatches):
        for code in topological_order:
            time = min_starts[code]
            machine = machines[code]
            for predecessor, lag, _ in on_same_rank[code]:
                if j >= lag and (release := times[predecessor][j - lag]) > -inf:
                    machine.add(release, durations[predecessor])
            if machine.ends and machine.ends[-1] > time:
                time = machine.ends[-1]
            for predecessor, lag, delay in from_other_ranks[code]:
                if (
                    j >= lag
                    and (end := times[predecessor][j - lag] + durations[predecessor] + delay) > time
                ):
                    time = end
            times[code].append(time)
    return times


class _SchedulingJob(NamedTuple):
    """A task with its earliest start, its duration, and its tail.

    The tail is the least time from the end of the task to the end of the run.
    """

    release: float
    duration: float
    tail: float


def _preemptive_makespan(jobs: Sequence[_SchedulingJob]) -> tuple[float, float]:
    """Return the length of Jackson's preemptive schedule, and the tail of the task that decides it.

    At each time, the released task with the longest tail runs. The length is the maximum, over all
    tasks, of the end of the task plus its tail.
    """
    jobs = sorted(jobs)
    waiting_jobs: list[list[float]] = []
    clock, next_job, longest, last_tail = -inf, 0, 0.0, 0.0
    while next_job < len(jobs) or waiting_jobs:
        if not waiting_jobs:
            clock = max(clock, jobs[next_job].release)
        while next_job < len(jobs) and jobs[next_job].release <= clock:
            heappush(waiting_jobs, [-jobs[next_job].tail, jobs[next_job].duration])
            next_job += 1
        tail, remaining_time = -waiting_jobs[0][0], waiting_jobs[0][1]
        next_release = jobs[next_job].release if next_job < len(jobs) else inf
        if clock + remaining_time <= next_release:
            heappop(waiting_jobs)
            clock += remaining_time
            if clock + tail > longest:
                longest, last_tail = clock + tail, tail
        else:
            waiting_jobs[0][1] -= next_release - clock
            clock = next_release
    return longest, last_tail


@dataclass(frozen=True)
class Relaxation:
    """The earliest start and the tail of each task. A tail ends with the run or with one rank.

    Attributes:
        durations: The duration of the tasks of each code.
        codes: The codes of each rank.
        heads: The earliest start of each task, by code and microbatch.
        tails: The least time from the end of each task to the end of the run, or to the end of the
            bounded rank, by code and microbatch. -inf if the task can run after this end.
    """

    durations: Sequence[float]
    codes: Sequence[Sequence[int]]
    heads: Times
    tails: Times

    @classmethod
    def from_problem(
        cls, problem: SchedulingProblem, first_stage: int, min_tails: Sequence[float]
    ) -> Relaxation:
        """Return the relaxation of a stage and all later stages of a problem.

        Args:
            problem: The problem.
            first_stage: The first stage. Time 0 is the start of its first F.
            min_tails: For each rank, the least time from its last task to the end of the run, or to
                the end of the bounded rank. -inf if the rank's tasks can run after this end.
        """
        kind_times = (problem.F, problem.I, problem.W)
        durations = [times[s] for s in range(problem.shape.stages) for times in kind_times]
        code_tails = [min_tails[rank] for rank in problem.rank_of for _ in range(KINDS)]
        table = _build_precedence_table(problem, first_stage)
        reversed_table = table.reverse_in_time()
        heads = _compute_earliest_starts(
            table, durations, [0.0] * len(durations), problem.microbatches
        )
        tails = _compute_earliest_starts(
            reversed_table, durations, code_tails, problem.microbatches
        )
        active_codes = {*table.topological_order}
        codes = [
            [
                code
                for s in local_stages
                for code in range(KINDS * s, KINDS * (s + 1))
                if code in active_codes
            ]
            for local_stages in problem.stages_of_rank
        ]
        return cls(durations, codes, heads, [times[::-1] for times in tails])

    def jobs_of_rank(self, rank: int) -> list[_SchedulingJob]:
        """Return the tasks of a rank, without the tasks with tail -inf.

        Args:
            rank: The rank.
        """
        return [
            _SchedulingJob(head, self.durations[code], tail)
            for code in self.codes[rank]
            for head, tail in zip(self.heads[code], self.tails[code], strict=True)
            if tail > -inf
        ]


def make_relaxations(problem: SchedulingProblem) -> Iterator[Relaxation]:
    """Yield the relaxations that give lower bounds of a problem.

    For the objective "span" there is one relaxation, until the end of the run. For "active_span"
    there are up to two: until the end of the rank of stage 0, and until the end of the rank with
    most work.

    Args:
        problem: The problem.
    """
    if problem.objective == "span":
        yield Relaxation.from_problem(problem, 0, problem.tail_time)
        return
    busiest = max(range(problem.shape.ranks), key=problem.get_compute_time)
    for rank in sorted({problem.rank_of[0], busiest}):
        min_tails = [0.0 if r == rank else -inf for r in range(problem.shape.ranks)]
        yield Relaxation.from_problem(problem, problem.stages_of_rank[rank][0], min_tails)


def compute_earliest_bound(relaxation: Relaxation) -> LowerBound:
    """Return the largest bound of all ranks from earliest starts and tails.

    Args:
        relaxation: The earliest starts and tails of all tasks.
    """
    best = LowerBound(0.0, "there is no work")
    for rank in range(len(relaxation.codes)):
        value, tail = _preemptive_makespan(jobs := relaxation.jobs_of_rank(rank))
        if value > best.value:
            best = LowerBound(value, _explain_bound(jobs, rank, tail))
    return best


def _explain_bound(jobs: Sequence[_SchedulingJob], rank: int, tail: float) -> str:
    """Return a sentence about the tasks that decide the bound.

    These tasks form the last busy period of the tasks whose tail is at least `tail`.
    """
    begin, work, end = 0.0, 0.0, -inf
    for release, time, _ in sorted(job for job in jobs if job.tail >= tail):
        if release > end:
            begin, work, end = release, 0.0, release
        work, end = work + time, end + time
    return (
        f"tasks of rank {rank} that take {work:.6g} cannot begin before {begin:.6g}, and "
        f"{tail:.6g} or more follows each of them: a microbatch passes the stages in order, a rank "
        "runs one task at a time, and a task that does not fit into memory waits"
    )
