"""Tests of the regret of a plan: how much slower it is than the best measured plan."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.errors import UsageError
from schedir.planner import prediction_regret

SECONDS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)


@given(SECONDS, st.floats(0.1, 10))
def test_common_error_factor_has_no_regret(measured: list[float], off: float) -> None:
    assert prediction_regret([off * seconds for seconds in measured], measured) < 1e-9


def test_regret_takes_slowest_of_equal_predictions() -> None:
    assert prediction_regret([1, 1, 2], [3, 4, 2]) == 1.0
    assert prediction_regret([2, 1], [3, 4]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("predicted", "measured", "field"),
    [([], [], "predicted"), ([1.0], [1.0, 2.0], "measured"), ([1.0], [0.0], "measured"),
     ([nan], [1.0], "predicted"), ([1.0], [inf], "measured")],
)  # fmt: skip
def test_invalid_times_are_refused(predicted: Any, measured: Any, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        prediction_regret(predicted, measured)
    assert field in caught.value.fields
