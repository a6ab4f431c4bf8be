"""Tests of certified optima, half of which no built-in schedule has, and of bounds."""

from collections import Counter
from functools import cache

import pytest

from schedir.schedule_search.bounds.lower_bound import compute_bound
from schedir.schedule_search.cp_sat import PROOF_TOLERANCE
from schedir.schedule_search.search import search_schedule
from tests.cases import ALL
from tests.certified_optima import Case, cases


def test_half_of_the_cases_have_no_optimal_schedule_in_the_zoo() -> None:
    found = Counter(
        c.zoo is not None and c.zoo <= c.optimum * (1 + PROOF_TOLERANCE) for c in cases()
    )
    assert found.total() >= 150 and found[False] >= found[True] > 0


@cache
def bound_in_5_ms(case: Case) -> float:
    return compute_bound(case.problem, 0.005).value


def test_no_bound_is_above_an_optimum() -> None:
    bounds = {
        case: max(compute_bound(case.problem, 0.0).value, bound_in_5_ms(case)) for case in cases()
    }
    assert not [case for case, bound in bounds.items() if bound > case.optimum * (1 + 1e-9)]


def test_seven_in_ten_bounds_are_exact() -> None:
    exact = [bound_in_5_ms(case) >= case.optimum * (1 - PROOF_TOLERANCE) for case in cases()]
    assert sum(exact) >= 0.7 * len(exact)


SMALL = [case for case in cases() if case.cells <= 72][::8]
SLOW = "4x4 v=2 vee k=10 split span"  # takes as long as all others together


@pytest.mark.parametrize("case", [case for case in SMALL if ALL or str(case) != SLOW], ids=str)
def test_a_search_finds_the_optimum(case: Case) -> None:
    """The time is that of the order alone. In a simulation, queues of messages may delay it."""
    found = search_schedule(
        case.shape, case.costs, case.sizes, case.limit, max_in_flight=case.in_flight,
        objective=case.objective, split_backward=case.split, time_limit=100,
        max_evaluations=400_000,
    )  # fmt: skip
    assert found.improvements[-1].span == pytest.approx(case.optimum, rel=PROOF_TOLERANCE)
    assert found.bound <= case.optimum * (1 + 1e-9)
    assert found.span >= found.improvements[-1].span * (1 - 1e-9)
