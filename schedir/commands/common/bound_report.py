"""Report how much shorter than a given schedule any schedule can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.possible_saving import at_most, gain_of, percent
from schedir.schedule_search.bounds.program_bound import bound_of_program

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

HERE = " within this memory"  # of as many bytes, or activations, as the fullest rank holds


def in_words(span: float, bound: float, unit: str = "", of: str = HERE) -> str:
    """What a bound says of a schedule that takes so long; `of` is which others it is of.

    >>> in_words(103.2, 100.0)
    'no schedule of these stages within this memory is shorter than 100: at most 3.1% can be gained'
    >>> in_words(100.0, 100.0)
    'no schedule of these stages within this memory is shorter than 100: proved shortest'
    """
    gain = gain_of(span, bound)
    least, most = bound, f"{at_most(gain)} can be gained"
    if not gain:  # but for rounding they are one number, and shall look like one
        least, most = span, "proved shortest"
    return f"no schedule of these stages{of} is shorter than {least:.6g}{unit}: {most}"


def bound_of_request(request: Request) -> LowerBound | None:
    """Below what no schedule in the memory of a predicted run is; None of a run in a file, whose
    times no costs say, and where no bound is known."""
    if request.priced is None:
        return None
    timeline = request.timeline
    return bound_of_program(timeline.program, request.priced, timeline.sizes)


def said_of(timeline: Timeline, bound: LowerBound | None) -> str:
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
    return percent(gain_of(facts["span"], facts["bound"]))
