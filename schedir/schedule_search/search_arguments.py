"""Defaults and checks of the arguments of a search: time limit, evaluations and seed."""

from __future__ import annotations

from operator import index
from typing import Final

from schedir.errors import UsageError, describe, to_float

DEFAULT_TIME_LIMIT: Final = 10.0  # seconds
_EVALUATIONS_RULE = "max_evaluations must be an integer, 1 or more"


def require_seconds(value: object) -> float:
    """Return a time in seconds as a float, which may be infinite.

    Args:
        value: The argument to check.

    Raises:
        UsageError: `value` is not a positive number.
    """
    seconds = to_float(value)
    if seconds is None or seconds <= 0:
        raise UsageError(
            f"time_limit must be a number of seconds above 0, not {describe(value)}",
            fields=["time_limit"],
        )
    return seconds


def require_evaluations(value: object) -> int | None:
    """Return a number of evaluations, or None for no limit.

    Args:
        value: The argument to check.

    Raises:
        UsageError: `value` is neither None nor a positive integer.
    """
    if value is None:
        return None
    if (evaluations := require_integer(value, "max_evaluations", _EVALUATIONS_RULE)) < 1:
        raise UsageError(f"{_EVALUATIONS_RULE}, not {evaluations}", fields=["max_evaluations"])
    return evaluations


def require_integer(value: object, field: str, rule: str) -> int:
    """Return `value` as an integer. NumPy integers are allowed.

    Args:
        value: The argument to check.
        field: The name of the argument, for the error.
        rule: The first clause of the error message, with the allowed values.

    Raises:
        UsageError: `value` is not an integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{rule}, not {describe(value)}", fields=[field]) from None
