"""Report how much shorter than a given schedule any schedule can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.possible_saving import compute_saving, describe_saving, format_percent
from schedir.schedule_search.bounds.program_bound import compute_program_bound

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

WITHIN_MEMORY = " within this memory"  # of as many bytes, or activations, as the fullest rank holds


def describe_bound(span: float, bound: float, unit: str = "", scope: str = WITHIN_MEMORY) -> str:
    """What a bound says of a schedule that takes so long; `scope` is which others it is of.

    >>> describe_bound(103.2, 100.0)
    'no schedule of these stages within this memory is shorter than 100: at most 3.1% can be gained'
    >>> describe_bound(100.0, 100.0)
    'no schedule of these stages within this memory is shorter than 100: proved shortest'
    """
    gain = compute_saving(span, bound)
    least, most = bound, f"{describe_saving(gain)} can be gained"
    if not gain:  # but for rounding they are one number, and shall look like one
        least, most = span, "proved shortest"
    return f"no schedule of these stages{scope} is shorter than {least:.6g}{unit}: {most}"


def find_lower_bound(request: Request) -> LowerBound | None:
    """Below what no schedule in the memory of a predicted run is; None of a run in a file, whose
    times no costs say, and where no bound is known."""
    if request.prediction_costs is None:
        return None
    timeline = request.timeline
    return compute_program_bound(timeline.program, request.prediction_costs, timeline.sizes)


def describe_run_bound(timeline: Timeline, bound: LowerBound | None) -> str:
    """What a bound says of a run, or nothing."""
    if bound is None:
        return ""
    whole = " with whole backwards" * (BACKWARD_INPUT not in timeline.program.used_opcodes)
    unit = timeline.unit and f" {timeline.unit}"
    return describe_bound(timeline.span, bound.value, unit, whole + WITHIN_MEMORY)


def format_possible_gain(facts: dict[str, Any]) -> str:
    """The most that another order could save of a run with these facts, for a column."""
    if facts["bound"] is None:
        return "-"
    return format_percent(compute_saving(facts["span"], facts["bound"]))
