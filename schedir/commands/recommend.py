"""The command `recommend`: rank schedules by their step time within the available memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedir.commands.common.bound_report import bound_of_request, to_gain
from schedir.commands.common.schedule_options import (
    SOURCE,
    add_shape,
    number,
    request_of,
    require_whole,
)
from schedir.commands.common.schedule_ranking import ScheduleRanking, known, ranked
from schedir.commands.common.timeline_facts import facts, filled_facts, said_of_costs
from schedir.errors import format_bytes
from schedir.io.terminal import as_json, table

if TYPE_CHECKING:
    from schedir.io.program_request import Request

EACH = (1, 2, 4)  # stages per rank that are tried of a schedule that takes v, unless some are said

EXAMPLES = """\
  schedir recommend --ranks 8 --microbatches 32 --costs F=1,B=2
  schedir recommend --max-activations 4 --no-split-backward

The page docs/which-schedule.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Further sources, and what may be held."""
    parser.description = (
        "Rank all built-in schedules, and yours, for one model and shape, the shortest first. "
        "Costs are per rank, as in `schedir compare`."
    )
    parser.add_argument("source", metavar="SCHEDULE", nargs="*", help=f"ranked, too: {SOURCE}")
    parser.add_argument(
        "--max-activations",
        dest="activations",
        type=number,
        metavar="N",
        help="what a rank may hold, in activations of a whole rank: 1F1B holds one per rank",
    )
    parser.add_argument(
        "--no-split-backward",
        dest="whole",
        action="store_true",
        help="none that splits backwards in I and W",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """A row per schedule that fits, and a line for each reason why another does not."""
    found = _found(args)
    if args.json:
        return as_json([_row(request) for request in found.fit])
    said = _ranked(found.fit) if found.fit else "none fits\n"
    if found.over:
        said += f"over the limit: {', '.join(found.over)}\n"
    if found.split:
        said += f"with split backwards: {', '.join(found.split)}\n"
    for name, other in found.same.items():
        said += f"the same program as {other}: {name}\n"
    for fact in dict.fromkeys(error.fact for error in found.refused.values()):
        names = [name for name, error in found.refused.items() if error.fact == fact]
        said += f"not {', '.join(names)}: {fact}\n"
    # Of the first one: others have other stages, and so other numbers.
    return said + said_of_costs(found.fit[:1])


def _found(args: argparse.Namespace) -> ScheduleRanking:
    """What fits, of all candidates."""

    def over(request: Request) -> str:
        peak = request.timeline.peak_activations
        few = args.activations is None or peak <= args.activations
        return "" if few else f"{peak:.6g} activations"

    candidates = [*_candidates(args)]
    require_whole(request for _, request in candidates)
    found = ranked(candidates, over=over, whole=args.whole, said=args.source)
    if found.refused and not (found.fit or found.over or found.split):
        raise next(iter(found.refused.values()))
    return found


def _candidates(args: argparse.Namespace) -> Iterator[tuple[str, Request]]:
    """Names and requests: plain schedules first, then those that take v, once for each.

    Schedules that delay updates are another training, and are ranked for plans of several.
    """
    from schedir.schedules.schedule_algebra import placed_for, takes_v

    for name in (*known(delayed=args.optimizer_steps not in (None, 1)), *args.source):
        request = request_of(args, name, share=True)
        schedule = request.schedule
        if schedule is None or not takes_v(schedule) or args.stages_per_rank is not None:
            yield name, request
            continue
        vee = placed_for(schedule)[0] is not None  # it has two stages per rank at least
        for v in EACH[vee:]:
            yield f"{name} x {v}", replace(request, said={**request.said, "stages_per_rank": v})


def _row(request: Request) -> dict[str, Any]:
    from schedir.ir.isa.instructions import BACKWARD_INPUT

    timeline = request.timeline
    shape, ops = timeline.program.whole, timeline.program.ops
    row = facts(timeline, bound_of_request(request)) | {
        "stages_per_rank": shape.stages_per_rank,  # of a schedule, however they are cut
        "peak_activations": timeline.peak_activations,
        "split_backwards": BACKWARD_INPUT in ops,
        "parameters_held": shape.rows,
    }
    row |= filled_facts(request)
    if timeline.sizes is not None:
        row["peak_memory"] = float(timeline.peak_memory.max())
    return row


def _held(times: int) -> str:
    return "parameters twice" if times == 2 else f"parameters {times} times"


def _ranked(requests: list[Request]) -> str:
    rows = [_row(request) for request in requests]
    sized = ["peak memory"] * ("peak_memory" in rows[0])
    return table(
        ["schedule", "stages per rank", "span", "bubble", "to gain", "peak activations", *sized,
         "needs"],
        [
            [
                row["program"], str(row["stages_per_rank"]),
                f"{row['span']:.6g} {row['unit']}".strip(),
                f"{row['bubble']:.1%}", to_gain(row), f"{row['peak_activations']:.6g}",
                *(format_bytes(row["peak_memory"]) for _ in sized),
                " and ".join(
                    ["split backwards"] * row["split_backwards"]
                    + [_held(row["parameters_held"])] * (row["parameters_held"] > 1)
                ) or "-",
            ]
            for row in rows
        ],
    )  # fmt: skip
