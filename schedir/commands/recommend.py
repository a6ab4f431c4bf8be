"""The command `recommend`: rank schedules by their step time within the available memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedir.commands.common.bound_report import find_lower_bound, format_possible_gain
from schedir.commands.common.schedule_options import (
    SOURCE_HELP,
    add_compile_options,
    make_request,
    parse_positive_number,
    require_unsharded_stages,
)
from schedir.commands.common.schedule_ranking import (
    Excess,
    ScheduleRanking,
    describe_excesses,
    label_requests,
    list_built_in_schedules,
    rank_schedules,
    use_times_of_run,
)
from schedir.commands.common.timeline_facts import (
    collect_cost_facts,
    collect_timeline_facts,
    describe_costs,
)
from schedir.errors import format_bytes
from schedir.io.terminal_output import format_json, format_table

if TYPE_CHECKING:
    from schedir.io.program_request import Request

# Values of `v` to try for schedules with a parameter `v`, if `--stages-per-rank` is not given.
STAGES_PER_RANK_TRIED = (1, 2, 4)

EXAMPLES = """\
  schedir recommend --ranks 8 --microbatches 32 --costs F=1,B=2
  schedir recommend --max-activations 4 --no-split-backward

The page docs/how-to/choose-a-schedule.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `recommend`.

    Args:
        parser: The parser of the command.
    """
    parser.description = (
        "Rank all built-in schedules, and your own, for one model and shape, the shortest first. "
        "Options and columns have the same meaning as in `schedir compare`."
    )
    parser.add_argument(
        "source", metavar="SCHEDULE", nargs="*", help=f"also rank this: {SOURCE_HELP}"
    )
    parser.add_argument(
        "--max-activations", type=parse_positive_number, metavar="N",
        help="the most microbatches whose activations a rank can keep, in all its stages together; "
        "1F1B needs as many as there are ranks",
    )  # fmt: skip
    parser.add_argument(
        "--no-split-backward", action="store_true",
        help="leave out schedules that split backwards into I and W",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> tuple[str, int]:
    """Return a table of the schedules that fit, and lines with the reasons why others do not fit.

    Args:
        args: The parsed options of `recommend`.

    Returns:
        A text, or JSON with `--json`, and the exit code: 2 if no schedule fits, otherwise 0.

    Raises:
        SchedirError: No schedule supports the shape or the costs.
    """
    ranking, warning = _rank_candidates(args)
    code = 0 if ranking.fitting else 2
    if args.json:
        return format_json([_collect_row(request) for request in ranking.fitting]), code
    text = _describe_shape(ranking)
    text += (
        _format_ranking(ranking.fitting)
        if ranking.fitting
        else "no schedule fits with these options\n"
    )
    text += "".join(
        f"{line}\n" for line in describe_excesses(ranking.over_limit, _describe_limit(args))
    )
    if ranking.with_split_backward:
        text += f"with split backwards: {', '.join(ranking.with_split_backward)}\n"
    for name, duplicate in ranking.duplicates.items():
        text += f"{name} is the same program as {duplicate}\n"
    for fact in dict.fromkeys(error.fact for error in ranking.refusals.values()):
        names = [name for name, error in ranking.refusals.items() if error.fact == fact]
        text += f"refused {', '.join(names)}: {fact}\n"
    # Describe only the costs of the first schedule: schedules with other stages have other costs.
    return text + warning + describe_costs(ranking.fitting[:1]), code


def _rank_candidates(args: argparse.Namespace) -> tuple[ScheduleRanking, str]:
    """Return the ranking of all candidates, and the warning of `use_times_of_run`."""

    def find_excess(request: Request) -> Excess | None:
        peak = request.timeline.peak_activations
        if args.max_activations is None or peak <= args.max_activations:
            return None
        return Excess(request, peak, f"{peak:.6g} activations")

    candidates = dict(_list_candidates(args))
    requests, warning = use_times_of_run([*candidates.values()])
    require_unsharded_stages(requests)
    ranking = rank_schedules(
        zip(candidates, requests, strict=True),
        find_excess=find_excess,
        full_backward_only=args.no_split_backward,
        named_sources=args.source,
    )
    if ranking.refusals and not (
        ranking.fitting or ranking.over_limit or ranking.with_split_backward
    ):
        raise next(iter(ranking.refusals.values()))
    return ranking, warning


def _describe_shape(ranking: ScheduleRanking) -> str:
    """Return a line with the shape of all candidates, or "" if no candidate has a program."""
    requests = [*ranking.fitting, *(excess.request for excess in ranking.over_limit.values())]
    if not requests:
        return ""
    shape = replace(requests[0], memory_limit=None, compile_options={}).program.shape
    return (
        f"{shape.ranks} ranks, {shape.microbatches} microbatches; costs and sizes are per rank and "
        "microbatch\n"
    )


def _describe_limit(args: argparse.Namespace) -> str:
    bytes_ = [] if args.memory_limit is None else [format_bytes(args.memory_limit)]
    activations = [] if args.max_activations is None else [f"{args.max_activations:g} activations"]
    return " and ".join(bytes_ + activations)


def _list_candidates(args: argparse.Namespace) -> Iterator[tuple[str, Request]]:
    """Yield the name and the request of each candidate.

    The built-in schedules without a parameter `v` come first, then the built-in schedules with a
    parameter `v`, and then the schedules of the command line.

    A schedule with a parameter `v` is a candidate for each value in `STAGES_PER_RANK_TRIED`, but
    not for 1 if it defines a placement. If `--stages-per-rank` is given, such a schedule is one
    candidate with this value. With several optimizer steps, the candidates are the built-in
    schedules with weight delay. Otherwise the candidates are the built-in schedules without weight
    delay.
    """
    from schedir.schedules.schedule_algebra import get_placement_mark, has_free_v

    for name in (
        *list_built_in_schedules(has_weight_delay=args.optimizer_steps not in (None, 1)),
        *args.source,
    ):
        request = make_request(args, name, for_comparison=True)
        schedule = request.schedule
        if schedule is None or not has_free_v(schedule) or args.stages_per_rank is not None:
            yield name, request
            continue
        # A schedule that defines a placement has at least two stages per rank.
        has_placement = get_placement_mark(schedule)[0] is not None
        for v in STAGES_PER_RANK_TRIED[has_placement:]:
            yield (
                f"{name} x {v}",
                replace(request, specified={**request.specified, "stages_per_rank": v}),
            )


def _collect_row(request: Request) -> dict[str, Any]:
    from schedir.ir.isa.instructions import BACKWARD_INPUT

    timeline = request.timeline
    shape, ops = timeline.program.unsegmented_shape, timeline.program.used_opcodes
    row = collect_timeline_facts(timeline, find_lower_bound(request)) | {
        "stages_per_rank": shape.stages_per_rank,  # The stages before their division into segments.
        "peak_activations": timeline.peak_activations,
        "has_split_backward": BACKWARD_INPUT in ops,
        "parameter_copies": shape.placement_rows,
    }
    row |= collect_cost_facts(request)
    if timeline.sizes is not None:
        row["peak_memory"] = float(timeline.peak_memory.max())
    return row


def _format_ranking(requests: list[Request]) -> str:
    rows = [_collect_row(request) for request in requests]
    sized = ["peak memory"] * ("peak_memory" in rows[0])
    return format_table(
        ["schedule", "stages per rank", "span", "bubble", "to gain", "peak activations", *sized,
         "needs"],
        [
            [
                label, str(row["stages_per_rank"]),
                f"{row['span']:.6g} {row['unit']}".strip(),
                f"{row['bubble']:.1%}", format_possible_gain(row), f"{row['peak_activations']:.6g}",
                *(format_bytes(row["peak_memory"]) for _ in sized),
                " and ".join(
                    ["split backwards"] * row["has_split_backward"]
                    + ["parameters twice"] * (row["parameter_copies"] == 2)
                    + [f"parameters {row['parameter_copies']} times"]
                    * (row["parameter_copies"] > 2)
                ) or "-",
            ]
            for label, row in zip(label_requests(requests), rows, strict=True)
        ],
    )  # fmt: skip
