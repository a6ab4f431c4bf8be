"""The command `draw`: draw runs on the terminal, as pictures or as an interactive page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from schedir.commands.common.bound_report import describe_run_bound, find_lower_bound
from schedir.commands.common.chart_options import (
    add_chart_options,
    format_text_chart,
    require_no_chart_options,
    save_chart,
)
from schedir.commands.common.least_memory import describe_request_memory
from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.commands.common.timeline_facts import describe_costs
from schedir.errors import UsageError
from schedir.io.source_loader import require_schedule_names

if TYPE_CHECKING:
    from schedir.io.program_request import Request

EXAMPLES = """\
  schedir draw run.timeline -o run.html
  schedir draw zb_h1 --show arrows,memory --sizes saved=1GB -o zb_h1.svg

The page docs/how-to/draw-pictures.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `draw`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser, allows_several=True)
    parser.add_argument(
        "-o", dest="output", metavar="FILE",
        help="FILE.html for an interactive page of one or two runs; FILE.png, .svg or .pdf for a "
        "picture; without -o, a text chart on the terminal",
    )  # fmt: skip
    add_chart_options(parser)
    parser.add_argument(
        "--idle-map", action="store_true",
        help="draw a heat map of the causes of idle time",
    )  # fmt: skip
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Draw runs on the terminal, or to a file in the format of its suffix.

    Args:
        args: The parsed options of `draw`.

    Returns:
        The text chart, or a line with the file name.

    Raises:
        UsageError: The options cannot be combined, or the suffix is unknown.
    """
    page = args.output is not None and args.output.lower().endswith(".html")
    if args.idle_map and (page or args.output is None):
        raise UsageError("--idle-map draws a picture, and needs -o", hint="-o FILE.png")
    if not page and args.output is not None:
        from schedir.viz.figures.figure_files import require_figure_suffix

        require_figure_suffix(
            args.output, "" if args.idle_map else "FILE.html writes a page of one or two runs"
        )
    if page or args.idle_map or args.output is None:
        require_no_chart_options(
            args, "a page" if page else "an idle map" if args.idle_map else "a text chart"
        )
    require_schedule_names(args.source)
    requests = [make_request(args, source) for source in args.source]
    timelines = [request.timeline for request in requests]
    if args.output is None:
        return "\n".join(map(_format_text_chart, requests)) + describe_costs(requests)
    if page:
        from schedir.predict.calibrate import simulate_at_mean_times
        from schedir.viz import save_html

        if len(timelines) > 2:
            raise UsageError(
                f"-o {args.output}: a page shows one or two runs, not {len(timelines)}"
            )
        if len(timelines) == 1 and timelines[0].kind == "measured":
            timelines.insert(0, simulate_at_mean_times(timelines[0]))
        save_html(args.output, *timelines)
    elif args.idle_map:
        from schedir.viz import idle_map, save

        if len(timelines) > 1:
            raise UsageError(f"--idle-map draws one run, not {len(timelines)}")
        save(idle_map(timelines[0]), args.output)
    else:
        save_chart(args, requests)
    return f"wrote {args.output}\n" + describe_costs(requests)


def _format_text_chart(request: Request) -> str:
    """Return a run as a text chart, followed by lines about its lower bound and its memory."""
    bound = find_lower_bound(request)
    lines = [describe_run_bound(request.timeline, bound), describe_request_memory(request, bound)]
    return format_text_chart(request.timeline) + "".join(f"{line}\n" for line in lines if line)
