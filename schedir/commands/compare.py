"""The command `compare`: compare schedules of one model side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from schedir.commands.common.bound_report import find_lower_bound, format_possible_gain
from schedir.commands.common.chart_options import (
    add_chart_options,
    require_no_chart_options,
    save_chart,
)
from schedir.commands.common.schedule_options import (
    add_compile_options,
    add_source,
    make_request,
    require_unsharded_stages,
)
from schedir.commands.common.schedule_ranking import (
    Excess,
    describe_excesses,
    label_requests,
    use_times_of_run,
)
from schedir.commands.common.timeline_facts import (
    collect_cost_facts,
    collect_timeline_facts,
    describe_costs,
)
from schedir.errors import MemoryLimitError, UsageError, format_bytes
from schedir.io.source_loader import require_schedule_names
from schedir.io.terminal_output import format_json, format_table

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline

MAX_DIFFERENCES = 8  # The number of printed differences of two runs.

EXAMPLES = """\
  schedir compare gpipe one_f_one_b zb_h1 --costs F=1,B=2
  schedir compare gpipe zb_v --tradeoff -o tradeoff.svg

The page docs/how-to/choose-a-schedule.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare`.

    Args:
        parser: The parser of the command.
    """
    parser.description = (
        "Compare schedules of one model. --costs are per rank and microbatch, and the command "
        "splits them evenly over the stages of a rank. A list of n costs divides the model into n "
        "equal parts, with one cost each. If a SCHEDULE is a run, its shape, mean times and "
        "progress model are the defaults, and --costs are in its time unit. "
        'The column "to gain" is an upper limit: another order of the same stages in the same '
        'memory can shorten the step by at most this share. The column has "none" if no order is '
        'shorter, and "-" if this is unknown. '
        "Only schedules with a parameter v, such as interleaved, use --stages-per-rank."
    )
    add_source(parser, allows_several=True)
    parser.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="draw the timelines to this file, one below another",
    )
    parser.add_argument(
        "--tradeoff",
        action="store_true",
        help="with -o: draw the bubble of each schedule against its memory",
    )
    add_chart_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return a table with a row per schedule, and write the picture if `-o` is given.

    Args:
        args: The parsed options of `compare`.

    Raises:
        UsageError: The options cannot be combined.
    """
    if args.output is None:
        if args.tradeoff:
            raise UsageError("--tradeoff draws a picture, and needs -o", hint="-o FILE.png")
        require_no_chart_options(args, "a table")
    elif args.tradeoff:
        require_no_chart_options(args, "a chart of bubble against memory")
    require_schedule_names(args.source)
    requests = [make_request(args, source, for_comparison=True) for source in args.source]
    requests, warning = use_times_of_run(requests)
    require_unsharded_stages(requests)
    requests, over_limit = _drop_exceeded_limits(requests)
    timelines = [request.timeline for request in requests]
    text = _format_comparison(requests, over_limit, as_table=not args.json)
    if not args.json:
        excesses = describe_excesses(over_limit, format_bytes(args.memory_limit or 0))
        text += "".join(f"{line}\n" for line in excesses)
        text += _describe_differences(timelines) + warning + describe_costs(requests)
    if args.output is not None:
        if args.tradeoff:
            from schedir.viz import bubble_vs_memory, save

            save(bubble_vs_memory(timelines), args.output)
        else:
            save_chart(args, requests)
        text += "" if args.json else f"wrote {args.output}\n"
    return text


def _drop_exceeded_limits(
    requests: Sequence[Request],
) -> tuple[list[Request], dict[str, Excess]]:
    """Remove the memory limit from requests whose programs exceed it.

    Returns:
        The requests, and source -> memory for each program over the limit. If a program exceeds the
        limit even with an option such as `recompute=fit`, the request of this program is left out.

    Raises:
        MemoryLimitError: All requests are left out.
    """
    within_limit, over_limit = list[Any](), dict[str, Excess]()
    for request in requests:
        try:
            _ = request.timeline
        except MemoryLimitError as error:
            needed = error.required_bytes
            over_limit[request.source] = Excess(request, needed, format_bytes(needed))
            if "fit" in request.compile_options.values():
                if len(over_limit) == len(requests):
                    raise
                continue
            request = replace(request, memory_limit=None)
        within_limit.append(request)
    return within_limit, over_limit


def _format_comparison(
    requests: Sequence[Request], over_limit: Mapping[str, Excess], *, as_table: bool
) -> str:
    from schedir.analysis.memory.unshard_counts import collect_sharding_facts, format_range

    rows, several_kinds = [], len({request.timeline.kind for request in requests}) > 1
    for request in requests:
        t = request.timeline
        shape, peak = t.program.shape, int(t.peak_in_flight.max(initial=0))
        counts = {"ranks": shape.ranks, "microbatches": shape.microbatches, "stages": shape.stages}
        size: dict[str, Any] = {"peak_in_flight": peak, "peak_activations": t.peak_activations}
        facts = collect_timeline_facts(t, find_lower_bound(request))
        sharding = collect_sharding_facts(t.program)
        if t.sizes is not None:
            size["peak_memory"] = float(t.peak_memory.max())
            excess = over_limit.get(request.source)
            size["is_over_limit"] = excess is not None
            # The predicted run may need less memory than the program needs in the worst case.
            if excess is not None:
                size["peak_memory"] = excess.amount
        rows.append(facts | counts | size | collect_cost_facts(request) | sharding)
    if not as_table:
        return format_json(rows)
    has_gathers = any("unshards" in f for f in rows)
    has_sizes = any("peak_memory" in f for f in rows)
    return format_table(
        ["schedule", "ranks", "microbatches", "stages", "span", "bubble", "to gain",
         "peak in flight", "peak activations", *["peak memory"] * has_sizes,
         *["gathers"] * has_gathers],
        [
            [", ".join(filter(None, [label, f["kind"] * several_kinds,
                                     "forward only" * (not request.timeline.program.has_backward),
                                     f["causality_warning"]])),
             *(str(f[name]) for name in ("ranks", "microbatches", "stages")),
             f"{f['span']:.6g} {f['unit']}".strip(),
             f"{f['bubble']:.1%}", format_possible_gain(f),
             str(f["peak_in_flight"]), f"{f['peak_activations']:.6g}",
             *[_format_peak_memory(f)] * has_sizes,
             *[format_range(f.get("unshards", [0]))] * has_gathers]
            for label, request, f in zip(label_requests(requests), requests, rows, strict=True)
        ],
    )  # fmt: skip


def _format_peak_memory(facts: dict[str, Any]) -> str:
    if "peak_memory" not in facts:
        return "-"
    return f"{'over the limit: ' * facts['is_over_limit']}{format_bytes(facts['peak_memory'])}"


def _describe_differences(timelines: Sequence[Timeline]) -> str:
    """Return a table of the largest differences of two runs of the same program, else ""."""
    from schedir.predict.timeline_diff import compare_timelines

    if len(timelines) != 2:
        return ""
    first, second = timelines
    if (first.program.digest, first.unit) != (second.program.digest, second.unit):
        return ""
    rows = [d for d in compare_timelines(first, second) if d.increase][:MAX_DIFFERENCES]
    if not rows:
        return "the instructions of both runs take the same times\n"
    change = f"{second.span / first.span - 1:+.1%}" if first.span else "longer"
    return f"span of the second run: {change}; the largest differences:\n" + format_table(
        ["rank", "activity", "first", "second", "change"],
        [
            [str(d.rank), d.activity, *(f"{t:.4g}" for t in d[2:]), f"{d.increase:+.4g}"]
            for d in rows
        ],
    )
