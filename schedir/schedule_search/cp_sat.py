"""Solve scheduling problems and prove bounds with OR-Tools CP-SAT (`schedir[solver]`).

In problems of up to about 130 (stage, microbatch) pairs, CP-SAT finds the shortest order, and
proves that it is the shortest, in seconds. In larger problems it rarely finds a shorter order than
the heuristic search. So the heuristic search runs first, and CP-SAT starts from its best order. No
other module of schedir needs OR-Tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from fractions import Fraction
from math import floor, gcd, inf, isfinite, lcm
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

PROOF_TOLERANCE: Final = 1e-6  # Relative error of a proved length, because times may be rounded.
CLOSED_EXPLANATION: Final = "CP-SAT proved that no order is shorter"
TRIVIAL_BOUND: Final = LowerBound(0.0, "no schedule takes less than 0")
_POLL_SECONDS = 0.1  # Seconds between two reports of the progress of the solver.
# The largest sum of all times in an integer model with exact numbers, and with rounded numbers.
_MAX_EXACT_INTEGER, _MAX_ROUNDED_INTEGER = 2**40, 2**31

Task = tuple[int, int, int]  # (stage, kind, microbatch), where the kind is F, I or W.


class SolverResult(NamedTuple):
    """The result of CP-SAT for a scheduling problem.

    Attributes:
        order: The shortest order that the solver found, or None if it found no order in time.
        value: The length of `order`, see `compute_length`. Infinite if `order` is None.
        bound: A lower bound on the length of every order.
        is_proved: True if `order` is within 1e-6 of the optimum.
        interrupted: True if Ctrl-C ended the solver.
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
    known_bound: LowerBound = TRIVIAL_BOUND,
    workers: int = 0,
    seed: int = 0,
    report: Callable[[float, float], None] | None = None,
) -> SolverResult:
    """Search for the shortest order with CP-SAT, and compute a lower bound.

    Ctrl-C ends the solver, and the best order so far is returned.

    Args:
        problem: The problem to solve.
        seconds: The time limit of the solver.
        hint: The order from which the solver starts. The order must not deadlock, and must fit into
            memory. The result is never longer than this order.
        known_bound: A lower bound that is already proved.
        workers: The number of threads. By default the number of processors.
        seed: The random seed of the solver.
        report: A function of the length of the shortest order and the bound. The calling thread
            calls it when the length or the bound has improved, at most once in 0.1 seconds.

    Returns:
        The shortest order, the bound, and whether the order is proved shortest.

    Raises:
        MissingPackageError: OR-Tools is not installed.
    """
    cp_model = import_cp_sat()
    length, order = inf, hint
    if hint is not None:
        hint_length = compute_length(problem, hint)
        assert hint_length is not None
        length = hint_length
        if known_bound.value >= length * (1 - RELATIVE_TOLERANCE):
            return SolverResult(hint, length, known_bound, True, False)
    integer_problem, scale = _to_integer_problem(problem)
    min_total = floor(known_bound.value * scale * (1 - RELATIVE_TOLERANCE))
    model = _CpSatModel(cp_model, integer_problem, min_total)
    if hint is not None:
        model.add_hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers or os.cpu_count() or 1
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    status, is_interrupted = _run_solver(cp_model, solver, model.model, scale, report)
    bound = known_bound
    value = solver.best_objective_bound / scale
    if value > known_bound.value * (1 + RELATIVE_TOLERANCE):
        bound = LowerBound(value, f"CP-SAT proved that no order is shorter than {value:.6g}")
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solver_order = model.extract_order(solver.value)
        solver_length = compute_length(problem, solver_order)
        fits_by_rank = (
            problem.fits_on_rank(peak, rank)
            for rank, peak in enumerate(compute_peaks(problem, solver_order))
        )
        # With rounded sizes, the solver may return an order that does not fit.
        if solver_length is not None and solver_length < length and all(fits_by_rank):
            length, order = solver_length, solver_order
    is_proved = length <= bound.value * (1 + PROOF_TOLERANCE)
    if is_proved and bound is not known_bound:
        bound = LowerBound(min(bound.value, length), CLOSED_EXPLANATION)
    return SolverResult(order, length, bound, is_proved, is_interrupted)


def import_cp_sat() -> Any:
    """Return the module `ortools.sat.python.cp_model`.

    Raises:
        MissingPackageError: OR-Tools is not installed.
    """
    require_package("ortools", "a proof by CP-SAT", field="bound")
    from ortools.sat.python import cp_model

    return cp_model


def _run_solver(
    cp_model: Any,
    solver: Any,
    model: Any,
    scale: float,
    report: Callable[[float, float], None] | None,
) -> tuple[Any, bool]:
    """Run the solver in a thread, and return its status and whether Ctrl-C interrupted it.

    The calling thread waits, so that it receives Ctrl-C if it is the main thread.
    """
    best = {"value": inf, "bound": 0.0}

    class Best(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            best["value"] = self.objective_value / scale

    def update_bound(value: float) -> None:
        best["bound"] = value / scale

    solver.best_bound_callback = update_bound
    is_interrupted = False
    reported_best = dict(best)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model, Best())
        while not status.done():
            try:
                wait((status,), timeout=_POLL_SECONDS)
                if report is not None and best != reported_best:
                    reported_best = dict(best)
                    report(reported_best["value"], reported_best["bound"])
            except KeyboardInterrupt:
                is_interrupted = True
            if is_interrupted:
                solver.stop_search()
    return status.result(), is_interrupted


class _CpSatModel:
    """A CP-SAT model with an integer variable for the start of each task.

    Args:
        cp_model: The module `ortools.sat.python.cp_model`.
        problem: The problem, with integer times and sizes.
        min_total: A lower bound on the length, in the unit of `problem`.
    """

    def __init__(self, cp_model: Any, problem: SchedulingProblem, min_total: int) -> None:
        self.problem = problem
        self.min_total = min_total
        self.model = model = cp_model.CpModel()
        self.durations = (problem.F, problem.I, problem.W)
        self.task_kinds = (F, I, W) if problem.split_backward else (F, I)
        rows = (*self.durations, problem.act_delay, problem.grad_delay, problem.tail_time)
        # The sum of all times, which is an upper bound on the length.
        self.max_time = int(problem.microbatches * sum(map(sum, rows)))
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
        for rank, local_stages in enumerate(problem.stages_of_rank):
            model.add_no_overlap(
                model.new_fixed_size_interval_var(start, self.durations[kind][s], "")
                for s in local_stages
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
        """Constrain each task to start after its inputs, and in the order of microbatches."""
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
        """Constrain the memory of a rank to its capacity."""
        problem, capacity = self.problem, int(self.problem.capacity[rank])
        local_stages = problem.stages_of_rank[rank]
        max_per_mb = sum(
            max(problem.saved[s], problem.saved_and_deferred[s], problem.deferred_wgrad[s])
            for s in local_stages
        )
        if problem.microbatches * max_per_mb <= capacity:
            return
        for s in local_stages:
            self._add_implied_precedences(s, capacity)
        is_constant = (
            len(local_stages) == 1
            and problem.saved[local_stages[0]] == problem.saved_and_deferred[local_stages[0]]
        )
        if is_constant and (
            not problem.split_backward
            or problem.deferred_wgrad[local_stages[0]] == problem.saved[local_stages[0]]
        ):
            return  # The implied precedences are equivalent to the limit.
        for s in local_stages:
            for k in range(problem.microbatches):
                self._add_memory_at_start((s, F, k), local_stages, capacity)
                if problem.saved_and_deferred[s] > problem.saved[s]:
                    self._add_memory_at_start((s, I, k), local_stages, capacity)

    def _add_memory_at_start(self, task: Task, stages: Sequence[int], capacity: int) -> None:
        """Constrain the memory at the start of a task to the capacity of its rank.

        The memory is a sum over the tasks that precede the task on the rank, as in `compute_peaks`.
        CP-SAT prunes much more with these sums than with intervals of memory use.
        """
        problem = self.problem
        memory = int(
            problem.saved[task[0]]
            if task[1] == F
            else problem.saved_and_deferred[task[0]] - problem.saved[task[0]]
        )
        terms = []
        for s in stages:
            saved = int(problem.saved[s])
            deferred = int(problem.deferred_wgrad[s])
            for kind, change in zip(
                self.task_kinds, (saved, deferred - saved, -deferred), strict=False
            ):
                for k in range(problem.microbatches):
                    if change and (s, kind, k) != task:
                        is_before = self._order_literal((s, kind, k), task)
                        if is_before is True:
                            memory += change
                        elif is_before is not False:
                            terms.append(is_before * change)
        self.model.add(sum(terms) + memory <= capacity)

    def _order_literal(self, task: Task, other_task: Task) -> Any:
        """Return a literal of the model that is true if a task precedes another task of its rank.

        The result is True or False if the dependencies imply the order of the two tasks.
        """
        if self._must_precede(task, other_task):
            return True
        if self._must_precede(other_task, task):
            return False
        if (other_task, task) in self.order_vars:
            return ~self.order_vars[other_task, task]
        if (task, other_task) not in self.order_vars:
            is_before = self.order_vars[task, other_task] = self.model.new_bool_var("")
            for literal, (s, kind, k), (t, other_kind, n) in (
                (is_before, task, other_task),
                (~is_before, other_task, task),
            ):
                self.model.add(
                    self.start_vars[t, other_kind][n] >= self.end_expression(s, kind, k)
                ).only_enforce_if(literal)
        return self.order_vars[task, other_task]

    def _must_precede(self, task: Task, other_task: Task) -> bool:
        """Return whether the dependencies imply that `task` runs before `other_task`."""
        (s, kind, k), (t, other_kind, n) = task, other_task
        if kind == W:
            return (s, kind) == (t, other_kind) and k < n
        last_depth = 2 * self.problem.shape.stages - 1
        depth = last_depth - t if other_kind != F else t
        return k <= n and (last_depth - s if kind == I else s) <= depth

    def _add_implied_precedences(self, stage: int, capacity: int) -> None:
        """Add the precedences that the memory limit implies for the F's of a stage.

        The precedences follow from the memory of this stage alone. CP-SAT could derive them from
        the memory limit, but slowly.
        """
        saved, deferred = self.problem.saved[stage], self.problem.deferred_wgrad[stage]
        for k in range(self.problem.microbatches):
            # `i` is the smallest number of I's after which F k fits into memory, if each I is
            # followed by its W. `w` is the smallest number of W's after which F k fits into memory,
            # for some number of I's.
            i = next(i for i in range(k + 1) if (k + 1 - i) * saved <= capacity)
            if i:
                self.model.add(self.start_vars[stage, F][k] >= self.end_expression(stage, I, i - 1))
            if self.problem.split_backward:
                w = next(
                    w
                    for w in range(k + 1)
                    if min(saved + (k - w) * deferred, (k + 1 - w) * saved) <= capacity
                )
                if w:
                    self.model.add(
                        self.start_vars[stage, F][k] >= self.end_expression(stage, W, w - 1)
                    )

    def _add_objective(self) -> None:
        """Constrain the objective `total_var` to be at least the time of each rank."""
        problem, last_mb = self.problem, self.problem.microbatches - 1
        first_starts = _find_first_starts(problem)
        for rank, local_stages in enumerate(problem.stages_of_rank):
            begin: Any = 0
            tail = int(problem.tail_time[rank])
            if problem.objective == "active_span":
                begin, tail = self.start_vars[local_stages[0], F][0], 0
                # A rank starts as early as possible, as in `compute_starts`.
                if rank in first_starts:
                    self.model.add(begin == first_starts[rank])
            for s in local_stages:
                self.model.add(
                    self.total_var
                    >= self.end_expression(s, self.task_kinds[-1], last_mb) + tail - begin
                )
            # The other constraints imply this one, but CP-SAT takes long to derive it.
            work = int(problem.get_compute_time(rank)) + tail
            self.model.add(self.total_var >= self.start_vars[local_stages[0], F][0] + work - begin)

    def add_hint(self, order: Order) -> None:
        """Start the solver from an order, and limit the length to the length of this order.

        Args:
            order: An order that does not deadlock.
        """
        starts = compute_starts(self.problem, order)
        assert starts is not None
        for codes, rank_starts in zip(order, starts, strict=True):
            next_mb: dict[int, int] = {}
            for code, start in zip(codes, rank_starts, strict=True):
                k = next_mb.setdefault(code, 0)
                self.model.add_hint(self.start_vars[divmod(code, KINDS)][k], int(start))
                next_mb[code] += 1
        total = max(int(compute_length(self.problem, order) or 0), self.min_total)
        self.model.add_hint(self.total_var, total)
        self.model.add(self.total_var <= total)

    def extract_order(self, value_of: Callable[[Any], int]) -> Order:
        """Return the order of the tasks by the starts that the solver found.

        Tasks of a rank with the same start are sorted by their end, and then by microbatch. Tasks
        can have the same start if all these tasks except the last take no time.

        Args:
            value_of: The function that returns the solver's value of a variable.
        """
        num_depths = 2 * self.problem.shape.stages
        tasks_of_rank: list[list[tuple[float, ...]]] = [[] for _ in self.problem.stages_of_rank]
        for (s, kind), starts in self.start_vars.items():
            depth = (s, num_depths - 1 - s, num_depths)[kind]
            for k, start in enumerate(starts):
                begin = value_of(start)
                sort_key = (begin, begin + self.durations[kind][s], k, depth)
                tasks_of_rank[self.problem.rank_of[s]].append((*sort_key, KINDS * s + kind))
        return tuple(tuple(int(task[-1]) for task in sorted(tasks)) for tasks in tasks_of_rank)


def _find_first_starts(problem: SchedulingProblem) -> dict[int, int]:
    """Return the start of each rank whose first F depends only on the first F's of other ranks.

    The result is rank -> time, in the unit of the costs.
    """
    start, start_of_rank = 0.0, {}
    for s, rank in enumerate(problem.rank_of):
        if rank in start_of_rank:
            break
        start_of_rank[rank] = int(start)
        start += problem.F[s] + problem.act_delay[s]
    return start_of_rank


def _to_integer_problem(problem: SchedulingProblem) -> tuple[SchedulingProblem, float]:
    """Scale a problem to integers. Return it and the factor from original times to integer times.

    An order that fits into memory still fits, and is not longer.
    Decimal numbers stay exact if their sum is small enough. Otherwise times and sizes are rounded
    down, so a bound is rounded down too. Capacities include the rounding tolerance.
    """
    times = {
        name: getattr(problem, name)
        for name in ("F", "I", "W", "act_delay", "grad_delay", "tail_time")
    }
    total = problem.microbatches * sum(map(sum, times.values()))
    scale = _choose_scale([c for row in times.values() for c in row], total)
    sizes = {
        name: list(getattr(problem, name))
        for name in ("saved", "deferred_wgrad", "saved_and_deferred")
    }
    capacity = list(problem.capacity)
    for rank, local_stages in enumerate(problem.stages_of_rank):
        if isfinite(capacity[rank]):
            rank_sizes = [row[s] for row in sizes.values() for s in local_stages]
            unit = _choose_scale([*rank_sizes, capacity[rank]], capacity[rank])
            for row in sizes.values():
                for s in local_stages:
                    row[s] = _scale_down(row[s], unit)
            capacity[rank] = _scale_down(problem.rounded_capacity[rank], unit)
    fields: dict[str, Any] = {
        name: tuple(_scale_down(cost, scale) for cost in row) for name, row in times.items()
    }
    fields |= {name: tuple(row) for name, row in sizes.items()}
    return replace(problem, **fields, capacity=tuple(capacity)), float(scale)


def _scale_down(number: float, scale: Fraction) -> int:
    return floor(Fraction(str(number)) * scale)


def _choose_scale(numbers: Sequence[float], largest: float) -> Fraction:
    """Return a factor that scales numbers to integers, possibly with rounding.

    `largest` is the largest sum of the numbers in the model.
    """
    fractions = [Fraction(str(n)) for n in numbers if n]
    scale = Fraction(lcm(*(n.denominator for n in fractions)))
    scale /= gcd(*(int(n * scale) for n in fractions)) or 1
    if largest * scale <= _MAX_EXACT_INTEGER:
        return scale
    return Fraction(_MAX_ROUNDED_INTEGER) / Fraction(largest)
