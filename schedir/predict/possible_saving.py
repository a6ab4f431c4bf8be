"""Report the time that a schedule as short as a lower bound would save."""

from __future__ import annotations

from typing import Final

RELATIVE_TOLERANCE: Final = 1e-9  # sums of times differ by that much of themselves


def compute_saving(span: float, lower_bound: float) -> float:
    """The share of a span that is above a bound on it: 0 where rounding is all of it."""
    return 1 - lower_bound / span if span > lower_bound * (1 + RELATIVE_TOLERANCE) else 0.0


def format_percent(saving: float) -> str:
    """A gain in a column.

    >>> format_percent(0.0), format_percent(0.00001), format_percent(0.0312)
    ('none', '<0.1%', '3.1%')
    """
    if not saving:
        return "none"
    return "<0.1%" if saving < 0.0005 else f"{saving:.1%}"


def describe_saving(saving: float) -> str:
    """A gain in a sentence.

    >>> describe_saving(0.0), describe_saving(0.00001), describe_saving(0.0312)
    ('nothing', 'less than 0.1%', 'at most 3.1%')
    """
    said = format_percent(saving)
    return {"none": "nothing", "<0.1%": "less than 0.1%"}.get(said, f"at most {said}")
