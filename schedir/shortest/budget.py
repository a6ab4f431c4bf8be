"""How long a search may go on."""

from __future__ import annotations

from schedir.errors import UsageError, said


def require_budget(seconds: float, evaluations: int | None) -> None:
    """Raise UsageError for a time, or a number of evaluations, that is none."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"seconds are a number above 0, not {said(seconds)}", fields=["seconds"])
    if evaluations is not None and (type(evaluations) is not int or evaluations < 1):
        raise UsageError(
            f"evaluations are a whole number above 0, not {said(evaluations)}",
            fields=["evaluations"],
        )
