"""Find a built-in schedule that needs less memory than the shortest run and is as short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from schedir.commands.common.schedule_ranking import list_built_in_requests
from schedir.errors import SchedirError, format_bytes
from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.possible_saving import compute_saving
from schedir.schedule_search.bounds.lower_bound import lower_bound

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.ir.cost.costs import Costs
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import LowerBound

_MAX_INSTRUCTIONS: Final = 10_000  # Simulating the schedules for a larger program takes too long.


def describe_request_memory(request: Request, bound: LowerBound | None) -> str:
    """Return the sentence of `describe_least_memory` about the run of a request.

    The result is "" if the run is from a file, is not proved shortest, or has a large program.

    Args:
        request: The request of the run.
        bound: The bound of `find_lower_bound`.
    """
    costs = request.prediction_costs
    if bound is None or costs is None or request.schedule is None:
        return ""
    timeline = request.timeline
    if len(timeline.program) > _MAX_INSTRUCTIONS or compute_saving(timeline.span, bound.value):
        return ""
    return describe_least_memory(timeline, costs, _simulate_built_in_schedules(request))


def describe_least_memory(timeline: Timeline, costs: Costs, others: Iterable[Timeline]) -> str:
    """Return a sentence about the schedule that is as short as a run and needs the least memory.

    Args:
        timeline: A run that is proved shortest within its memory.
        costs: The costs of each stage.
        others: Runs of other schedules at these costs. The function ignores runs with another
            shape, without backwards, or with split backwards if `timeline` has none.

    Returns:
        The sentence. "" if no other run is as short with less memory.
    """
    shape, splits = timeline.program.shape, _has_split_backward(timeline)
    fitting = [
        other
        for other in others
        if other.program.shape == shape
        and other.program.has_backward
        and (splits or not _has_split_backward(other))
        and not compute_saving(other.span, timeline.span)
        and _get_memory(other) < _get_memory(timeline)
    ]
    if not fitting:
        return ""
    best = min(fitting, key=_get_memory)
    least_bytes, used_bytes = map(_get_memory, (best, timeline))
    memory = (
        f"{least_bytes:.0f} instead of {used_bytes:.0f} in flight"
        if best.sizes is None
        else f"{format_bytes(least_bytes)} instead of {format_bytes(used_bytes)}"
    )
    is_least = best.sizes is None and _is_least(best, costs, split_backward=splits)
    text = f"the built-in {best.program.name} is as short with {memory}"
    return text + ", the least for this span" * is_least


def _simulate_built_in_schedules(request: Request) -> Iterator[Timeline]:
    for _, candidate in list_built_in_requests(request):
        with suppress(SchedirError):  # The schedule does not support the shape or an option.
            if candidate.shape == request.shape:
                yield candidate.timeline


def _has_split_backward(timeline: Timeline) -> bool:
    return BACKWARD_INPUT in timeline.program.used_opcodes


def _get_memory(timeline: Timeline) -> float:
    """Return the largest memory of a rank in bytes. Without sizes, return the pairs in flight."""
    memory = timeline.peak_in_flight if timeline.sizes is None else timeline.peak_memory
    return float(memory.max(initial=0))


def _is_least(timeline: Timeline, costs: Costs, *, split_backward: bool) -> bool:
    """Return whether a lower bound proves that schedules with less memory are longer."""
    fewer = int(_get_memory(timeline)) - 1
    if fewer < 1:
        return True
    with suppress(SchedirError):  # No bound is known for these costs.
        bound = lower_bound(
            timeline.program.shape, costs, max_in_flight=fewer, split_backward=split_backward
        )
        return compute_saving(bound.value, timeline.span) > 0
    return False
