"""Compute the cost of running the plan that a prediction calls best."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from schedir.errors import UsageError


def prediction_regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the plan is that is predicted to be best than the best of those measured.

    Both are seconds of the same plans, in the same order; 0.05 is 5 % slower.  Of plans that are
    predicted alike the slowest counts, as nothing says which to take.  An error that all plans
    share costs nothing here, and one that turns their order does.

    Raises UsageError for none, for numbers that are not positive, and where the two differ in
    length.

    >>> from schedir.planner import prediction_regret
    >>> f"{prediction_regret([1.0, 1.1, 1.4], measured=[2.1, 2.0, 3.0]):.3f}"
    '0.050'
    """
    if not predicted or len(predicted) != len(measured):
        raise UsageError(
            f"regret: {len(predicted)} plans are predicted and {len(measured)} measured",
            fields=["predicted", "measured"],
        )
    for name, seconds in (("predicted", predicted), ("measured", measured)):
        if not all(0 < each < inf for each in seconds):
            raise UsageError(f"regret: what is {name} are seconds, above 0", fields=[name])
    least = min(predicted)
    chosen = [real for told, real in zip(predicted, measured, strict=True) if told == least]
    return max(chosen) / min(measured) - 1
