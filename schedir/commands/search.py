"""The command `search`: find the shortest schedule within a memory limit, and a lower bound."""

from __future__ import annotations

import argparse
import shlex
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from schedir.commands.common.bound_report import in_words
from schedir.commands.common.progress_line import ProgressLine
from schedir.commands.common.schedule_options import (
    PER_RANK,
    RANKS,
    add_problem,
    count,
    number,
    shape_of,
)
from schedir.commands.common.schedule_ranking import ScheduleRanking, on_the_plan, ranked
from schedir.commands.common.timeline_facts import facts
from schedir.errors import UsageError, format_bytes
from schedir.io.files import atomic_write
from schedir.io.terminal import as_json
from schedir.ir.cost.costs import Costs
from schedir.ir.pipeline.pipeline_shape import SHAPE_FIELDS, PipelineShape
from schedir.ir.program import TRAITS
from schedir.ir.text_format import to_text
from schedir.predict.possible_saving import at_most, gain_of
from schedir.predict.simulate import simulate
from schedir.schedule_search.problem import whole_is_less
from schedir.schedule_search.search_results import numba_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedir.io.program_request import Request
    from schedir.ir.program import Program
    from schedir.predict.timeline import Timeline
    from schedir.schedule_search.search_results import SearchResult, SearchStep
    from schedir.schedules.schedule_algebra import Schedule

INTERRUPTED = 130
_STOPPED = {
    "proved": "proved",
    "time": "the budget was used up",
    "no better": "nothing better to try",
    "interrupted": "interrupted, this is the best so far",
}
MOST = 3  # schedules of the zoo that are told beside

EXAMPLES = """\
  schedir search --ranks 4 --microbatches 8 --costs F=2,I=2,W=1 --max-in-flight 4 -o found.sched
  schedir search --frontier -o frontier.svg

The page docs/search.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is searched, within which memory, how long, and where it goes."""
    parser.description = (
        "Search for the shortest schedule within a memory limit, and prove a lower bound of all "
        "schedules. Costs and sizes are per stage, as in `schedir simulate`."
    )
    parser.add_argument(
        "-o", dest="output", metavar="FILE.sched", help="write the program there, and of what it is"
    )
    parser.add_argument(
        "--frontier", action="store_true",
        help="search at every limit, for a table, and with -o FILE.svg a picture of it",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = add_problem(
        parser,
        costs="of a stage, as simulate takes them: F=1,I=1,W=1,send=0.1; F=1:1:2 per stage, or "
        "@FILE that says so",
    )
    what.add_argument("--costs-from", metavar="FILE.timeline",
                      help="instead of --costs the mean times of this run, and its shape unless "
                      "another is said")  # fmt: skip
    what.add_argument(
        "--max-in-flight", dest="in_flight", type=_counts, metavar="N",
        help="instead of --memory-limit: how many (stage, microbatch) a rank may hold, from F to "
        "W, or B; 8:8:7 per rank",
    )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument("--objective", default="span", metavar="WHAT",
                     help="what is to be short: span, that of the whole run (default), or own, the "
                     "longest from a rank's first work to its last")  # fmt: skip
    how.add_argument(
        "--no-split-backward",
        dest="whole",
        action="store_true",
        help="none that splits backwards in I and W",
    )
    how.add_argument("--time-limit", dest="seconds", type=number, default=10.0, metavar="S",
                     help="how long at most (10)")  # fmt: skip
    how.add_argument("--max-evaluations", dest="evaluations", type=count, metavar="N",
                     help="how many schedules at most, after those it begins with: the same ones, "
                     "and so the same file, on any machine")  # fmt: skip
    how.add_argument("--seed", type=count, default=0, metavar="N", help="of what is random in it")
    how.add_argument("--initial-schedules", dest="start", nargs="+", default=[], metavar="SCHEDULE",
                     help="begin with these, too: names, FILE.sched or FILE.timeline")  # fmt: skip
    how.add_argument("--bound", dest="prove", default="closed", metavar="HOW",
                     help="how a bound is proven: closed, by formulas (default), or solver, which "
                     "needs schedir[solver], for small ones")  # fmt: skip


def _counts(text: str) -> int | tuple[int, ...]:
    return tuple(map(count, text.split(":"))) if ":" in text else count(text)


# ---------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class _SearchRequest:
    """For what a schedule is searched.  `run` is the one that the costs are of, if there is one."""

    shape: PipelineShape
    request: Request  # of this shape, and of costs, sizes and limit; its source is none
    in_flight: int | tuple[int, ...] | None
    whole: bool
    own: bool
    run: Timeline | None = None
    notes: list[str] = field(default_factory=list)

    def over(self, request: Request) -> str:
        """How many a run holds, if they are more than may be in flight."""
        if self.in_flight is None:
            return ""
        peak = request.timeline.peak_in_flight
        return f"{int(peak.max())} in flight" if (peak > self.in_flight).any() else ""

    @property
    def what(self) -> str:
        """What is to be short, in words."""
        return "longest own span" if self.own else "span"

    @property
    def memory(self) -> str:
        """What a rank may hold."""
        if self.request.memory_limit is not None:
            return format_bytes(self.request.memory_limit)
        if self.in_flight is None:
            return "none"
        each = self.in_flight if isinstance(self.in_flight, tuple) else (self.in_flight,)
        return f"{':'.join(map(str, each))} in flight"

    def proven(self, found: SearchResult) -> str:
        """How short any schedule can be."""
        within = " within this memory" * (self.memory != "none")
        unit = found.timeline.unit and f" {found.timeline.unit}"
        kind = " with whole backwards" * self.whole
        if not self.whole and whole_is_less(self.request.costs or Costs(), self.shape):
            kind = " with split backwards"
        return in_words(found.span, found.bound, unit, kind + within)

    def length(self, timeline: Timeline) -> float:
        """What is to be short."""
        return float(timeline.own_span.max()) if self.own else timeline.span


def _asked(args: argparse.Namespace) -> _SearchRequest:
    """What the options say."""
    from schedir.io.program_request import Request
    from schedir.io.source_loader import Source

    said = {f.name: value for f in SHAPE_FIELDS if (value := getattr(args, f.name)) is not None}
    ranks = said.get("ranks", RANKS)
    usual: dict[str, Any] = {"ranks": ranks, "microbatches": PER_RANK * ranks}
    costs, run, notes = args.costs, None, list[str]()
    if args.costs_from is not None:
        if costs is not None:
            raise UsageError("--costs and --costs-from both say the costs: say one of the two")
        run, costs, notes = _costs_of(args.costs_from, whole=args.whole)
        usual = {f.name: getattr(run.program.shape, f.name) for f in SHAPE_FIELDS}
    shape = PipelineShape(**(usual | said)).resolved()
    if isinstance(args.in_flight, tuple) and len(args.in_flight) != shape.ranks:
        raise UsageError(
            f"--max-in-flight has {len(args.in_flight)} numbers for {shape.ranks} ranks",
            fields=["in_flight"],
        )
    options = {f.name: getattr(shape, f.name) for f in SHAPE_FIELDS}
    sizes = args.sizes or (None if run is None else run.sizes)
    request = Request(
        Source(""), options, options, costs=costs, sizes=sizes, memory_limit=args.memory_limit
    )
    if run is not None:
        request = replace(
            request, progress_model=run.progress_model, blocking_hosts=run.blocking_hosts
        )
    return _SearchRequest(
        shape, request, args.in_flight, args.whole, args.objective == "own", run, notes
    )


def _costs_of(source: str, *, whole: bool) -> tuple[Timeline, Costs, list[str]]:
    """A run, its mean times, and what is to be said of these."""
    from schedir.io.timeline_file import SUFFIX, load_timeline
    from schedir.ir.isa.instructions import BACKWARD_INPUT
    from schedir.predict.calibrate import SAID, calibrate, completed, missed_by, unexplained
    from schedir.schedule_search.heuristics.initial_orders import unlike

    if not source.endswith(SUFFIX):
        raise UsageError(f"a run's file ends in {SUFFIX}: {source} does not")
    run = load_timeline(source)
    program, unit = run.program, run.unit and f" {run.unit}"
    if how := unlike(program):
        raise UsageError(f"{source} {how}")
    costs = completed(calibrate(run), program)
    again = simulate(
        program, costs, progress_model=run.progress_model, blocking_hosts=run.blocking_hosts
    )
    missed = missed_by(again, run)
    note = (
        f"costs: mean times of {source}, which holds {int(run.peak_in_flight.max())} in flight; at "
        f"these it takes {again.span:.6g}{unit} by simulation under {run.progress_model}, "
        f"{abs(missed):.1%} {'more' if missed > 0 else 'less'} than it took"
    )
    if (lost := unexplained(again, run)) >= SAID:
        note += f"; {lost:.1%} of the ranks' time is unexplained and counts as work"
    if BACKWARD_INPUT not in program.ops and not whole:
        note += "; its backwards are whole, and I and W are taken for half of one each"
    notes = [note, *filter(None, [run.doubt])]
    if words := " ".join(shape_of(program, told=TRAITS)):
        notes.append(
            f"without {words} of that run, which schedir print FILE --relower {words} adds"
        )
    return run, costs, notes


# ---------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> str | tuple[str, int]:
    """What was found, how short any can be, and what else there is."""
    if args.frontier:
        return _frontier(args)
    if args.output is not None and not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    asked = _asked(args)
    with nullcontext() if args.output is None else atomic_write(args.output) as path:
        if path is not None:
            path.touch()  # what cannot be written is not searched for
        began = perf_counter()
        found = _search(args, asked)
        took = perf_counter() - began
        if path is not None:
            path.write_text(
                _comments(args, asked, found) + to_text(found.program), encoding="utf-8"
            )
    zoo = _beside(asked)
    said = _json(asked, found, zoo) if args.json else _text(args, asked, found, zoo, took)
    return (said, INTERRUPTED) if found.stopped == "interrupted" else said


def _frontier(args: argparse.Namespace) -> str | tuple[str, int]:
    from schedir.commands.common.frontier_report import FrontierRequest, require, told

    require(args)
    asked = _asked(args)
    unit = "" if asked.run is None else asked.run.unit
    start = _start(args.start, asked)
    said, complete = told(
        args, FrontierRequest(asked.shape, asked.request.costs, asked.request.sizes, start, unit)
    )
    return said if complete else (said, INTERRUPTED)


def _search(args: argparse.Namespace, asked: _SearchRequest) -> SearchResult:
    from schedir.schedule_search.search import search_schedule

    progress, request, few = ProgressLine(), asked.request, asked.in_flight

    def report(step: SearchStep, bound: float) -> None:
        gain = gain_of(step.span, bound)
        progress.show(
            f"{step.span:.6g} since {step.seconds:.1f} s ({step.method}); none is shorter than "
            f"{bound:.6g}: {at_most(gain)} to gain"
        )

    try:
        found = search_schedule(
            asked.shape, request.costs, request.sizes, request.memory_limit,
            in_flight=few.__getitem__ if isinstance(few, tuple) else few,
            objective=args.objective,
            split=not asked.whole,
            seconds=args.seconds,
            evaluations=args.evaluations,
            seed=args.seed,
            start=_start(args.start, asked),
            prove=args.prove,
            report=report,
        )  # fmt: skip
    finally:
        progress.done()
    unit = "" if asked.run is None else asked.run.unit
    return replace(found, timeline=replace(found.timeline, unit=unit))


def _start(sources: Sequence[str], asked: _SearchRequest) -> list[Schedule | Program]:
    """With what the search begins, besides what it knows."""
    from schedir.io.source_loader import Source

    named: list[Schedule | Program] = []
    for source in sources:
        request = replace(asked.request, source=Source(source), memory_limit=None)
        named.append(request.program)
    ran = asked.run
    if ran is not None and ran.program.shape == asked.shape:
        named.append(ran.program)
    return named


def _beside(asked: _SearchRequest) -> ScheduleRanking:
    """The zoo at these costs, and the run's own program; under the model that it ran under."""
    from schedir.io.source_loader import Source

    candidates, ran = [*on_the_plan(asked.request)], asked.run
    if ran is not None and ran.program.shape == asked.shape:
        name = ran.program.name
        candidates.append((name, replace(asked.request, source=Source.of(ran.program, name))))
    return ranked(candidates, over=asked.over, length=asked.length, whole=asked.whole)


# ---------------------------------------------------------------- what is said


def _text(
    args: argparse.Namespace,
    asked: _SearchRequest,
    found: SearchResult,
    zoo: ScheduleRanking,
    seconds: float,
) -> str:
    timeline = found.timeline
    unit = timeline.unit and f" {timeline.unit}"
    lines = [
        f"search: {asked.what} {found.span:.6g}{unit}, bubble {timeline.bubble:.1%}; "
        f"{asked.proven(found)}",
        f"why: {found.why}",
        f"it holds {_held(timeline)}",
        *_compared(asked, found, zoo),
        *asked.notes,
        f"{found.tried:,} schedules tried in {seconds:.1f} s: {_STOPPED[found.stopped]}",
        f"searched {numba_in_words(found.numba)}",
    ]
    if args.output is not None:
        lines.append(f"wrote {args.output}")
    return "".join(f"{line}\n" for line in lines)


def _held(timeline: Timeline) -> str:
    """The most that a rank holds."""
    held = f"{int(timeline.peak_in_flight.max())} in flight"
    if timeline.sizes is not None:
        held += f", {format_bytes(float(timeline.peak_memory.max()))}"
    return held


def _compared(asked: _SearchRequest, found: SearchResult, zoo: ScheduleRanking) -> list[str]:
    """The shortest of the zoo, and what of it is too large."""
    unit = found.timeline.unit and f" {found.timeline.unit}"
    fit = [request.timeline for request in zoo.fit]
    told = [f"{t.program.name} {asked.length(t):.6g}{unit}" for t in fit[:MOST]]
    where, ran = "", asked.run
    if ran is not None:
        how: dict[str, Any] = {
            "progress_model": ran.progress_model,
            "blocking_hosts": ran.blocking_hosts,
        }
        again = simulate(found.program, asked.request.costs, **how)
        where = f" under {ran.progress_model}, as it ran"
        told.insert(0, f"search {asked.length(again):.6g}{unit}")
    lines = [f"beside{where}: {', '.join(told) or 'none that is built in fits'}"]
    over = ", ".join(f"{name} ({held})" for name, held in zoo.over.items())
    return [*lines, f"do not fit: {over}"] if over else lines


def _json(asked: _SearchRequest, found: SearchResult, zoo: ScheduleRanking) -> str:
    return as_json(
        facts(found.timeline)
        | {
            "objective": "own" if asked.own else "span",
            "length": found.span,
            "bound": found.bound,
            "gap": found.gap,
            "why": found.why,
            "stopped": found.stopped,
            "tried": found.tried,
            "numba": found.numba,
            "seed": found.seed,
            "trail": [step._asdict() for step in found.trail],
            "peak_in_flight": found.timeline.peak_in_flight.tolist(),
            "beside": [
                {"program": t.program.name, "length": asked.length(t)}
                for t in (request.timeline for request in zoo.fit)
            ],
            "over": zoo.over,
        }
    )


def _comments(args: argparse.Namespace, asked: _SearchRequest, found: SearchResult) -> str:
    """What stands above the program, as comments: of what it is the shortest.

    No time is told, so that the same search writes the same file.
    """
    from schedir.predict.calibrate import format_costs

    request, unit = asked.request, found.timeline.unit and f" {found.timeline.unit}"
    lines = [
        f"schedir {shlex.join(args.typed)}",
        f"shape: {asked.shape}",
        f"costs: {format_costs((request.costs or Costs()).usual())}",
        f"limit: {asked.memory}",
        f"{asked.what}: {found.span:.6g}{unit}; {asked.proven(found)}",
        f"bound: {found.bound:.6g}{unit}; {found.why}",
        f"seed: {found.seed}; {_STOPPED[found.stopped]}",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
