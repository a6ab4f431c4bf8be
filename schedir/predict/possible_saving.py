"""Report the time that a schedule as short as a lower bound would save."""

from __future__ import annotations

from typing import Final

ROUNDING: Final = 1e-9  # sums of times differ by that much of themselves


def gain_of(span: float, bound: float) -> float:
    """The share of a span that is above a bound on it: 0 where rounding is all of it."""
    return 1 - bound / span if span > bound * (1 + ROUNDING) else 0.0


def percent(gain: float) -> str:
    """A gain in a column.

    >>> percent(0.0), percent(0.00001), percent(0.0312)
    ('none', '<0.1%', '3.1%')
    """
    if not gain:
        return "none"
    return "<0.1%" if gain < 0.0005 else f"{gain:.1%}"


def at_most(gain: float) -> str:
    """A gain in a sentence.

    >>> at_most(0.0), at_most(0.00001), at_most(0.0312)
    ('nothing', 'less than 0.1%', 'at most 3.1%')
    """
    said = percent(gain)
    return {"none": "nothing", "<0.1%": "less than 0.1%"}.get(said, f"at most {said}")
