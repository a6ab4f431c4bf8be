"""The command `compare`: compare schedules of one model side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedir.commands.common.bound_report import bound_of_request, to_gain
from schedir.commands.common.chart_options import add_picture, only_charts, save_chart
from schedir.commands.common.schedule_options import (
    add_shape,
    add_source,
    request_of,
    require_whole,
)
from schedir.commands.common.timeline_facts import facts, filled_facts, said_of_costs
from schedir.errors import UsageError
from schedir.io.terminal import as_json, table

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline

MOST = 8  # differences that are told

EXAMPLES = """\
  schedir compare gpipe one_f_one_b zb_h1 --costs F=1,B=2
  schedir compare gpipe zb_v --tradeoff -o tradeoff.svg

The page docs/which-schedule.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Sources, and where a picture of all goes."""
    parser.description = (
        "Compare schedules of one model. Costs are those of a whole rank, or lists for any number "
        "of stages, and are spread evenly over the stages of each schedule. A schedule without a "
        "parameter v has one stage per rank."
    )
    add_source(parser, several=True)
    parser.add_argument("-o", dest="output", metavar="FILE", help="draw them under each other")
    parser.add_argument("--tradeoff", action="store_true", help="draw bubble against memory")
    add_picture(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """A row per schedule."""
    if args.output is None:
        if args.tradeoff:
            raise UsageError("bubble against memory is a picture", hint="-o FILE.png")
        only_charts(args, "a table")
    elif args.tradeoff:
        only_charts(args, "bubble against memory")
    requests = [request_of(args, source, share=True) for source in args.source]
    require_whole(requests)
    timelines = [request.timeline for request in requests]
    said = _compared(requests, as_table=not args.json)
    if not args.json:
        said += _differ(timelines) + said_of_costs(requests)
    if args.output is not None:
        if args.tradeoff:
            from schedir.viz import bubble_vs_memory, save

            save(bubble_vs_memory(timelines), args.output)
        else:
            save_chart(args, requests)
        said += "" if args.json else f"wrote {args.output}\n"
    return said


def _compared(requests: Sequence[Request], *, as_table: bool) -> str:
    from schedir.analysis.memory.unshard_counts import facts_of_parts, span

    rows, several = [], len({request.timeline.kind for request in requests}) > 1
    for request in requests:
        t = request.timeline
        shape, peak = t.program.shape, int(t.peak_in_flight.max(initial=0))
        counts = {"ranks": shape.ranks, "microbatches": shape.microbatches, "stages": shape.stages}
        size = {"peak_in_flight": peak, "peak_activations": t.peak_activations}
        found = facts(t, bound_of_request(request))
        parts = facts_of_parts(t.program)
        rows.append(found | counts | size | filled_facts(request) | parts)
    if not as_table:
        return as_json(rows)
    cut = any("gathers" in f for f in rows)
    return table(
        ["schedule", "ranks", "microbatches", "stages", "span", "bubble", "to gain",
         "peak in flight", "peak activations", *["gathers"] * cut],
        [
            [", ".join(filter(None, [f["program"], f["kind"] * several, f["doubt"]])),
             *(str(f[name]) for name in ("ranks", "microbatches", "stages")),
             f"{f['span']:.6g} {f['unit']}".strip(),
             f"{f['bubble']:.1%}", to_gain(f),
             str(f["peak_in_flight"]), f"{f['peak_activations']:.6g}",
             *[span(f.get("gathers", [0]))] * cut]
            for f in rows
        ],
    )  # fmt: skip


def _differ(timelines: Sequence[Timeline]) -> str:
    """Of two runs of one program in one unit, where they differ most."""
    from schedir.predict.timeline_diff import differences

    if len(timelines) != 2:
        return ""
    first, second = timelines
    if (first.program.digest, first.unit) != (second.program.digest, second.unit):
        return ""
    rows = [d for d in differences(first, second) if d.more][:MOST]
    if not rows:
        return "both runs take the same times\n"
    more = f"{second.span / first.span - 1:+.1%}" if first.span else "more"
    return f"the second takes {more}; where they differ most\n" + table(
        ["rank", "what", "first", "second", "more"],
        [[str(d.rank), d.what, *(f"{t:.4g}" for t in d[2:]), f"{d.more:+.4g}"] for d in rows],
    )
