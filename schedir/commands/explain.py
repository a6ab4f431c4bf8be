"""The command `explain`: explain why ranks are idle, and simulate changes that shorten the step."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from schedir.commands.common.schedule_options import add_shape, add_source, request_of, shape_of
from schedir.commands.common.timeline_facts import facts, filled_facts, said_of_costs
from schedir.errors import SchedirError, format_bytes
from schedir.io.command_line import option_words
from schedir.io.terminal import as_json
from schedir.predict.possible_saving import at_most, gain_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from schedir.io.program_request import Request
    from schedir.ir.cost.costs import Costs
    from schedir.predict.timeline import Timeline
    from schedir.predict.what_if import Advice, SimulatedChange
    from schedir.schedule_search.search_results import LowerBound

SHOWN = 3  # changes that save time; more if commands for them are shown
SHOWN_HELD = 5  # changes of what ranks hold
TORCH = "torch-2.13"  # the form of its CSV that has transfers

EXAMPLES = """\
  schedir explain one_f_one_b --costs F=1,B=2,send=0.2
  schedir explain run.timeline

The page docs/slow-run.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source."""
    add_source(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """Some five lines."""
    from schedir.ir.cost.costs import Costs
    from schedir.predict.bubble_causes import idleness
    from schedir.predict.calibrate import calibrate, completed
    from schedir.predict.what_if import advise

    request = request_of(args, args.source)
    request, limit = _whatever_it_holds(request)
    timeline, costs = request.timeline, request.given
    if costs is None:
        costs = Costs() if request.run is None else calibrate(timeline)
    costs = completed(costs, timeline.program)
    advice = advise(timeline, costs, request.schedule, limit)
    least = _least(advice, costs)
    hows = [_how(change, args, request) for change in advice.changes]
    if args.json:
        return as_json(_facts(timeline, advice, hows, least) | filled_facts(request))
    idle = idleness(timeline)
    lines = [_where(timeline, idle), *_who(timeline, idle)]
    lines += _what(advice, hows, timeline) + _at_most(advice, least) + _held(advice, limit)
    return "".join(f"{line}\n" for line in lines) + said_of_costs([request])


def _whatever_it_holds(request: Request) -> tuple[Request, float | None]:
    """A request whose program may hold more than its limit, which is told, too: what would fit is
    for us to say."""
    from dataclasses import replace

    from schedir.errors import MemoryLimitError

    try:
        _ = request.timeline
    except MemoryLimitError:
        if "fit" in request.more.values():
            raise
        return replace(request, memory_limit=None), request.memory_limit
    return request, request.memory_limit


def _least(advice: Advice, costs: Costs) -> list[LowerBound]:
    """Below what no order of these stages is that holds no more activations, in which sense advice
    is given; the second with split backwards, where all are whole.  None where no bound is known.
    """
    from schedir.ir.isa.instructions import BACKWARD_INPUT
    from schedir.schedule_search.bounds.program_bound import bound_of_program

    program = advice.base.program
    kinds = (False, True) if BACKWARD_INPUT not in program.ops else (True,)
    found = [bound_of_program(program, costs, split=split) for split in kinds]
    return [bound for bound in found if bound is not None] if advice.given else []


def _at_most(advice: Advice, least: list[LowerBound]) -> list[str]:
    """The most that any other order could save."""
    shares = [gain_of(advice.base.span, bound.value) for bound in least]
    most = [at_most(share) for share in shares]
    if len({*most}) > 1:
        most = [f"{most[0]} with whole backwards, {most[1]} with split ones"]
    which = "another order of these stages that holds no more activations"
    return [f"{which} saves {said}" for said in most[:1]]


def _facts(
    timeline: Timeline, advice: Advice, hows: list[list[str]], least: list[LowerBound]
) -> dict[str, Any]:
    from schedir.predict.bubble_causes import IdleCause, by_cause, idleness

    table = by_cause(idleness(timeline), timeline.ranks)
    of_base = facts(advice.base, least[0] if least else None)
    return facts(timeline) | {
        "bound": of_base["bound"],
        "gap": of_base["gap"],
        "bound_when_split": least[-1].value if least else None,
        "idle": {cause.name.lower(): table[:, cause].tolist() for cause in IdleCause},
        "simulated_span": advice.base.span,
        "advice_given": advice.given,
        "fits": advice.fits,
        "held": _facts_of_change(advice.now),
        "changes": [
            _facts_of_change(change) | {"how": how}
            for change, how in zip(advice.changes, hows, strict=True)
        ],
        "could_be_held": [_facts_of_change(change) for change in advice.held],
    }


def _facts_of_change(change: SimulatedChange) -> dict[str, Any]:
    run = change.run
    figures = {"span": run.span, "bubble": run.bubble, "memory": change.memory}
    return {"what": change.what, "saves": change.saves} | figures


def _how(change: SimulatedChange, args: argparse.Namespace, request: Request) -> list[str]:
    """How a change is had, if it is one of transfers or of the progress model."""
    from schedir.analysis.progress_models import model_row
    from schedir.io import torch_csv
    from schedir.ir.cost.costs import Costs
    from schedir.ir.program import Program
    from schedir.predict.calibrate import format_costs

    row, program = change.row, change.run.program
    if row.progress_model is not None:
        return [f"model {row.progress_model}: {model_row(row.progress_model).who}"]
    if row.kind not in ("transfers", "grouped") or request.more:
        return []
    costs, overlap = row.order, row.kind == "grouped"
    of_file = isinstance(request.source.found, Program)
    again = ["--relower"] * of_file
    if request.said or not of_file:
        again += shape_of(program, request.said)
    if args.buffer_sharing is not None:
        again += option_words("buffer_sharing", args.buffer_sharing)
    words = [args.source, *again] + option_words("overlap") * overlap
    # A program's file says no model: whoever goes on from other.sched must know under which it is.
    own = "per_device" if request.run is None else request.run.progress_model
    if (model := args.progress_model or own) != "per_device":
        words += ["--progress-model", model]
    command = f"schedir print {shlex.join(words)}"
    if costs is not None and request.run is not None and request.given is None:
        command += f' --costs "$(schedir calibrate {shlex.quote(args.source)})"'
    elif costs is not None:
        usual = format_costs(Costs()).split(",")
        told = [part for part in format_costs(costs).split(",") if part not in usual]
        command += f" --costs {','.join(told)}"
    lines = [f"{command} -o other.sched"]
    try:
        torch_csv.to_csv(program, TORCH)
    except SchedirError:
        return lines
    return [
        *lines,
        f"for torch: schedir export other.sched --to {TORCH} -o other.csv, and there, without",
        'FSDP, schedule._load_csv("other.csv", format="compute_comms")',
    ]


def _where(timeline: Timeline, idle: NDArray[Any]) -> str:
    """The bubble by cause, the largest first."""
    from schedir.predict.bubble_causes import IdleCause, by_cause

    whole = timeline.span * timeline.ranks
    share = by_cause(idle, timeline.ranks).sum(0) / (whole or 1.0)
    told = sorted((c for c in IdleCause if share[c] >= 0.0005), key=lambda c: -share[c])
    causes = ", ".join(f"{c.name.lower()} {share[c]:.1%}" for c in told)
    unit = timeline.unit and f" {timeline.unit}"
    ranks = f"{timeline.ranks} rank{'s' * (timeline.ranks > 1)}"
    return (
        f"{timeline.program.name}, {timeline.caption}: {timeline.bubble:.1%} of {ranks} x "
        f"{timeline.span:.6g}{unit} is idle{causes and f': {causes}'}"
    )


def _who(timeline: Timeline, idle: NDArray[Any]) -> list[str]:
    """Which instruction of which rank is waited for longest, in all its microbatches."""
    import numpy as np

    from schedir.ir.isa.instructions import COMPUTE, ROWS

    spans = timeline.spans
    idle = idle[idle["awaits"] >= 0]
    idle = idle[np.isin(spans["op"][idle["awaits"]], COMPUTE)]
    if not len(idle):
        return []
    awaited = spans[["rank", "op", "stage"]][idle["awaits"]]
    kinds, which = np.unique(awaited, return_inverse=True)
    waited = np.bincount(which, idle["end"] - idle["start"])
    rank, op, stage = kinds[waited.argmax()].tolist()
    took, pair = spans["end"] - spans["start"], timeline.second_of_pair.copy()
    pair[:-1] |= pair[1:]
    alike = (spans["op"] == op) & ~pair  # two that run together have one time for both
    own, than = took[alike & (spans["stage"] == stage)], ""
    if len(own) and abs(own.mean() - took[alike].mean()) > 0.01 * took[alike].mean():
        than = f"; it takes {own.mean() / took[alike].mean():.2f}x the mean"
    idle_time = timeline.idle.sum()
    if not idle_time > 0:  # the waits are so short that they round to 0
        return []
    share = waited.max() / idle_time
    return [
        f"longest awaited: {ROWS[op].text} of stage {stage} on rank {rank}, in {share:.0%} of the "
        f"idle time{than}"
    ]


def _what(advice: Advice, hows: list[list[str]], timeline: Timeline) -> list[str]:
    """What helps most, and of what these claims are."""
    from schedir.predict.calibrate import SAID, unexplained
    from schedir.predict.what_if import LARGE, LEAST

    base, unit = advice.base, timeline.unit and f" {timeline.unit}"
    if not advice.given:
        return [
            f"no advice is given: a simulation at the run's mean times takes {base.span:.6g}{unit} "
            f"where the run took {timeline.span:.6g}{unit} ({advice.error:+.1%}), so it cannot "
            "tell what a change would save"
        ]
    off = f"{abs(advice.error):.1%} {'more' if advice.error > 0 else 'less'} than it took"
    of = f" at the run's mean times, of {base.span:.6g}{unit}, {off}"
    if (lost := unexplained(base, timeline)) >= SAID:
        of += f", in which {lost:.1%} of the ranks' time is unexplained and counts as work"
    if timeline.kind == "predicted":
        of = ""
    # What is less than the simulation misses may be noise.
    least = max(LEAST, abs(advice.error))
    best = [(k, change) for k, change in enumerate(advice.changes) if change.saves >= least]
    if len(base.program) > LARGE:
        of += f"; other orders of {len(base.program):,} instructions are not tried"
    if not best:
        return [f"nothing that was tried saves {least:.1%} of the time, by simulation{of}"]
    head = f"what would save most of the time of a microbatch, by simulation{of}:"
    lines = [head]
    for k, (at, change) in enumerate(best):
        if k < SHOWN or hows[at]:  # what is told how to get is always told
            lines += [
                f"  {change.saves:6.1%}  {change.what}: {change.in_words()}",
                *(f"{'':10}{how}" for how in hows[at]),
            ]
    return lines


def _held(advice: Advice, limit: float | None) -> list[str]:
    """Return what ranks could hold instead, a line each."""
    now = advice.now
    if not advice.fits and limit is not None:
        head = f"what is held does not fit into {format_bytes(limit)}: {now.in_words()}; "
        head += "what does, by simulation:" if advice.held else "nothing that was tried does"
    elif advice.held:
        head = f"held now: {now.in_words()}; what would take less time or memory, by simulation:"
    else:
        return []
    return [head] + [
        f"  {change.run.span / now.run.span - 1:+7.1%}  {change.what}: {change.in_words()}"
        for change in advice.held[:SHOWN_HELD]
    ]
