"""The command `search`: find the shortest schedule within a memory limit, and a lower bound."""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from schedir.commands.common.bound_report import describe_bound
from schedir.commands.common.least_memory import describe_least_memory
from schedir.commands.common.progress_bar import show_progress
from schedir.commands.common.schedule_options import (
    DEFAULT_RANKS,
    MICROBATCHES_PER_RANK,
    add_search_options,
    format_shape_options,
    parse_count,
    parse_seconds,
    require_size_units,
)
from schedir.commands.common.schedule_ranking import (
    Excess,
    ScheduleRanking,
    list_built_in_requests,
    rank_schedules,
)
from schedir.commands.common.timeline_facts import collect_timeline_facts
from schedir.errors import UsageError, format_bytes
from schedir.io.files import atomic_write, require_suffix
from schedir.io.terminal_output import format_json
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.program import ATTRIBUTE_FIELDS
from schedir.ir.text_format import to_text
from schedir.predict.possible_saving import compute_saving, describe_saving
from schedir.predict.simulate import simulate
from schedir.retired_names import get_current_value
from schedir.schedule_search.problem import is_full_backward_cheaper
from schedir.schedule_search.search_arguments import DEFAULT_TIME_LIMIT
from schedir.schedule_search.search_results import describe_numba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedir.io.program_request import Request
    from schedir.ir.program import Program
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import SearchResult, SearchStep
    from schedir.schedules.schedule_algebra import Schedule

INTERRUPTED_EXIT_CODE = 130
_STOP_REASONS = {
    "proved": "the schedule is proved shortest",
    "limit": "the search reached its limit",
    "no better": "no change shortens the schedule",
    "interrupted": "interrupted, this is the best schedule so far",
}
MAX_COMPARED_SCHEDULES = 3  # The command prints this number of the shortest built-in schedules.

EXAMPLES = """\
  schedir search --ranks 4 --microbatches 8 --costs F=2,I=2,W=1 --max-in-flight 4 -o found.sched
  schedir search --frontier -o frontier.svg

The page docs/how-to/search-for-a-schedule.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `search`.

    Args:
        parser: The parser of the command.
    """
    parser.description = (
        "Search for the shortest schedule within a memory limit, and prove a lower bound for all "
        "schedules. --costs and --sizes are per stage, as in `schedir simulate`."
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE.sched",
        help="write the program to this file, with comments that describe the search",
    )  # fmt: skip
    parser.add_argument(
        "--frontier", action="store_true",
        help="find the shortest schedule at several memory limits, and print a table; -o FILE.svg "
        "draws the table",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    goal_group = add_search_options(
        parser,
        costs_help="costs of a stage, as in simulate: F=1,I=1,W=1,send=0.1; ':' separates stages "
        "(F=1:1:2); @FILE reads them from a file",
    )
    goal_group.add_argument(
        "--costs-from", metavar="FILE.timeline",
        help="instead of --costs, use the mean times of this run as costs; also use its numbers of "
        "ranks, stages and microbatches, unless an option sets them",
    )  # fmt: skip
    goal_group.add_argument(
        "--max-in-flight", type=_parse_counts, metavar="N",
        help="limit the (stage, microbatch) pairs in flight on a rank instead of its memory. A "
        "pair is in flight from its F to its W or B. Give one number, or one per rank: 8:8:7",
    )  # fmt: skip
    search_group = parser.add_argument_group("the search")
    search_group.add_argument("--objective", default="span", metavar="WHAT", type=_parse_objective,
                     help="the time to minimize: span (default), from the first start to the last "
                     "end; or active_span, the longest time from the first to the last compute of "
                     "a rank")  # fmt: skip
    search_group.add_argument(
        "--no-split-backward", action="store_true",
        help="search only schedules that do not split backwards into I and W",
    )  # fmt: skip
    search_group.add_argument(
        "--time-limit", type=parse_seconds, default=DEFAULT_TIME_LIMIT, metavar="S",
        help=f"the longest time of the search, in seconds ({DEFAULT_TIME_LIMIT:g})",
    )  # fmt: skip
    search_group.add_argument("--max-evaluations", type=parse_count, metavar="N",
                     help="the most schedules to evaluate after the initial schedules; if the "
                     "search reaches this number before the time limit, its result is the same on "
                     "any machine")  # fmt: skip
    search_group.add_argument(
        "--seed", type=parse_count, default=0, metavar="N", help="the seed of the search (0)"
    )
    search_group.add_argument("--initial-schedules", nargs="+", default=[], metavar="SCHEDULE",
                     help="more schedules to begin the search with: names, FILE.sched or "
                     "FILE.timeline")  # fmt: skip
    search_group.add_argument("--bound", default="closed", metavar="HOW",
                     help="how to prove the lower bound: closed (default), with formulas; or "
                     "solver, with a constraint solver for small problems, which needs "
                     "schedir[solver]")  # fmt: skip


def _parse_counts(text: str) -> int | tuple[int, ...]:
    if re.fullmatch(r"[\d.]+[kMGTP]?i?B", text):
        raise UsageError(
            f"argument --max-in-flight: {text!r} is not an integer",
            hint=f"--memory-limit {text} limits the bytes of a rank; it needs --sizes",
        )
    if re.fullmatch(r"\d+(,\d+)+", text):
        raise UsageError(
            f"argument --max-in-flight: {text!r} is not an integer",
            hint=f"--max-in-flight {text.replace(',', ':')} has one number per rank",
        )
    return tuple(map(parse_count, text.split(":"))) if ":" in text else parse_count(text)


def _parse_objective(text: str) -> str:
    return get_current_value("objective", text)


# ---------------------------------------------------------------- the request


@dataclass(frozen=True)
class _SearchRequest:
    """The problem of a schedule search.

    Args:
        shape: The shape of the pipeline.
        request: A request with this shape, the costs, the sizes and the memory limit, but no
            source.
        max_in_flight: The largest number of (stage, microbatch) pairs in flight on a rank, or one
            number per rank. None for no limit.
        full_backward_only: True if the search must not split backwards.
        minimizes_active_span: If True, minimize the longest active span of a rank. If False,
            minimize the span.
        costs_timeline: The run whose mean times are the costs, or None.
        notes: Lines about the costs, for the output.
    """

    shape: PipelineShape
    request: Request
    max_in_flight: int | tuple[int, ...] | None
    full_backward_only: bool
    minimizes_active_span: bool
    costs_timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)

    def find_excess(self, request: Request) -> Excess | None:
        """Return the largest numbers of pairs in flight if a rank exceeds its limit, else None.

        The text has one number, or one per rank if each rank has its own limit.
        """
        peaks = request.timeline.peak_in_flight
        if self.max_in_flight is None or not (peaks > self.max_in_flight).any():
            return None
        highest = int(peaks.max())
        numbers = peaks if isinstance(self.max_in_flight, tuple) else [highest]
        return Excess(request, highest, f"{':'.join(map(str, numbers))} in flight")

    @property
    def objective_text(self) -> str:
        """The name of the time that the search minimizes."""
        return "longest active span" if self.minimizes_active_span else "span"

    @property
    def memory_limit_text(self) -> str:
        """The memory limit of a rank as text, or "none"."""
        if self.request.memory_limit is not None:
            return format_bytes(self.request.memory_limit)
        if self.max_in_flight is None:
            return "none"
        return f"{':'.join(map(str, np.atleast_1d(self.max_in_flight)))} in flight"

    def describe_result_bound(self, result: SearchResult) -> str:
        """Return a sentence with the lower bound and the possible saving of a result."""
        limit_text = " within this memory" * (self.memory_limit_text != "none")
        unit = result.timeline.unit and f" {result.timeline.unit}"
        kind = " with full backwards" * self.full_backward_only
        if not self.full_backward_only and is_full_backward_cheaper(
            self.request.costs or Costs(), self.shape
        ):
            kind = " with split backwards"
        return describe_bound(result.span, result.bound, unit, kind + limit_text)

    def compute_objective(self, timeline: Timeline) -> float:
        """Return the span or the longest active span of a run, whichever the search minimizes."""
        return float(timeline.active_span.max()) if self.minimizes_active_span else timeline.span


def _parse_search_request(args: argparse.Namespace) -> _SearchRequest:
    from schedir.io.program_request import Request
    from schedir.io.source_loader import Source

    specified = {
        f.name: value for f in SHAPE_FIELDS if (value := getattr(args, f.name)) is not None
    }
    ranks = specified.get("ranks", DEFAULT_RANKS)
    defaults: dict[str, Any] = {"ranks": ranks, "microbatches": MICROBATCHES_PER_RANK * ranks}
    costs, run, notes = args.costs, None, list[str]()
    if args.costs_from is not None:
        if costs is not None:
            raise UsageError("--costs cannot be combined with --costs-from")
        run, costs, notes = _load_costs(args.costs_from, full_backward_only=args.no_split_backward)
        defaults = {f.name: getattr(run.program.shape, f.name) for f in SHAPE_FIELDS}
    shape = PipelineShape(**(defaults | specified)).resolve_defaults()
    if isinstance(args.max_in_flight, tuple) and len(args.max_in_flight) != shape.ranks:
        raise UsageError(
            f"--max-in-flight has {len(args.max_in_flight)} numbers for {shape.ranks} ranks: give "
            "one number, or one per rank",
            fields=["max_in_flight"],
        )
    options = {f.name: getattr(shape, f.name) for f in SHAPE_FIELDS}
    require_size_units(args.sizes, args.memory_limit)
    sizes = args.sizes or (None if run is None else run.sizes)
    request = Request(
        Source(""), options, options, costs=costs, sizes=sizes, memory_limit=args.memory_limit
    )
    if run is not None:
        request = replace(
            request,
            progress_model=run.progress_model,
            blocking_hosts=run.blocking_hosts,
            unit=run.unit,
        )
    return _SearchRequest(
        shape,
        request,
        args.max_in_flight,
        args.no_split_backward,
        args.objective == "active_span",
        run,
        notes,
    )


def _load_costs(source: str, *, full_backward_only: bool) -> tuple[Timeline, Costs, list[str]]:
    """Return a run from a file, its mean times as costs, and notes about these costs."""
    from schedir.io.timeline_file import TIMELINE_SUFFIX, load_timeline
    from schedir.ir.isa.instructions import BACKWARD_INPUT
    from schedir.predict.calibrate import (
        MIN_REPORTED_SHARE,
        calibrate,
        compute_prediction_error,
        compute_unexplained_share,
        fill_missing_backwards,
        simulate_at_mean_times,
    )
    from schedir.schedule_search.heuristics.initial_orders import describe_unsearchable

    if not source.endswith(TIMELINE_SUFFIX):
        raise UsageError(
            f"{source!r} is not a run: the name of a run must end in {TIMELINE_SUFFIX}"
        )
    run = load_timeline(source)
    program, unit = run.program, run.unit and f" {run.unit}"
    if reason := describe_unsearchable(program):
        raise UsageError(f"{source} {reason}")
    costs = fill_missing_backwards(calibrate(run), program)
    prediction = simulate_at_mean_times(run, costs)
    relative_error = compute_prediction_error(prediction, run)
    note = (
        f"costs: mean times of {source}, which has {int(run.peak_in_flight.max())} in flight; its "
        f"simulation at these costs takes {prediction.span:.6g}{unit} under {run.progress_model}, "
        f"{abs(relative_error):.1%} {'more' if relative_error > 0 else 'less'} than the run"
    )
    if (unexplained := compute_unexplained_share(prediction, run)) >= MIN_REPORTED_SHARE:
        note += f"; {unexplained:.1%} of the ranks' time is unexplained and counts as work"
    if BACKWARD_INPUT not in program.used_opcodes and not full_backward_only:
        note += "; it has full backwards, so I and W cost half of one each"
    notes = [note, *filter(None, [run.causality_warning])]
    if words := " ".join(format_shape_options(program, listed_fields=ATTRIBUTE_FIELDS)):
        notes.append(
            f"the search ignores {words} of that run; schedir print FILE --relower {words} adds it"
        )
    return run, costs, notes


# ---------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> str | tuple[str, int]:
    """Search for a schedule, and return its length, its lower bound and a comparison.

    Args:
        args: The parsed options of `search`.

    Returns:
        The text or JSON. If the search was interrupted, a tuple of the text and exit code 130.

    Raises:
        UsageError: Options are invalid or cannot be combined.
    """
    if args.frontier:
        return _search_frontier(args)
    if args.output is not None:
        require_suffix(args.output, "the file of a program", ".sched")
    problem = _parse_search_request(args)
    # Opening fails before the search if the file cannot be written.
    with nullcontext() if args.output is None else atomic_write(args.output) as path:
        start = perf_counter()
        result = _search(args, problem)
        elapsed = perf_counter() - start
        if path is not None:
            path.write_text(
                _format_comments(args, problem, result) + to_text(result.program), encoding="utf-8"
            )
    ranking = _rank_built_in_schedules(problem)
    text = (
        _format_json(problem, result, ranking)
        if args.json
        else _format_text(args, problem, result, ranking, elapsed)
    )
    return (text, INTERRUPTED_EXIT_CODE) if result.stop_reason == "interrupted" else text


def _search_frontier(args: argparse.Namespace) -> str | tuple[str, int]:
    from schedir.commands.common.frontier_report import (
        report_frontier,
        require_frontier_options,
    )

    require_frontier_options(args)
    problem = _parse_search_request(args)
    initial_schedules = _load_initial_schedules(args.initial_schedules, problem)
    text, complete = report_frontier(args, problem.shape, problem.request, initial_schedules)
    return text if complete else (text, INTERRUPTED_EXIT_CODE)


def _search(args: argparse.Namespace, search_request: _SearchRequest) -> SearchResult:
    from schedir.schedule_search.search import search_schedule

    request, limit = search_request.request, search_request.max_in_flight

    def report(step: SearchStep, bound: float) -> None:
        gain = compute_saving(step.span, bound)
        show_progress(
            f"span {step.span:.6g}, found after {step.seconds:.1f} s ({step.method}); lower bound "
            f"{bound:.6g}: {describe_saving(gain)} to gain"
        )

    result = search_schedule(
        search_request.shape, request.costs, request.sizes, request.memory_limit,
        max_in_flight=limit.__getitem__ if isinstance(limit, tuple) else limit,
        objective=args.objective,
        split_backward=not search_request.full_backward_only,
        time_limit=args.time_limit,
        max_evaluations=args.max_evaluations,
        seed=args.seed,
        initial_schedules=_load_initial_schedules(args.initial_schedules, search_request),
        bound=args.bound,
        report=report,
    )  # fmt: skip
    return replace(result, timeline=replace(result.timeline, unit=request.unit))


def _load_initial_schedules(
    sources: Sequence[str], search_request: _SearchRequest
) -> list[Schedule | Program]:
    """Return the programs from which the search starts, in addition to built-in schedules."""
    from schedir.io.source_loader import Source

    programs: list[Schedule | Program] = []
    for source in sources:
        request = replace(search_request.request, source=Source(source), memory_limit=None)
        programs.append(request.program)
    costs_timeline = search_request.costs_timeline
    if costs_timeline is not None and costs_timeline.program.shape == search_request.shape:
        programs.append(costs_timeline.program)
    return programs


def _rank_built_in_schedules(search_request: _SearchRequest) -> ScheduleRanking:
    """Return the ranking of the built-in schedules at the costs of the search.

    If the costs are from a run with the shape of the search, the program of the run is ranked, too.
    """
    from schedir.io.source_loader import Source

    candidates = [*list_built_in_requests(search_request.request)]
    costs_timeline = search_request.costs_timeline
    if costs_timeline is not None and costs_timeline.program.shape == search_request.shape:
        name = costs_timeline.program.name
        source = Source.from_loaded(costs_timeline.program, name)
        candidates.append((name, replace(search_request.request, source=source)))
    return rank_schedules(
        candidates,
        find_excess=search_request.find_excess,
        compute_objective=search_request.compute_objective,
        full_backward_only=search_request.full_backward_only,
    )


# ---------------------------------------------------------------- the output


def _format_text(
    args: argparse.Namespace,
    search_request: _SearchRequest,
    result: SearchResult,
    ranking: ScheduleRanking,
    elapsed_seconds: float,
) -> str:
    timeline = result.timeline
    unit = timeline.unit and f" {timeline.unit}"
    lines = [
        f"search: {search_request.objective_text} {result.span:.6g}{unit}, bubble "
        f"{timeline.bubble:.1%}; "
        f"{search_request.describe_result_bound(result)}",
        *_describe_least_memory(search_request, result, ranking),
        f"why: {result.explanation}",
        f"peak: {_describe_memory(timeline)}",
        *_describe_comparison(search_request, result, ranking),
        *search_request.notes,
        f"{result.num_evaluated:,} schedules evaluated in {elapsed_seconds:.1f} s: "
        f"{_STOP_REASONS[result.stop_reason]}",
        f"searched {describe_numba(result.numba)}",
    ]
    if args.output is not None:
        lines.append(f"wrote {args.output}")
    return "".join(f"{line}\n" for line in lines)


def _describe_least_memory(
    search_request: _SearchRequest, result: SearchResult, ranking: ScheduleRanking
) -> list[str]:
    """Return a line about a built-in schedule that is as short as the result and needs less memory.

    Return [] if there is no such schedule, if the result is not proved shortest, or if the search
    minimizes the longest active span.
    """
    if result.gap_to_bound or search_request.minimizes_active_span:
        return []
    costs = search_request.request.costs or Costs()
    runs = [request.timeline for request in ranking.fitting]
    return [*filter(None, [describe_least_memory(result.timeline, costs, runs)])]


def _describe_memory(timeline: Timeline) -> str:
    """Return the largest number of pairs in flight and the largest peak memory of a rank, as text.

    The memory is omitted if the sizes are unknown.
    """
    text = f"{int(timeline.peak_in_flight.max())} in flight"
    if timeline.sizes is not None:
        text += f", {format_bytes(float(timeline.peak_memory.max()))}"
    return text


def _describe_comparison(
    search_request: _SearchRequest, result: SearchResult, ranking: ScheduleRanking
) -> list[str]:
    """Return a line with the shortest built-in schedules, and one with schedules over the limit."""
    unit = result.timeline.unit and f" {result.timeline.unit}"
    fit = [request.timeline for request in ranking.fitting]
    compared = [
        f"{t.program.name} {search_request.compute_objective(t):.6g}{unit}"
        for t in fit[:MAX_COMPARED_SCHEDULES]
    ]
    model_text, costs_timeline = "", search_request.costs_timeline
    if costs_timeline is not None:
        options: dict[str, Any] = {
            "progress_model": costs_timeline.progress_model,
            "blocking_hosts": costs_timeline.blocking_hosts,
        }
        prediction = simulate(result.program, search_request.request.costs, **options)
        model_text = f" under {costs_timeline.progress_model}, as in the run"
        compared.insert(0, f"search {search_request.compute_objective(prediction):.6g}{unit}")
    lines = [f"compared{model_text}: {', '.join(compared) or 'no built-in schedule fits'}"]
    excess_text = ", ".join(
        f"{name} ({excess.text})" for name, excess in ranking.over_limit.items()
    )
    return [*lines, f"over the limit: {excess_text}"] if excess_text else lines


def _format_json(
    search_request: _SearchRequest, result: SearchResult, ranking: ScheduleRanking
) -> str:
    return format_json(
        collect_timeline_facts(result.timeline)
        | {
            "objective": "active_span" if search_request.minimizes_active_span else "span",
            "objective_value": result.span,
            "bound": result.bound,
            "gap_to_bound": result.gap_to_bound,
            "explanation": result.explanation,
            "stop_reason": result.stop_reason,
            "num_evaluated": result.num_evaluated,
            "numba": result.numba,
            "seed": result.seed,
            "improvements": [step._asdict() for step in result.improvements],
            "peak_in_flight": result.timeline.peak_in_flight.tolist(),
            "compared_schedules": [
                {"program": t.program.name, "objective_value": search_request.compute_objective(t)}
                for t in (request.timeline for request in ranking.fitting)
            ],
            "over_limit": {name: excess.text for name, excess in ranking.over_limit.items()},
        }
    )


def _format_comments(
    args: argparse.Namespace, search_request: _SearchRequest, result: SearchResult
) -> str:
    """Return comments for the program file: the command, the problem and the result.

    The comments do not contain the duration of the search, so that the same search writes the same
    file.
    """
    from schedir.predict.calibrate import format_costs

    request, unit = search_request.request, result.timeline.unit and f" {result.timeline.unit}"
    lines = [
        f"schedir {shlex.join(args.command_words)}",
        f"shape: {search_request.shape}",
        f"costs: {format_costs((request.costs or Costs()).with_defaults())}",
        f"limit: {search_request.memory_limit_text}",
        f"{search_request.objective_text}: {result.span:.6g}{unit}; "
        f"{search_request.describe_result_bound(result)}",
        f"bound: {result.bound:.6g}{unit}; {result.explanation}",
        f"seed: {result.seed}; {_STOP_REASONS[result.stop_reason]}",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
