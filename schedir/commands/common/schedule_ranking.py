"""Simulate built-in schedules for one model, and rank them by step time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from schedir.commands.common.timeline_facts import suggest_page
from schedir.errors import MemoryLimitError, SchedirError, UsageError, format_bytes
from schedir.io.option_spelling import option_words
from schedir.ir.isa.instructions import BACKWARD_INPUT
from schedir.predict.calibrate import (
    MAX_PREDICTION_ERROR,
    calibrate,
    compute_prediction_error,
    fill_missing_backwards,
    simulate_at_mean_times,
)

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.schedules.schedule_algebra import Schedule

Candidate = tuple[str, "Request"]
# Options that save memory, in the order in which they are tried. Shared buffers come first, because
# they add no compute.
_REMEDIES: Final[tuple[dict[str, Any], ...]] = (
    {"buffer_sharing": "minimal"},
    {"recompute": "fit"},
    {"buffer_sharing": "minimal", "recompute": "fit"},
)
_REMEDY_MEANINGS: Final = {
    "buffer_sharing": "values share buffers",
    "recompute": "activations are computed again",
}

_MAX_INSTRUCTIONS: Final = 20_000  # For larger programs, trying the remedies takes too long.


class Excess(NamedTuple):
    """The memory that a candidate needs, if this memory exceeds a limit.

    Attributes:
        request: The request of the candidate.
        amount: The needed bytes, or the needed number of activations.
        text: The amount with its unit.
    """

    request: Request
    amount: float
    text: str


@dataclass
class ScheduleRanking:
    """The results of all candidates.

    Args:
        fitting: The requests of the candidates that fit, the shortest first.
        over_limit: Name -> memory, for each candidate that is over the limit.
        with_split_backward: The names of candidates that were left out because they split
            backwards.
        duplicates: Name -> name of an earlier candidate with the same program.
        refusals: Name -> error, for each candidate whose shape or costs raised an error.
    """

    fitting: list[Request] = field(default_factory=list)
    over_limit: dict[str, Excess] = field(default_factory=dict)
    with_split_backward: list[str] = field(default_factory=list)
    duplicates: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, SchedirError] = field(default_factory=dict)


def label_requests(requests: Sequence[Request]) -> list[str]:
    """Return a label for each request: the name of its program, or its source.

    The source is the label if programs of several sources have the same name. A run and a
    prediction may have the same label, because tables also show the kind of each row.

    Args:
        requests: The requests.
    """
    names = [(request.timeline.program.name, request.timeline.kind) for request in requests]
    sources = {name: set[str]() for name in names}
    for name, request in zip(names, requests, strict=True):
        sources[name].add(request.source)
    return [
        name[0] if len(sources[name]) == 1 else str(request.source)
        for name, request in zip(names, requests, strict=True)
    ]


def list_built_in_schedules(*, has_weight_delay: bool) -> dict[str, Schedule]:
    """Return name -> built-in schedule that trains. Schedules without a parameter `v` come first.

    Args:
        has_weight_delay: If True, return only the schedules with weight delay. If False, return
            only the schedules without weight delay. Weight delay changes the trained weights, so
            schedules with and without it are not compared.
    """
    from schedir.schedules import get_built_in_schedules
    from schedir.schedules.schedule_algebra import get_weight_delay_mark, has_free_v

    schedules = get_built_in_schedules()
    plain_first = sorted(schedules, key=lambda name: has_free_v(schedules[name]))
    return {
        n: schedules[n]
        for n in plain_first
        if n != "forward_only"
        and (get_weight_delay_mark(schedules[n]) is not None) == has_weight_delay
    }


def list_built_in_requests(request: Request) -> Iterable[Candidate]:
    """Yield each built-in schedule without weight delay, with the shape and costs of a request.

    Args:
        request: The request.
    """
    from schedir.io.source_loader import Source

    for name in list_built_in_schedules(has_weight_delay=False):
        yield name, replace(request, source=Source(name))


def use_times_of_run(requests: Sequence[Request]) -> tuple[list[Request], str]:
    """Apply the shape, times, unit and progress model of a run to the schedules of a comparison.

    The times are the means of the run. If hosts blocked in the run, they also block in the
    schedules. Options of the command have precedence. Without a run, nothing changes.

    Args:
        requests: The requests of all sources: schedules, programs and perhaps a run.

    Returns:
        The requests, and a line with a warning if a simulation of the run at its mean times takes
        much more or less time than the run. Otherwise the line is "". The line is also "" if all
        sources are runs, which need no prediction.
    """
    source, run = next(
        ((r.source, r.source_timeline) for r in requests if r.source_timeline), ("", None)
    )
    if run is None:
        return [*requests], ""
    shape, costs, warning = run.program.unsegmented_shape, requests[0].costs, ""
    if costs is None:
        costs = fill_missing_backwards(calibrate(run), run.program)
        if any(request.source_timeline is None for request in requests):
            warning = _describe_prediction_error(source, run, simulate_at_mean_times(run, costs))
    defaults = {"ranks": shape.ranks, "microbatches": shape.microbatches}
    used = [
        request
        if request.source_timeline or request.cluster
        else replace(
            request,
            defaults=defaults,
            costs=costs,
            unit=run.unit,
            progress_model=request.progress_model or run.progress_model,
            blocking_hosts=run.blocking_hosts,
        )
        for request in requests
    ]
    return used, warning


def _describe_prediction_error(source: str, run: Timeline, simulated: Timeline) -> str:
    """Return a warning line if a simulation does not reproduce a run, else ""."""
    error = compute_prediction_error(simulated, run)
    if abs(error) <= MAX_PREDICTION_ERROR:
        return ""
    unit = run.unit and f" {run.unit}"
    return (
        f"a simulation of {source} at its mean times takes {simulated.span:.6g}{unit}, "
        f"{abs(error):.1%} {'more' if error > 0 else 'less'} than the run: compare predictions "
        f"with this time; {suggest_page(source)}\n"
    )


def rank_schedules(
    candidates: Iterable[Candidate],
    *,
    find_excess: Callable[[Request], Excess | None] = lambda _: None,
    compute_objective: Callable[[Timeline], float] = lambda timeline: timeline.span,
    full_backward_only: bool = False,
    named_sources: Collection[str] = (),
) -> ScheduleRanking:
    """Simulate candidates, and rank those that fit by their time.

    The ranking leaves out a candidate with the same program as an earlier candidate, and a
    candidate without backwards.

    Args:
        candidates: The name of each candidate, and its `Request`.
        find_excess: A function that returns the memory that a run needs, or None if the run fits.
        compute_objective: A function that returns the time by which runs are ranked. The default is
            the span.
        full_backward_only: If True, leave out candidates that split backwards.
        named_sources: The sources that the user gave. The result lists a duplicate only if its
            source is one of these sources.

    Raises:
        UsageError: A request is invalid. Other errors are listed in the result.
    """
    ranking, digests = ScheduleRanking(), dict[str, str]()
    for name, request in candidates:
        try:
            timeline = request.timeline
        except UsageError:
            raise
        except MemoryLimitError as error:
            needed = error.required_bytes
            ranking.over_limit[name] = Excess(request, needed, format_bytes(needed))
            continue
        except SchedirError as error:
            ranking.refusals[name] = error
            continue
        program = timeline.program
        if not program.has_backward:
            continue
        if program.digest in digests:
            if str(request.source) in named_sources and digests[program.digest] != name:
                ranking.duplicates[name] = digests[program.digest]
            continue
        digests[program.digest] = name
        if full_backward_only and BACKWARD_INPUT in program.used_opcodes:
            ranking.with_split_backward.append(name)
        elif (excess := find_excess(request)) is not None:
            ranking.over_limit[name] = excess
        else:
            ranking.fitting.append(request)
    # If spans differ only by rounding, the run with less memory comes first.
    ranking.fitting.sort(
        key=lambda r: (float(f"{compute_objective(r.timeline):.9g}"), r.timeline.peak_activations)
    )
    return ranking


def describe_excesses(over_limit: Mapping[str, Excess], limit: str) -> list[str]:
    """Return lines with the candidates that are over a limit.

    For each set of options, a line lists the candidates that fit with these options. The options
    that add no compute come first.

    Args:
        over_limit: Name of a candidate -> the memory that it needs.
        limit: The limit with its unit.

    Returns:
        The lines. In a line with options, the candidate with the shortest step comes first. In the
        line without options, the candidate with the smallest memory comes first.
    """
    too_large = list[str]()
    fitting: dict[tuple[int, str], list[tuple[float, str]]] = {}
    for name, excess in sorted(over_limit.items(), key=lambda item: item[1].amount):
        remedied = _find_remedy(excess.request)
        if remedied is None:
            too_large.append(f"{name} ({excess.text})")
            continue
        number, options, timeline = remedied
        memory = format_bytes(float(timeline.peak_memory.max()))
        span = f"{timeline.span:.6g} {timeline.unit}".strip()
        text = f"{name} (span {span}, {memory})"
        fitting.setdefault((number, options), []).append((timeline.span, text))
    lines = [
        f"over the limit of {limit}, but fits with {options}: "
        + ", ".join(text for _, text in sorted(named))
        for (_, options), named in sorted(fitting.items())
    ]
    return lines + [f"over the limit of {limit}: {', '.join(too_large)}"] * bool(too_large)


def _find_remedy(request: Request) -> tuple[int, str, Timeline] | None:
    """Return the first options with which a program fits into its memory limit, or None.

    The first value is the index of the options in `_REMEDIES`. The second value is a text of the
    options and their meanings. The third value is the predicted run with these options.
    """
    if request.memory_limit is None or request.schedule is None:
        return None

    if len(replace(request, memory_limit=None, compile_options={}).program) > _MAX_INSTRUCTIONS:
        return None
    given_options = {name for name in ("buffer_sharing",) if request.buffer_sharing is not None}
    given_options |= request.compile_options.keys()
    for number, remedy in enumerate(_REMEDIES):
        options = {name: value for name, value in remedy.items() if name not in given_options}
        with suppress(SchedirError):
            timeline = _add_options(request, options).timeline
            words = " ".join(" ".join(option_words(*option)) for option in options.items())
            meanings = ", ".join(_REMEDY_MEANINGS[option] for option in options)
            return number, f"{words} ({meanings})", timeline
    return None


def _add_options(request: Request, options: Mapping[str, Any]) -> Request:
    options = dict(options)
    sharing = options.pop("buffer_sharing", request.buffer_sharing)
    return replace(
        request, buffer_sharing=sharing, compile_options={**request.compile_options, **options}
    )
