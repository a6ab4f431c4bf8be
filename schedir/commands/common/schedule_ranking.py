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

    fit: list[Request] = field(default_factory=list)
    over: dict[str, str] = field(default_factory=dict)  # more than may be held: how much that is
    split: list[str] = field(default_factory=list)  # with backwards that are not whole
    same: dict[str, str] = field(default_factory=dict)  # the same program as another, by name
    refused: dict[str, SchedirError] = field(default_factory=dict)  # not for this shape, or costs


def known(*, delayed: bool) -> dict[str, Schedule]:
    """The built-in schedules by name, first those that do not take v.

    Those that delay updates are another training than all others.
    """
    from schedir.schedules import built_in
    from schedir.schedules.schedule_algebra import delay_for, takes_v

    zoo = built_in()
    plain_first = sorted(zoo, key=lambda name: takes_v(zoo[name]))
    return {n: zoo[n] for n in plain_first if (delay_for(zoo[n]) is not None) == delayed}


def on_the_plan(request: Request) -> Iterable[Candidate]:
    """The built-in schedules, asked for on the very shape and at the very costs of a request."""
    from schedir.io.source_loader import Source

    for name in known(delayed=False):
        yield name, replace(request, source=Source(name))


def ranked(
    candidates: Iterable[Candidate],
    *,
    over: Callable[[Request], str] = lambda _: "",
    length: Callable[[Timeline], float] = lambda timeline: timeline.span,
    whole: bool = False,
    said: Collection[str] = (),
) -> ScheduleRanking:
    """Each candidate simulated; one that is the same program as another is left out.

    `over` says what a run holds if it is too much.  Of sources that somebody `said` it is told
    that they are the same program as another.
    """
    found, digests = ScheduleRanking(), dict[str, str]()
    for name, request in candidates:
        try:
            timeline = request.timeline
        except UsageError:
            raise
        except MemoryLimitError as error:
            found.over[name] = format_bytes(error.needs)
            continue
        except SchedirError as error:
            found.refused[name] = error
            continue
        program = timeline.program
        if not program.trains:
            continue
        if program.digest in digests:
            if str(request.source) in said and digests[program.digest] != name:
                found.same[name] = digests[program.digest]
            continue
        digests[program.digest] = name
        if whole and BACKWARD_INPUT in program.ops:
            found.split.append(name)
        elif too_much := over(request):
            found.over[name] = too_much
        else:
            found.fit.append(request)
    # Sums of costs differ by rounding: what is as long is ranked by what it holds.
    found.fit.sort(key=lambda r: (float(f"{length(r.timeline):.9g}"), r.timeline.peak_activations))
    return found
