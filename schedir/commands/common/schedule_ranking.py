"""Simulate all built-in schedules for one model, and rank them by step time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from schedir.errors import MemoryLimitError, SchedirError, UsageError, format_bytes
from schedir.ir.isa.instructions import BACKWARD_INPUT

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedules.schedule_algebra import Schedule

Candidate = tuple[str, "Request"]


@dataclass
class ScheduleRanking:
    """What was found of all candidates: which fit, the shortest first, and why others do not."""

    fitting: list[Request] = field(default_factory=list)
    over_limit: dict[str, str] = field(
        default_factory=dict
    )  # more than may be held: how much that is
    with_split_backward: list[str] = field(
        default_factory=list
    )  # with backwards that are not whole
    duplicates: dict[str, str] = field(default_factory=dict)  # the same program as another, by name
    refusals: dict[str, SchedirError] = field(default_factory=dict)  # not for this shape, or costs


def list_built_in_schedules(*, has_weight_delay: bool) -> dict[str, Schedule]:
    """The built-in schedules by name, first those that do not take v.

    Those that delay updates are another training than all others.
    """
    from schedir.schedules import get_built_in_schedules
    from schedir.schedules.schedule_algebra import get_weight_delay_mark, has_free_v

    zoo = get_built_in_schedules()
    plain_first = sorted(zoo, key=lambda name: has_free_v(zoo[name]))
    return {
        n: zoo[n]
        for n in plain_first
        if (get_weight_delay_mark(zoo[n]) is not None) == has_weight_delay
    }


def list_built_in_requests(request: Request) -> Iterable[Candidate]:
    """The built-in schedules, asked for on the very shape and at the very costs of a request."""
    from schedir.io.source_loader import Source

    for name in list_built_in_schedules(has_weight_delay=False):
        yield name, replace(request, source=Source(name))


def rank_schedules(
    candidates: Iterable[Candidate],
    *,
    describe_excess: Callable[[Request], str] = lambda _: "",
    compute_objective: Callable[[Timeline], float] = lambda timeline: timeline.span,
    full_backward_only: bool = False,
    named_sources: Collection[str] = (),
) -> ScheduleRanking:
    """Each candidate simulated; one that is the same program as another is left out.

    `describe_excess` says what a run holds if it is too much.  Of sources that somebody
    `named_sources` it is told that they are the same program as another.
    """
    found, digests = ScheduleRanking(), dict[str, str]()
    for name, request in candidates:
        try:
            timeline = request.timeline
        except UsageError:
            raise
        except MemoryLimitError as error:
            found.over_limit[name] = format_bytes(error.required_bytes)
            continue
        except SchedirError as error:
            found.refusals[name] = error
            continue
        program = timeline.program
        if not program.has_backward:
            continue
        if program.digest in digests:
            if str(request.source) in named_sources and digests[program.digest] != name:
                found.duplicates[name] = digests[program.digest]
            continue
        digests[program.digest] = name
        if full_backward_only and BACKWARD_INPUT in program.used_opcodes:
            found.with_split_backward.append(name)
        elif too_much := describe_excess(request):
            found.over_limit[name] = too_much
        else:
            found.fitting.append(request)
    # Sums of costs differ by rounding: what is as long is ranked by what it holds.
    found.fitting.sort(
        key=lambda r: (float(f"{compute_objective(r.timeline):.9g}"), r.timeline.peak_activations)
    )
    return found
