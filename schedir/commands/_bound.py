"""How much shorter any schedule can be than one that there is, in words."""

from __future__ import annotations

from math import ceil

from schedir.shortest.problem import ROUNDING

HERE = " within this memory"


def share_to_gain(span: float, bound: float) -> float:
    """The share of a span that a schedule as short as the bound would save."""
    return 1 - bound / span if span > bound * (1 + ROUNDING) else 0.0


def percent(share: float) -> str:
    """A share that is a most: never rounded down, and 0.0% is nothing at all.

    >>> percent(0.0), percent(0.00001), percent(0.0312)
    ('0.0%', '0.1%', '3.2%')
    """
    return f"{ceil(share * 1000 - 1e-6) / 10:.1f}%"


def in_words(span: float, bound: float, unit: str = "", of: str = HERE) -> str:
    """What a bound says of a schedule that takes so long; `of` is which others it is of.

    >>> in_words(103.2, 100.0)
    'no schedule within this memory is shorter than 100: at most 3.2% can be gained'
    >>> in_words(100.0, 100.0)
    'no schedule within this memory is shorter than 100: proved shortest'
    """
    gain = share_to_gain(span, bound)
    most = f"at most {percent(gain)} can be gained" if gain else "proved shortest"
    return f"no schedule{of} is shorter than {bound:.6g}{unit}: {most}"
