"""Limits of a search: seconds, evaluations and seed."""

from __future__ import annotations

from operator import index

from schedir.errors import UsageError, describe, number

_EVALUATIONS = "evaluations are a whole number above 0"


def seconds_of(given: object) -> float:
    """A time, which may be without end.  Raises UsageError for what is none."""
    seconds = number(given)
    if seconds is None or seconds <= 0:
        raise UsageError(f"seconds are a number above 0, not {describe(given)}", fields=["seconds"])
    return seconds


def evaluations_of(given: object) -> int | None:
    """How many evaluations, or None for any.  Raises UsageError for what is no such number."""
    if given is None:
        return None
    if (evaluations := whole_of(given, "evaluations", _EVALUATIONS)) < 1:
        raise UsageError(f"{_EVALUATIONS}, not {evaluations}", fields=["evaluations"])
    return evaluations


def whole_of(given: object, field: str, what: str) -> int:
    """A whole number, as numpy says it, too.  Raises UsageError, which says what is one."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return index(given)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what}, not {describe(given)}", fields=[field]) from None
