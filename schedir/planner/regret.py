"""Compute how much time is lost by running the plan with the best prediction."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from schedir.errors import UsageError


def prediction_regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much slower the predicted best plan is than the measured best plan.

    If several plans have the shortest predicted time, the longest of their measured times is used.
    Prediction errors matter only if they change which plan is predicted to be the best.

    Args:
        predicted: Predicted seconds of each plan.
        measured: Measured seconds of the same plans, in the same order.

    Returns:
        The difference divided by the shortest measured time: 0.05 means 5 % slower.

    Raises:
        UsageError: There are no plans, a time is not positive and finite, or the lengths differ.

    Example:
        >>> from schedir.planner import prediction_regret
        >>> f"{prediction_regret([1.0, 1.1, 1.4], measured=[2.1, 2.0, 3.0]):.3f}"
        '0.050'
    """
    if not predicted or len(predicted) != len(measured):
        raise UsageError(
            f"regret: predicted has {len(predicted)} plans and measured has {len(measured)}, but "
            "both must have the same plans, and at least one",
            fields=["predicted", "measured"],
        )
    for name, seconds in (("predicted", predicted), ("measured", measured)):
        if not all(0 < time < inf for time in seconds):
            raise UsageError(f"regret: {name} must have times in seconds above 0", fields=[name])
    shortest = min(predicted)
    chosen = [real for guess, real in zip(predicted, measured, strict=True) if guess == shortest]
    return max(chosen) / min(measured) - 1
