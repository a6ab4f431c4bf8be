"""Tests that CP-SAT finds certified optima, and the same optima as trying every order."""

import os
import sys
from dataclasses import replace
from importlib import import_module
from random import Random
from signal import SIGINT
from threading import Timer

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedir.compiler.compile import compile
from schedir.errors import UsageError
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.predict.simulate import simulate
from schedir.schedule_search.cp_sat import CLOSED_EXPLANATION, PROOF_TOLERANCE, SolverResult, solve
from schedir.schedule_search.problem import OBJECTIVES, SchedulingProblem, make_problem
from schedir.schedule_search.rank_order import (
    compute_length,
    compute_peaks,
    draft_from_order,
    order_one_by_one,
)
from schedir.schedule_search.search import search_schedule
from schedir.schedule_search.search_results import LowerBound
from tests.certified_optima import Case, load_cases
from tests.interleavings import find_shortest_length


def run_solver(problem: SchedulingProblem, **options: object) -> SolverResult:
    pytest.importorskip("ortools")
    return solve(problem, 60, workers=1, **options)  # type: ignore[arg-type]


def select_small_cases(stages_per_rank: int, max_cells: int) -> list[Case]:
    small_cases = [
        c for c in load_cases() if c.stages_per_rank == stages_per_rank and c.cells <= max_cells
    ]
    return small_cases[:: len(small_cases) // 5 + 1]


@pytest.mark.parametrize("case", select_small_cases(1, 50) + select_small_cases(2, 12), ids=str)
def test_solver_finds_certified_optimum(case: Case) -> None:
    problem = case.problem
    result = run_solver(problem)
    assert result.is_proved and result.order is not None
    assert result.value == pytest.approx(case.optimum, rel=PROOF_TOLERANCE)
    assert result.bound.value <= result.value
    assert all(
        problem.fits_on_rank(held, rank)
        for rank, held in enumerate(compute_peaks(problem, result.order))
    )
    hinted = run_solver(problem, hint=result.order)
    assert hinted.is_proved and hinted.value <= result.value


@pytest.mark.parametrize("case", select_small_cases(1, 50), ids=str)
def test_found_order_simulates_as_predicted(case: Case) -> None:
    """The simulated time is equal, or longer because of the queues of messages."""
    problem = replace(case.problem, objective="span")
    result = run_solver(problem)
    assert result.order is not None
    run = simulate(compile(draft_from_order(problem, result.order), costs=case.costs), case.costs)
    if case.send:
        assert result.value * (1 - 1e-9) <= run.span
    else:
        assert result.value == pytest.approx(run.span, rel=1e-9)


SHAPES = [(1, 3, 1, True), (2, 2, 1, True), (2, 3, 1, True), (2, 3, 1, False), (3, 2, 1, True)]
SHAPES += [(1, 2, 2, False), (1, 1, 2, True), (2, 1, 2, True), (3, 3, 1, False)]


@st.composite
def tiny_problems(draw: st.DrawFn) -> SchedulingProblem:
    """Draw problems that are small enough to try every order, where all work takes time."""
    ranks, microbatches, v, split = draw(st.sampled_from(SHAPES))
    shape = PipelineShape(ranks, microbatches, v, draw(st.sampled_from(["loop", "vee"][:v])))
    times = draw(st.sampled_from([st.integers(1, 6).map(float), st.floats(0.5, 2.0)]))

    def draw_row(element: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(element, min_size=shape.stages, max_size=shape.stages)))

    costs = Costs(
        F=draw_row(times), I=draw_row(times), W=draw_row(times), send=draw(st.just(0.0) | times)
    )
    objective = draw(st.sampled_from(OBJECTIVES))
    if draw(st.booleans()):
        in_flight = draw(st.integers(v, 6))
        return make_problem(
            shape, costs, max_in_flight=in_flight, objective=objective, split_backward=split
        )
    saved = draw_row(st.integers(1, 5).map(float))
    tape = tuple(float(draw(st.integers(0, int(s)))) for s in saved)
    saved_and_deferred = tuple(
        s + draw(st.integers(0, int(t))) for s, t in zip(saved, tape, strict=True)
    )
    sizes = Sizes(saved=saved, deferred_wgrad=tape, saved_and_deferred=saved_and_deferred)
    limit = draw(st.integers(1, 30))
    try:
        return make_problem(shape, costs, sizes, limit, objective=objective, split_backward=split)
    except UsageError:  # not even one microbatch fits
        assume(False)
        raise


@given(tiny_problems())
@settings(max_examples=40, deadline=None)
def test_solver_agrees_with_exhaustive_search(problem: SchedulingProblem) -> None:
    best = find_shortest_length(problem)
    result = run_solver(problem)
    assert result.is_proved and result.order is not None
    assert result.value == pytest.approx(best, rel=PROOF_TOLERANCE)
    assert result.bound.value <= best * (1 + 1e-9)
    assert compute_length(problem, result.order) == result.value


def test_known_bound_ends_search() -> None:
    problem = make_problem(PipelineShape(ranks=2, microbatches=4), max_in_flight=2)
    order = run_solver(problem).order
    known = LowerBound(13.0, "rank 0 ends last")
    result = run_solver(problem, hint=order, known_bound=known)
    assert (result.order, result.value, result.bound, result.is_proved) == (
        order,
        13.0,
        known,
        True,
    )


def test_bound_explanation_without_known_bound() -> None:
    problem = make_problem(PipelineShape(ranks=2, microbatches=4), max_in_flight=2)
    assert run_solver(problem).bound == LowerBound(13.0, CLOSED_EXPLANATION)


def test_non_decimal_costs_are_rounded_down_for_bound() -> None:
    costs = Costs(F=(1 / 3, 2 / 7), I=(0.1 + 0.2, 3**0.5), W=(2 / 3, 5**0.5))
    problem = make_problem(PipelineShape(ranks=2, microbatches=3), costs, max_in_flight=2)
    best = find_shortest_length(problem)
    result = run_solver(problem)
    assert (
        best * (1 - PROOF_TOLERANCE)
        <= result.bound.value
        <= best
        <= result.value
        <= best * (1 + PROOF_TOLERANCE)
    )


def test_solver_reports_progress() -> None:
    reports: list[tuple[float, float]] = []
    problem = make_problem(
        PipelineShape(ranks=6, microbatches=12), Costs(F=3, I=4, W=2.5), max_in_flight=3
    )
    result = run_solver(problem, report=lambda value, bound: reports.append((value, bound)))
    values, bounds = zip(*reports, strict=True)
    assert list(values) == sorted(values, reverse=True) and list(bounds) == sorted(bounds)
    assert all(result.value <= value and bound <= result.value for value, bound in reports)


def test_missing_ortools_has_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(UsageError) as caught:
        solve(make_problem(PipelineShape(ranks=2, microbatches=2)), 1)
    assert caught.value.hint == "pip install 'schedir[solver]'"
    with pytest.raises(UsageError) as caught:
        search_schedule(PipelineShape(ranks=2, microbatches=2), bound="solver")
    assert caught.value.fields == ("bound",)


def test_search_continues_with_solver() -> None:
    pytest.importorskip("ortools")
    shape = PipelineShape(ranks=2, microbatches=6, stages_per_rank=2, placement="vee")
    costs = Costs(F=4, I=4, W=9, send=2)
    bounds: list[float] = []
    closed = search_schedule(shape, costs, max_in_flight=3, max_evaluations=50)
    result = search_schedule(
        shape, costs, max_in_flight=3, max_evaluations=50, time_limit=60, bound="solver",
        report=lambda _, bound: bounds.append(bound),
    )  # fmt: skip
    assert closed.bound < result.bound == result.span < closed.span
    assert (result.stop_reason, result.explanation, result.improvements[-1].method) == (
        "proved",
        CLOSED_EXPLANATION,
        "CP-SAT",
    )
    assert bounds == sorted(bounds) and bounds[-1] == pytest.approx(result.bound)


def test_interrupt_keeps_best_order() -> None:
    rng = Random(0)
    costs = Costs(**{name: tuple(rng.uniform(0.7, 1.3) for _ in range(8)) for name in "FIW"})
    problem = make_problem(PipelineShape(ranks=8, microbatches=24), costs, max_in_flight=5)
    order = order_one_by_one(problem)
    import_module("ortools.sat.python.cp_model")  # The signal must not interrupt the import.
    timer = Timer(1.0, os.kill, (os.getpid(), SIGINT))
    timer.start()
    result = run_solver(problem, hint=order)
    assert result.interrupted and not result.is_proved
    assert result.order is not None and result.value <= (compute_length(problem, order) or 0)
