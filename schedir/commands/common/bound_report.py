"""Describe lower bounds on the span of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.possible_saving import compute_saving, describe_saving, format_percent
from schedir.schedule_search.bounds.program_bound import compute_program_bound

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

# "This memory" is the largest memory that any rank of the run uses. Without sizes, it is the number
# of (stage, microbatch) pairs in flight.
WITHIN_MEMORY = " within this memory"


def describe_bound(span: float, bound: float, unit: str = "", scope: str = WITHIN_MEMORY) -> str:
    """Return a sentence with the lower bound on a span and the possible saving.

    Args:
        span: The span of the schedule.
        bound: The lower bound, in the unit of `span`.
        unit: The unit, with a leading space, such as " s".
        scope: Words for the schedules to which the bound applies, with a leading space, such as
            " within this memory".

    Example:
        >>> describe_bound(103.2, 100.0, scope="")
        'no schedule of these stages is shorter than 100: at most 3.1% can be gained'
        >>> describe_bound(100.0, 100.0)
        'no schedule of these stages within this memory is shorter than 100: proved shortest'
    """
    gain = compute_saving(span, bound)
    bound_value, conclusion = bound, f"{describe_saving(gain)} can be gained"
    if not gain:  # Span and bound differ only by rounding, so print the same number for both.
        bound_value, conclusion = span, "proved shortest"
    return (
        f"no schedule of these stages{scope} is shorter than {bound_value:.6g}{unit}: {conclusion}"
    )


def find_lower_bound(request: Request) -> LowerBound | None:
    """Return the lower bound on the span of a predicted run.

    Args:
        request: The request of the run.

    Returns:
        The bound on all schedules that use no more memory than the run. None if the run is from a
        file and the user gave no costs, or if no bound is known.
    """
    if request.prediction_costs is None:
        return None
    timeline = request.timeline
    return compute_program_bound(
        timeline.program,
        request.prediction_costs,
        timeline.sizes,
        footprints=timeline.footprints,
    )


def describe_run_bound(timeline: Timeline, bound: LowerBound | None) -> str:
    """Return a sentence with the lower bound on the span of a run.

    Args:
        timeline: The run.
        bound: The bound of `find_lower_bound`.

    Returns:
        The sentence, or "" if there is no bound.
    """
    if bound is None:
        return ""
    full_backward = " with full backwards" * (BACKWARD_INPUT not in timeline.program.used_opcodes)
    unit = timeline.unit and f" {timeline.unit}"
    return describe_bound(timeline.span, bound.value, unit, full_backward + WITHIN_MEMORY)


def format_possible_gain(facts: dict[str, Any]) -> str:
    """Return the largest share of the span that another schedule could save, for a table.

    Args:
        facts: The facts of `collect_timeline_facts`.

    Returns:
        A percentage, or "-" if there is no bound.
    """
    if facts["bound"] is None:
        return "-"
    return format_percent(compute_saving(facts["span"], facts["bound"]))
