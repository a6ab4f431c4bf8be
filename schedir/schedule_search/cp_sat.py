"""Solve scheduling problems and prove bounds with OR-Tools CP-SAT (`schedir[solver]`).

It closes Problems of up to about 130 (stage, microbatch) in seconds, and finds little beyond:
a search comes first, and hands over what it has found.  Nothing else of schedir needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, gcd, inf, isfinite, lcm
from typing import Any, Final, NamedTuple

from schedir.extras import require
from schedir.predict.possible_saving import ROUNDING
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import KINDS, F, I, Order, W, length, peaks, starts_of
from schedir.schedule_search.search_results import LowerBound

EXACT: Final = 1e-6  # of itself, a value that is proved may be off
CLOSED: Final = "CP-SAT closed it: no order is shorter"
NOTHING: Final = LowerBound(0.0, "no schedule takes less than no time")
_OFTEN = 0.1  # seconds after which there is a look at what the solver has
_LARGE, _FINE = 2**40, 2**31  # largest whole number of a model; of one that has to be rounded


Task = tuple[int, int, int]  # stage, kind, microbatch


class SolverResult(NamedTuple):
    """What CP-SAT says of a SchedulingProblem.

    `order` is the shortest that it found, None where it found none that was asked for, and `value`
    what that takes by `orders.length`.  No order takes less than `bound`; where shorter ones than
    `below` were asked for, none of those.  `proved` says that nothing is left to find: `order` is
    within 1e-6 of the shortest, or there is none.
    """

    order: Order | None
    value: float
    bound: LowerBound
    proved: bool
    interrupted: bool


def solve(
    problem: SchedulingProblem,
    seconds: float,
    *,
    hint: Order | None = None,
    below: float = inf,
    closed: LowerBound = NOTHING,
    workers: int = 0,
    seed: int = 0,
    report: Callable[[float, float], None] | None = None,
) -> SolverResult:
    """The shortest order that CP-SAT finds in some seconds, and what it has proved.

    `hint` is a legal order to begin with, which what is found is never longer than; `below` asks
    for shorter ones only; `closed` is a bound that is known.  It takes `workers` threads, by
    default as many as there are processors.
    `report` is told the length of the shortest order and the bound, whenever one gets better.
    Ctrl-C ends it with what there is by then.

    Raises MissingPackageError where ortools is not installed.
    """
    cp_model = ortools()
    known = length(problem, hint) if hint is not None else None
    most = below if known is None else min(known, below)
    if closed.value >= most * (1 - ROUNDING):
        kept = hint if known is not None and known < below else None
        return SolverResult(kept, inf if kept is None else most, closed, True, False)
    whole = _whole(problem)
    least = floor(closed.value * whole.scale * (1 - ROUNDING))
    model = _CpSatModel(cp_model, whole.problem, least)
    if isfinite(below):
        model.below(whole.under(below))
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers or os.cpu_count() or 1
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    status, interrupted = _run(cp_model, solver, model.model, whole.scale, report)
    if status == cp_model.INFEASIBLE:
        assert isfinite(below)
        share = 1.0 if whole.exact else 1 - EXACT
        return SolverResult(None, inf, LowerBound(below * share, CLOSED), True, interrupted)
    bound = closed
    if (value := solver.best_objective_bound / whole.scale) > closed.value * (1 + ROUNDING):
        bound = LowerBound(value, f"CP-SAT has ruled out all orders shorter than {value:.6g}")
    best, order = inf, None
    if known is not None and known < below:
        best, order = known, hint
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = model.order(solver.value)
        taken = length(problem, found)
        fits = (problem.fits(held, rank) for rank, held in enumerate(peaks(problem, found)))
        if taken is not None and taken < best and all(fits):  # numbers may have been rounded
            best, order = taken, found
    proved = best <= bound.value * (1 + EXACT)
    if proved and bound is not closed:
        bound = LowerBound(min(bound.value, best), CLOSED)
    return SolverResult(order, best, bound, proved, interrupted)


def ortools() -> Any:
    """Return the module of CP-SAT. Raises MissingPackageError if it is not installed."""
    require("ortools", "a proof by the solver", field="prove")
    from ortools.sat.python import cp_model

    return cp_model


def _run(
    cp_model: Any,
    solver: Any,
    model: Any,
    scale: float,
    report: Callable[[float, float], None] | None,
) -> tuple[Any, bool]:
    """Solve in a thread, so that Ctrl-C gets through: the status, and whether it came."""
    best = {"value": inf, "bound": 0.0}

    class Best(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            best["value"] = self.objective_value / scale

    def bound(value: float) -> None:
        best["bound"] = value / scale

    solver.best_bound_callback = bound
    interrupted, told = False, dict(best)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model, Best())
        while not status.done():
            try:
                wait((status,), timeout=_OFTEN)
                if report is not None and best != told:
                    told = dict(best)
                    report(told["value"], told["bound"])
            except KeyboardInterrupt:
                interrupted = True
            if interrupted:
                solver.stop_search()
    return status.result(), interrupted


class _CpSatModel:
    """The starts of all work of a SchedulingProblem in whole numbers, as CP-SAT's variables."""

    def __init__(self, cp_model: Any, problem: SchedulingProblem, least: int) -> None:
        self.problem, self.least = problem, least
        self.model = model = cp_model.CpModel()
        self.cost = (problem.F, problem.I, problem.W)
        self.kinds = (F, I, W) if problem.split else (F, I)
        rows = (*self.cost, problem.act, problem.grad, problem.tail)
        self.longest = int(problem.microbatches * sum(map(sum, rows)))  # one after the other
        self.start = {
            (s, kind): [model.new_int_var(0, self.longest, "") for _ in range(problem.microbatches)]
            for s in range(problem.shape.stages)
            for kind in self.kinds
        }
        self.known: dict[tuple[Task, Task], Any] = {}
        self.total = model.new_int_var(least, max(self.longest, least), "")
        self._follow()
        for rank, own in enumerate(problem.own):
            model.add_no_overlap(
                model.new_fixed_size_interval_var(start, self.cost[kind][s], "")
                for s in own
                for kind in self.kinds
                for start in self.start[s, kind]
            )
            if isfinite(problem.room[rank]):
                self._hold(rank)
        self._count()
        model.minimize(self.total)

    def end(self, s: int, kind: int, k: int) -> Any:
        return self.start[s, kind][k] + self.cost[kind][s]

    def _follow(self) -> None:
        """Work of a kind ascends, and nothing starts before it has what it needs."""
        problem, add = self.problem, self.model.add
        for (s, kind), starts in self.start.items():
            for k, start in enumerate(starts):
                if k:
                    add(start >= self.end(s, kind, k - 1))
                if kind == F and s:
                    add(start >= self.end(s - 1, F, k) + problem.act[s - 1])
                elif kind == I and s + 1 < problem.shape.stages:
                    add(start >= self.end(s + 1, I, k) + problem.grad[s + 1])
                elif kind != F:
                    add(start >= self.end(s, kind - 1, k))

    def _hold(self, rank: int) -> None:
        """A rank never holds more than it has room for."""
        problem, room = self.problem, int(self.problem.room[rank])
        own = problem.own[rank]
        most = sum(max(problem.saved[s], problem.both[s], problem.tape[s]) for s in own)
        if problem.microbatches * most <= room:
            return
        for s in own:
            self._precede(s, room)
        whole = len(own) == 1 and problem.saved[own[0]] == problem.both[own[0]]
        if whole and (not problem.split or problem.tape[own[0]] == problem.saved[own[0]]):
            return  # that says it all
        for s in own:
            for k in range(problem.microbatches):
                self._fit((s, F, k), own, room)
                if problem.both[s] > problem.saved[s]:
                    self._fit((s, I, k), own, room)

    def _fit(self, at: Task, own: Sequence[int], room: int) -> None:
        """What is held as a piece of work starts fits: of all that comes before it on its rank.

        In numbers of pieces, as `peaks` counts it: CP-SAT sees much further so than with intervals
        of what is held from when to when.
        """
        problem = self.problem
        held = int(
            problem.saved[at[0]] if at[1] == F else problem.both[at[0]] - problem.saved[at[0]]
        )
        terms = []
        for s in own:
            saved, tape = int(problem.saved[s]), int(problem.tape[s])
            for kind, more in zip(self.kinds, (saved, tape - saved, -tape), strict=False):
                for k in range(problem.microbatches):
                    if more and (s, kind, k) != at:
                        before = self._before((s, kind, k), at)
                        if before is True:
                            held += more
                        elif before is not False:
                            terms.append(before * more)
        self.model.add(sum(terms) + held <= room)

    def _before(self, one: Task, other: Task) -> Any:
        """Whether a piece of work of a rank comes before another: known, or a variable."""
        if self._leads(one, other):
            return True
        if self._leads(other, one):
            return False
        if (other, one) in self.known:
            return ~self.known[other, one]
        if (one, other) not in self.known:
            is_so = self.known[one, other] = self.model.new_bool_var("")
            for so, (s, kind, k), (t, what, n) in ((is_so, one, other), (~is_so, other, one)):
                self.model.add(self.start[t, what][n] >= self.end(s, kind, k)).only_enforce_if(so)
        return self.known[one, other]

    def _leads(self, one: Task, other: Task) -> bool:
        """Whether work must come before other work, for what that needs."""
        (s, kind, k), (t, what, n) = one, other
        if kind == W:
            return (s, kind) == (t, what) and k < n
        turn = 2 * self.problem.shape.stages - 1
        depth = turn - t if what != F else t
        return k <= n and (turn - s if kind == I else s) <= depth

    def _precede(self, s: int, room: int) -> None:
        """What must have ended before an F of a stage, as that alone would not fit: implied."""
        saved, tape = self.problem.saved[s], self.problem.tape[s]
        for k in range(self.problem.microbatches):
            # The fewest I's, with a W for each; the fewest W's, with as many I's as is best.
            i = next(i for i in range(k + 1) if (k + 1 - i) * saved <= room)
            if i:
                self.model.add(self.start[s, F][k] >= self.end(s, I, i - 1))
            if self.problem.split:
                w = next(
                    w
                    for w in range(k + 1)
                    if min(saved + (k - w) * tape, (k + 1 - w) * saved) <= room
                )
                if w:
                    self.model.add(self.start[s, F][k] >= self.end(s, W, w - 1))

    def _count(self) -> None:
        """What is to be short: `total` is no less than what each rank takes."""
        problem, last = self.problem, self.problem.microbatches - 1
        first = _firsts(problem)
        for rank, own in enumerate(problem.own):
            begin: Any = 0
            tail = int(problem.tail[rank])
            if problem.objective == "own":
                begin, tail = self.start[own[0], F][0], 0
                if rank in first:  # it starts as early as it can, even if that makes it wait
                    self.model.add(begin == first[rank])
            for s in own:
                self.model.add(self.total >= self.end(s, self.kinds[-1], last) + tail - begin)
            work = int(problem.work(rank)) + tail  # implied, but CP-SAT would be long to see it
            self.model.add(self.total >= self.start[own[0], F][0] + work - begin)

    def below(self, most: int) -> None:
        """Look for totals up to that."""
        self.model.add(self.total <= most)

    def hint(self, order: Order) -> None:
        """Begin with an order that ends."""
        starts = starts_of(self.problem, order)
        assert starts is not None
        for codes, own in zip(order, starts, strict=True):
            done: dict[int, int] = {}
            for code, start in zip(codes, own, strict=True):
                k = done.setdefault(code, 0)
                self.model.add_hint(self.start[divmod(code, KINDS)][k], int(start))
                done[code] += 1
        total = max(int(length(self.problem, order) or 0), self.least)
        self.model.add_hint(self.total, total)
        self.model.add(self.total <= total)

    def order(self, value: Callable[[Any], int]) -> Order:
        """The order of the starts that have been found.

        Where several start at once, all but the last take no time: microbatch by microbatch then.
        """
        turn = 2 * self.problem.shape.stages
        found: list[list[tuple[float, ...]]] = [[] for _ in self.problem.own]
        for (s, kind), starts in self.start.items():
            depth = (s, turn - 1 - s, turn)[kind]
            for k, start in enumerate(starts):
                begin = value(start)
                when = (begin, begin + self.cost[kind][s], k, depth)
                found[self.problem.rank_of[s]].append((*when, KINDS * s + kind))
        return tuple(tuple(int(each[-1]) for each in sorted(own)) for own in found)


def _firsts(problem: SchedulingProblem) -> dict[int, int]:
    """When the ranks start of which that is known: whose first F only first F's come before."""
    start, first = 0.0, {}
    for s, rank in enumerate(problem.rank_of):
        if rank in first:
            break
        first[rank] = int(start)
        start += problem.F[s] + problem.act[s]
    return first


class _IntegerProblem(NamedTuple):
    """A Problem of whole numbers, times `scale` as long, or less by rounding where not `exact`."""

    problem: SchedulingProblem
    scale: float
    exact: bool

    def under(self, below: float) -> int:
        """The largest whole length that is less than that, by 1e-6 where lengths are rounded."""
        if self.exact:
            return ceil(below * self.scale * (1 - ROUNDING)) - 1
        return floor(below * self.scale * (1 - EXACT))


def _whole(problem: SchedulingProblem) -> _IntegerProblem:
    """The Problem in whole numbers that allows all that it allows, and takes no longer.

    Decimal costs are exact.  Others are rounded down, and so is a bound; what each rank holds is
    rounded down as well, and its room up.
    """
    times = {name: getattr(problem, name) for name in ("F", "I", "W", "act", "grad", "tail")}
    total = problem.microbatches * sum(map(sum, times.values()))
    scale, exact = _scale([c for row in times.values() for c in row], total)
    sizes = {name: list(getattr(problem, name)) for name in ("saved", "tape", "both")}
    room = list(problem.room)
    for rank, own in enumerate(problem.own):
        if isfinite(room[rank]):
            held = [row[s] for row in sizes.values() for s in own]
            unit, _ = _scale([*held, room[rank]], room[rank])
            for row in sizes.values():
                for s in own:
                    row[s] = _floor(row[s], unit)
            room[rank] = _floor(problem.ample[rank], unit)
    whole: dict[str, Any] = {
        name: tuple(_floor(cost, scale) for cost in row) for name, row in times.items()
    }
    whole |= {name: tuple(row) for name, row in sizes.items()}
    return _IntegerProblem(replace(problem, **whole, room=tuple(room)), float(scale), exact)


def _floor(number: float, scale: Fraction) -> int:
    return floor(Fraction(str(number)) * scale)


def _scale(numbers: Sequence[float], largest: float) -> tuple[Fraction, bool]:
    """By what to multiply numbers to make all of them whole, if none gets large; and whether so."""
    exact = [Fraction(str(n)) for n in numbers if n]
    scale = Fraction(lcm(*(n.denominator for n in exact)))
    scale /= gcd(*(int(n * scale) for n in exact)) or 1
    if largest * scale <= _LARGE:
        return scale, True
    return Fraction(_FINE) / Fraction(largest), False
