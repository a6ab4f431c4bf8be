"""Certified optima: half of them are in no zoo, and no bound is above one."""

from collections import Counter

import pytest

from schedir.shortest.bound import bound_of
from schedir.shortest.solver import EXACT
from tests.certified import Case, cases


def test_half_of_the_cases_have_no_optimal_schedule_in_the_zoo() -> None:
    found = Counter(c.zoo is not None and c.zoo <= c.optimum * (1 + EXACT) for c in cases())
    assert found.total() >= 150 and found[False] >= found[True] > 0


@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_bound_is_above_an_optimum(case: Case) -> None:
    assert bound_of(case.problem).value <= case.optimum * (1 + 1e-9)
