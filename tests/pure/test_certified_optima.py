"""Tests of bounds and searches against certified optima."""

from collections import Counter
from functools import cache

import pytest

from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.cp_sat import PROOF_TOLERANCE
from schedir.schedule_search.search import search_schedule
from tests.cases import ALL
from tests.certified_optima import Case, load_cases


def test_built_in_schedules_are_optimal_in_at_most_half_of_cases() -> None:
    counts = Counter(
        c.zoo is not None and c.zoo <= c.optimum * (1 + PROOF_TOLERANCE) for c in load_cases()
    )
    assert counts.total() >= 150 and counts[False] >= counts[True] > 0


@cache
def compute_bound_in_5_ms(case: Case) -> float:
    return compute_bound(case.problem, 0.005).value


def test_bounds_are_at_most_optimum() -> None:
    bounds = {
        case: max(compute_bound(case.problem, 0.0).value, compute_bound_in_5_ms(case))
        for case in load_cases()
    }
    assert not [case for case, bound in bounds.items() if bound > case.optimum * (1 + 1e-9)]


def test_seventy_percent_of_bounds_are_exact() -> None:
    exact = [
        compute_bound_in_5_ms(case) >= case.optimum * (1 - PROOF_TOLERANCE) for case in load_cases()
    ]
    assert sum(exact) >= 0.7 * len(exact)


SMALL_CASES = [case for case in load_cases() if case.cells <= 72][::8]
# These take 40 times as long as all others together. The case "2x4 v=2" searches, too.
SLOW_CASES = (
    "4x4 v=2 vee k=10 split span", "2x2 v=3 loop k=4 whole span",
    "4x7 v=2 loop limit=99.0 whole active_span", "2x15 v=2 vee k=2 split span",
    "3x3 v=2 loop k=3 split active_span", "4x3 v=3 loop limit=128.0 split span",
    "7x5 v=1 loop limit=280.0 split active_span",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in SMALL_CASES if ALL or str(case) not in SLOW_CASES], ids=str
)
def test_search_finds_optimum(case: Case) -> None:
    """The optimum is the span of the order alone. A simulation may add delays of messages."""
    result = search_schedule(
        case.shape, case.costs, case.sizes, case.limit, max_in_flight=case.in_flight,
        objective=case.objective, split_backward=case.split, time_limit=100,
        max_evaluations=400_000,
    )  # fmt: skip
    assert result.improvements[-1].span == pytest.approx(case.optimum, rel=PROOF_TOLERANCE)
    assert result.bound <= case.optimum * (1 + 1e-9)
    assert result.span >= result.improvements[-1].span * (1 - 1e-9)
