"""How much shorter any schedule can be than one that there is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedir.ir.ops import BACKWARD_INPUT
from schedir.shortest.of_program import bound_of_program
from schedir.shortest.problem import ROUNDING

if TYPE_CHECKING:
    from schedir.io.request import Request
    from schedir.predict.timeline import Timeline
    from schedir.shortest.found import Bound

HERE = " within this memory"  # of as many bytes, or activations, as the fullest rank holds


def share_to_gain(span: float, bound: float) -> float:
    """The share of a span that a schedule as short as the bound would save."""
    return 1 - bound / span if span > bound * (1 + ROUNDING) else 0.0


def percent(share: float) -> str:
    """A share, or that it is nothing.

    >>> percent(0.0), percent(0.00001), percent(0.0312)
    ('none', '<0.1%', '3.1%')
    """
    if not share:
        return "none"
    return "<0.1%" if share < 0.0005 else f"{share:.1%}"


def at_most(share: float) -> str:
    """The same, in a sentence.

    >>> at_most(0.0), at_most(0.00001), at_most(0.0312)
    ('nothing', 'less than 0.1%', 'at most 3.1%')
    """
    if not share:
        return "nothing"
    return "less than 0.1%" if share < 0.0005 else f"at most {share:.1%}"


def in_words(span: float, bound: float, unit: str = "", of: str = HERE) -> str:
    """What a bound says of a schedule that takes so long; `of` is which others it is of.

    >>> in_words(103.2, 100.0)
    'no schedule of these stages within this memory is shorter than 100: at most 3.1% can be gained'
    >>> in_words(100.0, 100.0)
    'no schedule of these stages within this memory is shorter than 100: proved shortest'
    """
    gain = share_to_gain(span, bound)
    most = f"{at_most(gain)} can be gained" if gain else "proved shortest"
    return f"no schedule of these stages{of} is shorter than {bound:.6g}{unit}: {most}"


def bound_of_request(request: Request) -> Bound | None:
    """Below what no schedule in the memory of a predicted run is; None of a run in a file, whose
    times no costs say, and where no bound is known."""
    if request.priced is None:
        return None
    timeline = request.timeline
    return bound_of_program(timeline.program, request.priced, timeline.sizes)


def said_of(timeline: Timeline, bound: Bound | None) -> str:
    """What a bound says of a run, or nothing."""
    if bound is None:
        return ""
    whole = " with whole backwards" * (BACKWARD_INPUT not in timeline.program.ops)
    unit = timeline.unit and f" {timeline.unit}"
    return in_words(timeline.span, bound.value, unit, whole + HERE)


def to_gain(facts: dict[str, Any]) -> str:
    """The most that another order could save of a run with these facts, for a column."""
    if facts["bound"] is None:
        return "-"
    return percent(share_to_gain(facts["span"], facts["bound"]))
