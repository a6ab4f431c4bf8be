"""Lower bounds from earliest starts that are propagated over all ranks.

What must have run on a rank before a piece of work starts there is known: each kind of work of a
stage is in ascending order, and lags say what memory asks for besides.  Each of that has an
earliest start of its own, and a rank does one after the other: so the piece of work starts no
earlier than all of that can end.  Backwards in time it is the same, and gives what must still come
after it.  With both, the shortest that a rank can take is Jackson's preemptive schedule (Carlier,
"The one-machine sequencing problem", EJOR 11, 1982): a bound, for no rank can do better.
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

Times = list[list[float]]  # by code, as of an Order, and microbatch


class Precedence(NamedTuple):
    """A microbatch's work of one code starts `delay` after what another ended, `lag` before."""

    predecessor: int
    lag: int
    delay: float


class PrecedenceTable(NamedTuple):
    """By code: what each piece of work needs of other ranks, and what has run before on its own.

    `topological_order` has the codes in an order in which those of one microbatch can run.
    """

    from_other_ranks: Sequence[Sequence[Precedence]]
    on_same_rank: Sequence[Sequence[Precedence]]
    topological_order: Sequence[int]

    def reverse_in_time(self) -> PrecedenceTable:
        """The same, seen from the end of the run."""
        return PrecedenceTable(
            _reverse_precedences(self.from_other_ranks),
            _reverse_precedences(self.on_same_rank),
            self.topological_order[::-1],
        )


def _reverse_precedences(precedences: Sequence[Sequence[Precedence]]) -> list[list[Precedence]]:
    turned: list[list[Precedence]] = [[] for _ in precedences]
    for code, each in enumerate(precedences):
        for need in each:
            turned[need.predecessor].append(need._replace(predecessor=code))
    return turned


def _build_precedence_table(problem: SchedulingProblem, first_stage: int) -> PrecedenceTable:
    """Those of the stages from `first_stage` on."""
    stages, m = problem.shape.stages, problem.microbatches
    needs: list[list[Precedence]] = [[] for _ in range(KINDS * stages)]
    ran: list[list[Precedence]] = [[] for _ in range(KINDS * stages)]
    kinds, lags = (F, I, W) if problem.split_backward else (F, I), MemoryLags.from_problem(problem)
    for s in range(first_stage + 1, stages):
        needs[KINDS * s + F].append(Precedence(KINDS * (s - 1) + F, 0, problem.act_delay[s - 1]))
        needs[KINDS * (s - 1) + I].append(Precedence(KINDS * s + I, 0, problem.grad_delay[s]))
    for own in problem.stages_of_rank:
        there = [s for s in own if s >= first_stage]
        for s in there:
            for kind in kinds:
                ran[KINDS * s + kind].append(Precedence(KINDS * s + kind, 1, 0.0))
            for q in there:
                if q < s:
                    ran[KINDS * s + F].append(Precedence(KINDS * q + F, 0, 0.0))
                elif q > s:
                    ran[KINDS * s + I].append(Precedence(KINDS * q + I, 0, 0.0))
                for kind in kinds[1:]:
                    ran[KINDS * s + kind].append(Precedence(KINDS * q + F, 0, 0.0))
                if q >= s and problem.split_backward:
                    ran[KINDS * s + W].append(Precedence(KINDS * q + I, 0, 0.0))
    for kind, before, of in (
        (F, I, lags.F_after_I),
        (F, W, lags.F_after_W),
        (I, W, lags.I_after_W),
    ):
        for lag in of:
            if lag.stage >= first_stage <= lag.before_stage:
                code = KINDS * lag.stage + kind
                ran[code].append(Precedence(KINDS * lag.before_stage + before, lag.lag, 0.0))
        for lag in lags.F_after_I:  # what has an I has had the Is behind it, and all Fs
            for q in there if lag.before_stage in there else ():
                if q > lag.before_stage:
                    code = KINDS * lag.stage + F
                    ran[code] += (Precedence(KINDS * q + kind, lag.lag, 0.0) for kind in (F, I))
    # Of two that say the same, the one with the smaller lag is enough.
    for code, each in enumerate(ran):
        least: dict[int, int] = {}
        for need in each:
            least[need.predecessor] = min(need.lag, least.get(need.predecessor, m))
        ran[code] = [Precedence(before, lag, 0.0) for before, lag in least.items() if lag < m]
    turn = [KINDS * s + F for s in range(first_stage, stages)]
    for s in range(stages - 1, first_stage - 1, -1):
        turn += [KINDS * s + kind for kind in kinds[1:]]
    return PrecedenceTable(needs, ran, turn)


class _SerialWork:
    """Work that one rank does, one after the other, each from its release on: when all is done."""

    __slots__ = ("durations", "ends", "releases")

    def __init__(self) -> None:
        self.releases: list[float] = []
        self.durations: list[float] = []
        self.ends: list[float] = []  # of all up to each, in the order of releases

    def add(self, release: float, duration: float) -> None:
        """Add a piece of work."""
        releases, takes, ends = self.releases, self.durations, self.ends
        end = ends[-1] if ends else -inf
        if not releases or release >= releases[-1]:
            releases.append(release)
            takes.append(duration)
            ends.append((release if release > end else end) + duration)
            return
        at = bisect_right(releases, release)
        releases.insert(at, release)
        takes.insert(at, duration)
        ends.insert(at, 0.0)
        end = ends[at - 1] if at else -inf
        for k in range(at, len(ends)):
            start = releases[k]
            end = (start if start > end else end) + takes[k]
            ends[k] = end


def _compute_earliest_starts(
    precedences: PrecedenceTable,
    durations: Sequence[float],
    min_starts: Sequence[float],
    microbatches: int,
) -> Times:
    """The earliest start of each piece of work; those of a code are no earlier than its
    `min_starts`."""
    needs, ran, turn = precedences
    times: Times = [[] for _ in durations]
    done = [_SerialWork() for _ in durations]
    for j in range(microbatches):
        for code in turn:
            time = min_starts[code]
            mine = done[code]
            for before, lag, _ in ran[code]:
                if j >= lag and (release := times[before][j - lag]) > -inf:
                    mine.add(release, durations[before])
            if mine.ends and mine.ends[-1] > time:
                time = mine.ends[-1]
            for before, lag, delay in needs[code]:
                if j >= lag and (end := times[before][j - lag] + durations[before] + delay) > time:
                    time = end
            times[code].append(time)
    return times


class _SchedulingJob(NamedTuple):
    """A piece of work: its release, its time, and what must come after it."""

    release: float
    duration: float
    tail: float


def _preemptive_makespan(jobs: Sequence[_SchedulingJob]) -> tuple[float, float]:
    """The end of Jackson's preemptive schedule of a rank, and the tail of what is last.

    What has the longest tail runs first.
    """
    jobs = sorted(jobs)
    waiting: list[list[float]] = []
    now, at, longest, decides = -inf, 0, 0.0, 0.0
    while at < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[at].release)
        while at < len(jobs) and jobs[at].release <= now:
            heappush(waiting, [-jobs[at].tail, jobs[at].duration])
            at += 1
        tail, time = -waiting[0][0], waiting[0][1]
        until = jobs[at].release if at < len(jobs) else inf
        if now + time <= until:
            heappop(waiting)
            now += time
            if now + tail > longest:
                longest, decides = now + tail, tail
        else:
            waiting[0][1] -= until - now
            now = until
    return longest, decides


@dataclass(frozen=True)
class Relaxation:
    """What is known of all work until the end of a run, or until the end of one rank's.

    `heads` has the earliest start of each piece of work, by code and microbatch, and `tails` what
    comes after its end at least, -inf where it need not be done by then; `codes` has those of each
    rank.
    """

    durations: Sequence[float]
    codes: Sequence[Sequence[int]]
    heads: Times
    tails: Times

    @classmethod
    def from_problem(
        cls, problem: SchedulingProblem, first_stage: int, min_tails: Sequence[float]
    ) -> Relaxation:
        """From the first F of stage `first_stage` on, of the stages from there.

        `min_tails` is the least from a rank's last work to the end, -inf if it may come later.
        """
        each = (problem.F, problem.I, problem.W)
        cost = [times[s] for s in range(problem.shape.stages) for times in each]
        ends = [min_tails[rank] for rank in problem.rank_of for _ in range(KINDS)]
        relations = _build_precedence_table(problem, first_stage)
        backwards = relations.reverse_in_time()
        heads = _compute_earliest_starts(relations, cost, [0.0] * len(cost), problem.microbatches)
        tails = _compute_earliest_starts(backwards, cost, ends, problem.microbatches)
        there = {*relations.topological_order}
        codes = [
            [code for s in own for code in range(KINDS * s, KINDS * (s + 1)) if code in there]
            for own in problem.stages_of_rank
        ]
        return cls(cost, codes, heads, [times[::-1] for times in tails])

    def jobs_of_rank(self, rank: int) -> list[_SchedulingJob]:
        """The work of a rank."""
        return [
            _SchedulingJob(head, self.durations[code], tail)
            for code in self.codes[rank]
            for head, tail in zip(self.heads[code], self.tails[code], strict=True)
            if tail > -inf
        ]


def make_relaxations(problem: SchedulingProblem) -> Iterator[Relaxation]:
    """What is known until the end of the run; of own spans, until the ends of two ranks: that of
    the first stage, and the one that works longest."""
    if problem.objective == "span":
        yield Relaxation.from_problem(problem, 0, problem.tail_time)
        return
    busiest = max(range(problem.shape.ranks), key=problem.get_compute_time)
    for rank in sorted({problem.rank_of[0], busiest}):
        ends = [0.0 if r == rank else -inf for r in range(problem.shape.ranks)]
        yield Relaxation.from_problem(problem, problem.stages_of_rank[rank][0], ends)


def compute_earliest_bound(relaxation: Relaxation) -> LowerBound:
    """The bound by earliest starts and tails of all work."""
    best = LowerBound(0.0, "nothing is to be done")
    for rank in range(len(relaxation.codes)):
        value, tail = _preemptive_makespan(jobs := relaxation.jobs_of_rank(rank))
        if value > best.value:
            best = LowerBound(value, _explain_bound(jobs, rank, tail))
    return best


def _explain_bound(jobs: Sequence[_SchedulingJob], rank: int, tail: float) -> str:
    """The work that decides, in words: what can begin only then, and has that tail at least."""
    begin, busy, end = 0.0, 0.0, -inf
    for release, time, _ in sorted(job for job in jobs if job.tail >= tail):
        if release > end:
            begin, busy, end = release, 0.0, release
        busy, end = busy + time, end + time
    return (
        f"work of rank {rank} that takes {busy:.6g} cannot begin before {begin:.6g}, and behind "
        f"each piece of it comes {tail:.6g} or more: microbatches go there and back, a rank does "
        "one thing at a time, and what does not fit waits until something has gone"
    )
