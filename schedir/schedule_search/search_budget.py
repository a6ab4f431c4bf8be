"""Limits of a search: seconds, evaluations and seed."""

from __future__ import annotations

from operator import index

from schedir.errors import UsageError, describe, to_float

_EVALUATIONS_RULE = "evaluations are a whole number above 0"


def require_seconds(value: object) -> float:
    """A time, which may be without end.  Raises UsageError for what is none."""
    seconds = to_float(value)
    if seconds is None or seconds <= 0:
        raise UsageError(f"seconds are a number above 0, not {describe(value)}", fields=["seconds"])
    return seconds


def require_evaluations(value: object) -> int | None:
    """How many evaluations, or None for any.  Raises UsageError for what is no such number."""
    if value is None:
        return None
    if (evaluations := require_integer(value, "evaluations", _EVALUATIONS_RULE)) < 1:
        raise UsageError(f"{_EVALUATIONS_RULE}, not {evaluations}", fields=["evaluations"])
    return evaluations


def require_integer(value: object, field: str, rule: str) -> int:
    """A whole number, as numpy says it, too.  Raises UsageError, which says what is one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{rule}, not {describe(value)}", fields=[field]) from None
