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

from schedir.extras import require_package
from schedir.predict.possible_saving import RELATIVE_TOLERANCE
from schedir.schedule_search.problem import SchedulingProblem
from schedir.schedule_search.rank_order import (
    KINDS,
    F,
    I,
    Order,
    W,
    compute_length,
    compute_peaks,
    compute_starts,
)
from schedir.schedule_search.search_results import LowerBound

PROOF_TOLERANCE: Final = 1e-6  # of itself, a value that is proved may be off
CLOSED_EXPLANATION: Final = "CP-SAT closed it: no order is shorter"
TRIVIAL_BOUND: Final = LowerBound(0.0, "no schedule takes less than no time")
_POLL_SECONDS = 0.1  # seconds after which there is a look at what the solver has
_MAX_EXACT_INTEGER, _MAX_ROUNDED_INTEGER = (
    2**40,
    2**31,
)  # largest whole number of a model; of one that has to be rounded


Task = tuple[int, int, int]  # stage, kind, microbatch


class SolverResult(NamedTuple):
    """What CP-SAT says of a SchedulingProblem.

    `extract_order` is the shortest that it found, None where it found none that was asked for, and
    `value_of` what that takes by `orders.length`.  No order takes less than `bound`; where shorter
    ones than
    `below` were asked for, none of those.  `is_proved` says that nothing is left to find:
    `extract_order` is within 1e-6 of the shortest, or there is none.
    """

    order: Order | None
    value: float
    bound: LowerBound
    is_proved: bool
    interrupted: bool


def solve(
    problem: SchedulingProblem,
    seconds: float,
    *,
    hint: Order | None = None,
    shorter_than: float = inf,
    known_bound: LowerBound = TRIVIAL_BOUND,
    workers: int = 0,
    seed: int = 0,
    report: Callable[[float, float], None] | None = None,
) -> SolverResult:
    """The shortest order that CP-SAT finds in some seconds, and what it has proved.

    `add_hint` is a legal order to begin with, which what is found is never longer than;
    `shorter_than` asks for shorter ones only; `known_bound` is a bound that is known.  It takes
    `workers` threads, by default as many as there are processors.
    `report` is told the length of the shortest order and the bound, whenever one gets better.
    Ctrl-C ends it with what there is by then.

    Raises MissingPackageError where ortools is not installed.
    """
    cp_model = import_cp_sat()
    known = compute_length(problem, hint) if hint is not None else None
    most = shorter_than if known is None else min(known, shorter_than)
    if known_bound.value >= most * (1 - RELATIVE_TOLERANCE):
        kept = hint if known is not None and known < shorter_than else None
        return SolverResult(kept, inf if kept is None else most, known_bound, True, False)
    whole = _to_integer_problem(problem)
    least = floor(known_bound.value * whole.scale * (1 - RELATIVE_TOLERANCE))
    model = _CpSatModel(cp_model, whole.problem, least)
    if isfinite(shorter_than):
        model.limit_total(whole.max_length_below(shorter_than))
    if hint is not None:
        model.add_hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers or os.cpu_count() or 1
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    status, interrupted = _run_solver(cp_model, solver, model.model, whole.scale, report)
    if status == cp_model.INFEASIBLE:
        assert isfinite(shorter_than)
        share = 1.0 if whole.is_exact else 1 - PROOF_TOLERANCE
        return SolverResult(
            None, inf, LowerBound(shorter_than * share, CLOSED_EXPLANATION), True, interrupted
        )
    bound = known_bound
    if (value := solver.best_objective_bound / whole.scale) > known_bound.value * (
        1 + RELATIVE_TOLERANCE
    ):
        bound = LowerBound(value, f"CP-SAT has ruled out all orders shorter than {value:.6g}")
    best, order = inf, None
    if known is not None and known < shorter_than:
        best, order = known, hint
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = model.extract_order(solver.value)
        taken = compute_length(problem, found)
        fits = (
            problem.fits_on_rank(held, rank)
            for rank, held in enumerate(compute_peaks(problem, found))
        )
        if taken is not None and taken < best and all(fits):  # numbers may have been rounded
            best, order = taken, found
    proved = best <= bound.value * (1 + PROOF_TOLERANCE)
    if proved and bound is not known_bound:
        bound = LowerBound(min(bound.value, best), CLOSED_EXPLANATION)
    return SolverResult(order, best, bound, proved, interrupted)


def import_cp_sat() -> Any:
    """Return the module of CP-SAT. Raises MissingPackageError if it is not installed."""
    require_package("ortools", "a proof by the solver", field="prove")
    from ortools.sat.python import cp_model

    return cp_model


def _run_solver(
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
                wait((status,), timeout=_POLL_SECONDS)
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

    def __init__(self, cp_model: Any, problem: SchedulingProblem, min_total: int) -> None:
        self.problem, self.min_total = problem, min_total
        self.model = model = cp_model.CpModel()
        self.durations = (problem.F, problem.I, problem.W)
        self.task_kinds = (F, I, W) if problem.split_backward else (F, I)
        rows = (*self.durations, problem.act_delay, problem.grad_delay, problem.tail_time)
        self.max_time = int(problem.microbatches * sum(map(sum, rows)))  # one after the other
        self.start_vars = {
            (s, kind): [
                model.new_int_var(0, self.max_time, "") for _ in range(problem.microbatches)
            ]
            for s in range(problem.shape.stages)
            for kind in self.task_kinds
        }
        self.order_vars: dict[tuple[Task, Task], Any] = {}
        self.total_var = model.new_int_var(min_total, max(self.max_time, min_total), "")
        self._add_dependencies()
        for rank, own in enumerate(problem.stages_of_rank):
            model.add_no_overlap(
                model.new_fixed_size_interval_var(start, self.durations[kind][s], "")
                for s in own
                for kind in self.task_kinds
                for start in self.start_vars[s, kind]
            )
            if isfinite(problem.capacity[rank]):
                self._add_memory_limit(rank)
        self._add_objective()
        model.minimize(self.total_var)

    def end_expression(self, stage: int, kind: int, mb: int) -> Any:
        return self.start_vars[stage, kind][mb] + self.durations[kind][stage]

    def _add_dependencies(self) -> None:
        """Work of a kind ascends, and nothing starts before it has what it needs."""
        problem, add = self.problem, self.model.add
        for (s, kind), starts in self.start_vars.items():
            for k, start in enumerate(starts):
                if k:
                    add(start >= self.end_expression(s, kind, k - 1))
                if kind == F and s:
                    add(start >= self.end_expression(s - 1, F, k) + problem.act_delay[s - 1])
                elif kind == I and s + 1 < problem.shape.stages:
                    add(start >= self.end_expression(s + 1, I, k) + problem.grad_delay[s + 1])
                elif kind != F:
                    add(start >= self.end_expression(s, kind - 1, k))

    def _add_memory_limit(self, rank: int) -> None:
        """A rank never holds more than it has room for."""
        problem, room = self.problem, int(self.problem.capacity[rank])
        own = problem.stages_of_rank[rank]
        most = sum(
            max(problem.saved[s], problem.saved_and_deferred[s], problem.deferred_wgrad[s])
            for s in own
        )
        if problem.microbatches * most <= room:
            return
        for s in own:
            self._add_implied_precedences(s, room)
        whole = len(own) == 1 and problem.saved[own[0]] == problem.saved_and_deferred[own[0]]
        if whole and (
            not problem.split_backward or problem.deferred_wgrad[own[0]] == problem.saved[own[0]]
        ):
            return  # that says it all
        for s in own:
            for k in range(problem.microbatches):
                self._add_memory_at_start((s, F, k), own, room)
                if problem.saved_and_deferred[s] > problem.saved[s]:
                    self._add_memory_at_start((s, I, k), own, room)

    def _add_memory_at_start(self, task: Task, stages: Sequence[int], capacity: int) -> None:
        """What is held as a piece of work starts fits: of all that comes before it on its rank.

        In numbers of pieces, as `compute_peaks` counts it: CP-SAT sees much further so than with
        intervals of what is held from when to when.
        """
        problem = self.problem
        held = int(
            problem.saved[task[0]]
            if task[1] == F
            else problem.saved_and_deferred[task[0]] - problem.saved[task[0]]
        )
        terms = []
        for s in stages:
            saved, tape = int(problem.saved[s]), int(problem.deferred_wgrad[s])
            for kind, more in zip(self.task_kinds, (saved, tape - saved, -tape), strict=False):
                for k in range(problem.microbatches):
                    if more and (s, kind, k) != task:
                        before = self._order_literal((s, kind, k), task)
                        if before is True:
                            held += more
                        elif before is not False:
                            terms.append(before * more)
        self.model.add(sum(terms) + held <= capacity)

    def _order_literal(self, task: Task, other_task: Task) -> Any:
        """Whether a piece of work of a rank comes before another: known, or a variable."""
        if self._must_precede(task, other_task):
            return True
        if self._must_precede(other_task, task):
            return False
        if (other_task, task) in self.order_vars:
            return ~self.order_vars[other_task, task]
        if (task, other_task) not in self.order_vars:
            is_so = self.order_vars[task, other_task] = self.model.new_bool_var("")
            for so, (s, kind, k), (t, what, n) in (
                (is_so, task, other_task),
                (~is_so, other_task, task),
            ):
                self.model.add(
                    self.start_vars[t, what][n] >= self.end_expression(s, kind, k)
                ).only_enforce_if(so)
        return self.order_vars[task, other_task]

    def _must_precede(self, task: Task, other_task: Task) -> bool:
        """Whether work must come before other work, for what that needs."""
        (s, kind, k), (t, what, n) = task, other_task
        if kind == W:
            return (s, kind) == (t, what) and k < n
        turn = 2 * self.problem.shape.stages - 1
        depth = turn - t if what != F else t
        return k <= n and (turn - s if kind == I else s) <= depth

    def _add_implied_precedences(self, stage: int, capacity: int) -> None:
        """What must have ended before an F of a stage, as that alone would not fit: implied."""
        saved, tape = self.problem.saved[stage], self.problem.deferred_wgrad[stage]
        for k in range(self.problem.microbatches):
            # The fewest I's, with a W for each; the fewest W's, with as many I's as is best.
            i = next(i for i in range(k + 1) if (k + 1 - i) * saved <= capacity)
            if i:
                self.model.add(self.start_vars[stage, F][k] >= self.end_expression(stage, I, i - 1))
            if self.problem.split_backward:
                w = next(
                    w
                    for w in range(k + 1)
                    if min(saved + (k - w) * tape, (k + 1 - w) * saved) <= capacity
                )
                if w:
                    self.model.add(
                        self.start_vars[stage, F][k] >= self.end_expression(stage, W, w - 1)
                    )

    def _add_objective(self) -> None:
        """What is to be short: `total_var` is no less than what each rank takes."""
        problem, last = self.problem, self.problem.microbatches - 1
        first = _find_first_starts(problem)
        for rank, own in enumerate(problem.stages_of_rank):
            begin: Any = 0
            tail = int(problem.tail_time[rank])
            if problem.objective == "own":
                begin, tail = self.start_vars[own[0], F][0], 0
                if rank in first:  # it starts as early as it can, even if that makes it wait
                    self.model.add(begin == first[rank])
            for s in own:
                self.model.add(
                    self.total_var
                    >= self.end_expression(s, self.task_kinds[-1], last) + tail - begin
                )
            work = (
                int(problem.get_compute_time(rank)) + tail
            )  # implied, but CP-SAT would be long to see it
            self.model.add(self.total_var >= self.start_vars[own[0], F][0] + work - begin)

    def limit_total(self, max_total: int) -> None:
        """Look for totals up to that."""
        self.model.add(self.total_var <= max_total)

    def add_hint(self, order: Order) -> None:
        """Begin with an order that ends."""
        starts = compute_starts(self.problem, order)
        assert starts is not None
        for codes, own in zip(order, starts, strict=True):
            done: dict[int, int] = {}
            for code, start in zip(codes, own, strict=True):
                k = done.setdefault(code, 0)
                self.model.add_hint(self.start_vars[divmod(code, KINDS)][k], int(start))
                done[code] += 1
        total = max(int(compute_length(self.problem, order) or 0), self.min_total)
        self.model.add_hint(self.total_var, total)
        self.model.add(self.total_var <= total)

    def extract_order(self, value_of: Callable[[Any], int]) -> Order:
        """The order of the starts that have been found.

        Where several start at once, all but the last take no time: microbatch by microbatch then.
        """
        turn = 2 * self.problem.shape.stages
        found: list[list[tuple[float, ...]]] = [[] for _ in self.problem.stages_of_rank]
        for (s, kind), starts in self.start_vars.items():
            depth = (s, turn - 1 - s, turn)[kind]
            for k, start in enumerate(starts):
                begin = value_of(start)
                when = (begin, begin + self.durations[kind][s], k, depth)
                found[self.problem.rank_of[s]].append((*when, KINDS * s + kind))
        return tuple(tuple(int(each[-1]) for each in sorted(own)) for own in found)


def _find_first_starts(problem: SchedulingProblem) -> dict[int, int]:
    """When the ranks start of which that is known: whose first F only first F's come before."""
    start, first = 0.0, {}
    for s, rank in enumerate(problem.rank_of):
        if rank in first:
            break
        first[rank] = int(start)
        start += problem.F[s] + problem.act_delay[s]
    return first


class _IntegerProblem(NamedTuple):
    """A Problem of whole numbers, times `scale` as long, or less by rounding where not
    `is_exact`."""

    problem: SchedulingProblem
    scale: float
    is_exact: bool

    def max_length_below(self, below: float) -> int:
        """The largest whole length that is less than that, by 1e-6 where lengths are rounded."""
        if self.is_exact:
            return ceil(below * self.scale * (1 - RELATIVE_TOLERANCE)) - 1
        return floor(below * self.scale * (1 - PROOF_TOLERANCE))


def _to_integer_problem(problem: SchedulingProblem) -> _IntegerProblem:
    """The Problem in whole numbers that allows all that it allows, and takes no longer.

    Decimal costs are exact.  Others are rounded down, and so is a bound; what each rank holds is
    rounded down as well, and its room up.
    """
    times = {
        name: getattr(problem, name)
        for name in ("F", "I", "W", "act_delay", "grad_delay", "tail_time")
    }
    total = problem.microbatches * sum(map(sum, times.values()))
    scale, exact = _choose_scale([c for row in times.values() for c in row], total)
    sizes = {
        name: list(getattr(problem, name))
        for name in ("saved", "deferred_wgrad", "saved_and_deferred")
    }
    room = list(problem.capacity)
    for rank, own in enumerate(problem.stages_of_rank):
        if isfinite(room[rank]):
            held = [row[s] for row in sizes.values() for s in own]
            unit, _ = _choose_scale([*held, room[rank]], room[rank])
            for row in sizes.values():
                for s in own:
                    row[s] = _scale_down(row[s], unit)
            room[rank] = _scale_down(problem.rounded_capacity[rank], unit)
    whole: dict[str, Any] = {
        name: tuple(_scale_down(cost, scale) for cost in row) for name, row in times.items()
    }
    whole |= {name: tuple(row) for name, row in sizes.items()}
    return _IntegerProblem(replace(problem, **whole, capacity=tuple(room)), float(scale), exact)


def _scale_down(number: float, scale: Fraction) -> int:
    return floor(Fraction(str(number)) * scale)


def _choose_scale(numbers: Sequence[float], largest: float) -> tuple[Fraction, bool]:
    """By what to multiply numbers to make all of them whole, if none gets large; and whether so."""
    exact = [Fraction(str(n)) for n in numbers if n]
    scale = Fraction(lcm(*(n.denominator for n in exact)))
    scale /= gcd(*(int(n * scale) for n in exact)) or 1
    if largest * scale <= _MAX_EXACT_INTEGER:
        return scale, True
    return Fraction(_MAX_ROUNDED_INTEGER) / Fraction(largest), False
