"""Search: the shortest schedule within a memory limit, with a proof of how short any can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final, Literal, get_args

from schedir.analysis.memory import held
from schedir.compiler.compile import compile
from schedir.errors import MemoryLimitError, ProgramError, UsageError, said
from schedir.ir.costs import Costs
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes
from schedir.passes.record import Choice
from schedir.predict.simulate import simulate
from schedir.predict.timeline import Timeline
from schedir.schedules import built_in
from schedir.schedules.draft import draft
from schedir.schedules.words import Schedule, takes_v
from schedir.shortest.bound import bound_of
from schedir.shortest.found import Bound, Found, Step, Stopped
from schedir.shortest.hunt import Hunt
from schedir.shortest.orders import Order, codes_of, draft_of, one_by_one, peaks
from schedir.shortest.problem import ROUNDING, Objective, Problem, problem_of
from schedir.shortest.solver import Solved, ortools, solve

Prove = Literal["closed", "solver"]
_PROVES: Final = get_args(Prove)
_FIRST = 0.3  # of the seconds that a search takes before the solver


def search(
    plan: Plan,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    limit: float | None = None,
    *,
    in_flight: int | Callable[[int], int] | None = None,
    objective: Objective = "span",
    split: bool = True,
    seconds: float = 10.0,
    evaluations: int | None = None,
    seed: int = 0,
    start: Sequence[Schedule | Program] = (),
    prove: Prove = "closed",
    report: Callable[[Step, float], None] | None = None,
) -> Found:
    """The shortest schedule that is found in some seconds, and a bound below which there is none.

    `costs` are of stages, and each rank holds at most `limit` bytes of `sizes`, or `in_flight`
    (stage, mb) as `greedy` counts them; without either there is no limit.  What is short is the
    span of the run, or with the objective "own" the longest time that any rank takes from its first
    compute to its last.  Backwards are I and W, or with `split=False` whole.

    Built-in schedules that fit, and those of `start`, are looked at first, so nothing worse is
    found.  Then idle ranks decide by policies of many kinds, the best of these are changed, and at
    last single pieces of work are moved about.  It ends with a proof, with `seconds`, after that
    many `evaluations` of orders, or where nothing better comes any more.  With `evaluations`, and
    enough seconds for them, what is found depends on `seed` alone.  Ctrl-C ends it, too: what has
    been found until then is returned.

    `prove="solver"` looks for three tenths of the time, and gives what is left to CP-SAT, which
    proves small cases that the bound in closed form leaves open (`pip install schedir[solver]`).
    How far that gets depends on time, and not on `seed` alone.  `report` is called with each better
    schedule, and with the bound; then with each better bound, too.

    Raises UsageError for a limit within which no schedule works, and what `compile` raises.

    >>> from schedir import Costs, Plan, search
    >>> found = search(Plan(ranks=4, microbatches=8), Costs(F=2, I=2, W=1), in_flight=4)
    >>> found.span
    49.0
    >>> found.timeline
    <predicted Timeline of search: span 49, bubble 18.4%>
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"seconds are a number above 0, not {said(seconds)}", fields=["seconds"])
    if evaluations is not None and (type(evaluations) is not int or evaluations < 1):
        raise UsageError(
            f"evaluations are a whole number above 0, not {said(evaluations)}",
            fields=["evaluations"],
        )
    if prove not in _PROVES:
        raise UsageError(f"prove is 'closed' or 'solver', not {said(prove)}", fields=["prove"])
    by_solver = prove == "solver"
    if by_solver:
        ortools()
    costs = Costs() if costs is None else costs
    problem = problem_of(
        plan, costs, sizes, limit, in_flight=in_flight, objective=objective, split=split
    )
    least = bound_of(problem, seconds / 20)
    maker = _Maker(problem, costs, sizes, limit)
    hunt = Hunt(
        maker.with_messages(), least.value, seconds=seconds * (_FIRST if by_solver else 1),
        evaluations=evaluations, seed=seed,
        report=(lambda step: report(step, least.value)) if report else lambda _: None,
    )  # fmt: skip
    stopped: Stopped = "time"
    try:
        hunt.start(_starts(problem, start))
        if hunt.run():
            stopped = "no better"
        if by_solver and not hunt.proved:
            solved = _solve(problem, hunt, least, seconds, seed, report)
            least = solved.bound
            if solved.order is not None:
                hunt.take(solved.value, solved.order, "CP-SAT")
            if solved.interrupted:
                raise KeyboardInterrupt
            stopped = "no better" if solved.proved else "time"
    except KeyboardInterrupt:
        stopped = "interrupted"
    timeline = maker.timeline(hunt.shortest)
    length = _length(timeline, objective)
    if length <= least.value * (1 + ROUNDING):
        stopped = "proved"
    bound = min(least.value, length)  # they are sums of floats, each in an order of its own
    return Found(
        timeline.program, timeline, length, bound, least.why, tuple(hunt.trail), hunt.tried,
        seed, stopped,
    )  # fmt: skip


def _solve(
    problem: Problem,
    hunt: Hunt,
    least: Bound,
    seconds: float,
    seed: int,
    report: Callable[[Step, float], None] | None,
) -> Solved:
    """Let CP-SAT go on where a hunt has ended, for what is left of its time."""

    def told(value: float, bound: float) -> None:
        if report is not None:
            shortest = min(value, hunt.length)
            report(Step(hunt.elapsed, "CP-SAT", shortest), max(bound, least.value))

    left = max(seconds - hunt.elapsed, 0.0)
    hint = hunt.best if hunt.shortest else None
    return solve(problem, left, hint=hint, closed=least, seed=seed, report=told)


def _length(timeline: Timeline, objective: Objective) -> float:
    return float(timeline.own_span.max()) if objective == "own" else timeline.span


# ---------------------------------------------------------------- where it begins


def _starts(problem: Problem, given: Sequence[Schedule | Program]) -> Iterator[tuple[str, Order]]:
    """The orders of what is given, and of built-in schedules for this plan, that fit."""
    for each in given:
        program = each if isinstance(each, Program) else draft(each, problem.plan)
        if program.plan != problem.plan:
            raise UsageError(
                f"{program.name} is of {program.plan}, not of {problem.plan}", fields=["start"]
            )
        yield from _that_fits(problem, program)
    for schedule in sorted(built_in().values(), key=takes_v):  # the plainest name of each first
        try:
            program = draft(schedule, problem.plan)
        except ProgramError:  # it is for other plans
            continue
        yield from _that_fits(problem, program)


def _that_fits(problem: Problem, program: Program) -> Iterator[tuple[str, Order]]:
    order = codes_of(program, split=problem.split)
    whole = problem.microbatches * (2 + problem.split)
    complete = all(
        len(codes) == len(own) * whole for codes, own in zip(order, problem.own, strict=True)
    )
    if complete and all(map(problem.fits, peaks(problem, order), range(problem.plan.ranks))):
        yield program.name, order


# ---------------------------------------------------------------- what it makes


class _Maker:
    """Makes programs of orders, compiled with the costs, within the limit."""

    def __init__(
        self, problem: Problem, costs: Costs, sizes: Sizes | None, limit: float | None
    ) -> None:
        self._problem, self._costs, self._sizes, self._limit = problem, costs, sizes, limit

    def with_messages(self) -> Problem:
        """The Problem with less room, by what messages take of it: at least one of each kind.

        They take slots, as few as there can be.
        """
        problem = self._problem
        if self._limit is None:
            return problem
        order = one_by_one(problem)
        assert self._sizes is not None
        program = compile(draft_of(problem, order), costs=self._costs, slots="fewest")
        most = [float(own.bytes.max()) for own in held(program, self._sizes, late=True)]
        other = [
            bytes_ - (self._limit - room) - kept
            for bytes_, room, kept in zip(most, problem.room, peaks(problem, order), strict=True)
        ]
        room = tuple(
            max(room - max(more, 0.0), problem.least_room(rank))
            for rank, (room, more) in enumerate(zip(problem.room, other, strict=True))
        )
        return replace(problem, room=room)

    def timeline(self, orders: Sequence[tuple[float, Order]]) -> Timeline:
        """The shortest prediction of some orders' programs that fit; the shortest comes first.

        Opposite messages are grouped where that is shorter: they then wait less for each other.
        Raises MemoryLimitError where none does.
        """
        best: Timeline | None = None
        refused: MemoryLimitError | None = None
        for length, order in (*orders, (inf, one_by_one(self._problem))):
            if best is not None and self._takes(best) <= length * (1 + ROUNDING):
                break  # as it was thought; those that follow are longer
            for overlap in (False, True):
                try:
                    made = self._made(order, overlap)
                except MemoryLimitError as error:
                    refused = refused or error
                    continue
                if best is None or self._takes(made) < self._takes(best):
                    best = made
        if best is None:
            assert refused is not None
            raise refused
        return best

    def _takes(self, timeline: Timeline) -> float:
        return _length(timeline, self._problem.objective)

    def _made(self, order: Order, overlap: bool) -> Timeline:
        """The prediction of an order's program, with slots of its own for each value if they fit.

        Raises MemoryLimitError where nothing fits.
        """
        drafted = draft_of(self._problem, order)
        ways: list[Choice | None] = [None] if self._limit is None else [None, "enough", "fewest"]
        for slots in ways:
            try:
                program = compile(
                    drafted, costs=self._costs, sizes=self._sizes, limit=self._limit, slots=slots,
                    overlap=overlap,
                )  # fmt: skip
                break
            except MemoryLimitError:
                if slots == ways[-1]:
                    raise
        return simulate(program, self._costs, sizes=self._sizes)
