"""Compute and format the time that a schedule as short as a lower bound would save."""

from __future__ import annotations

from typing import Final

RELATIVE_TOLERANCE: Final = 1e-9  # Share of a span. Smaller differences come from rounding.


def compute_saving(span: float, lower_bound: float) -> float:
    """Return the part of a span above a lower bound, as a share of the span.

    Args:
        span: The time of a schedule.
        lower_bound: A lower bound of this time, in the same unit.

    Returns:
        A share from 0 to 1. The share is 0 if the difference comes from rounding.
    """
    return 1 - lower_bound / span if span > lower_bound * (1 + RELATIVE_TOLERANCE) else 0.0


def format_percent(saving: float) -> str:
    """Format a saving as a percentage for a table.

    Args:
        saving: The saving, as a share from 0 to 1.

    Example:
        >>> format_percent(0.0), format_percent(0.00001), format_percent(0.0312)
        ('none', '<0.1%', '3.1%')
    """
    if not saving:
        return "none"
    return "<0.1%" if saving < 0.0005 else f"{saving:.1%}"


def describe_saving(saving: float) -> str:
    """Format a saving in words for a sentence.

    Args:
        saving: The saving, as a share from 0 to 1.

    Example:
        >>> describe_saving(0.0), describe_saving(0.00001), describe_saving(0.0312)
        ('nothing', 'less than 0.1%', 'at most 3.1%')
    """
    text = format_percent(saving)
    return {"none": "nothing", "<0.1%": "less than 0.1%"}.get(text, f"at most {text}")
