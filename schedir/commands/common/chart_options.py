"""Define the options of charts, and write charts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from schedir.commands.common.bound_report import find_lower_bound
from schedir.errors import UsageError
from schedir.ir.cost.number_parsing import parse_decimal

if TYPE_CHECKING:
    from schedir.io.program_request import Request
    from schedir.predict.timeline import Timeline
    from schedir.viz.style import Style

# Names of parsed options, which are also names of parameters of functions of schedir.viz.
_STYLE_OPTIONS = ("show", "width", "palette", "colors", "axis_label", "time_range")


def add_chart_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the contents and the width of a chart.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "--show", metavar="MARKS",
        help="the overlays to draw: one or more of lanes,arrows,path,in_flight,memory,phases, or "
        "none (default: lanes)",
    )  # fmt: skip
    parser.add_argument(
        "--width",
        metavar="WIDTH",
        type=_parse_width,
        help="the width: column or page (of a paper), or a number of inches",
    )
    parser.add_argument(
        "--title", metavar="TEXT", action="append",
        help="the title of a chart instead of the name of its program; give --title once for each "
        "chart; '' removes the title",
    )  # fmt: skip
    parser.add_argument(
        "--palette", metavar="NAME",
        help="the palette: plain (default; suits colour-blind readers and grey prints), grey, or "
        "bright",
    )  # fmt: skip
    parser.add_argument(
        "--colors", metavar="COLOURS", type=_parse_colors,
        help="replace colours of the palette: F=skyblue,B=#4b3b8f; the names are F, B, I, W, R, "
        "act, grad, tp, dp, params, d2h, h2d, disk, host, ep, step",
    )  # fmt: skip
    parser.add_argument(
        "--axis-label", metavar="TEXT",
        help="the label of the time axis; the text `none` removes the label and the numbers",
    )  # fmt: skip
    parser.add_argument(
        "--time-range", metavar="FROM:TO", type=_parse_time_range,
        help="the time range to draw, in the time unit of the run, such as 10:25",
    )  # fmt: skip


def _parse_width(text: str) -> float | str:
    try:
        inches = parse_decimal(text)
    except ValueError:
        return text
    if not 1 <= inches <= 100:
        raise argparse.ArgumentTypeError(f"must be from 1 to 100 inches, not {text}")
    return inches


def _parse_colors(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(
            f"must be NAME=COLOUR, such as F=skyblue,B=#4b3b8f, not {text!r}"
        )
    return {kind.strip(): colour.strip() for kind, _, colour in pairs}


def _parse_time_range(text: str) -> tuple[float, float]:
    try:
        begin, end = map(parse_decimal, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers, like 10:25, not {text!r}") from None
    return begin, end


def require_no_chart_options(args: argparse.Namespace, subject: str) -> None:
    """Raise an error if an option of `add_chart_options` is given.

    Args:
        args: The parsed options.
        subject: The output of the command, which is not a chart. The error message names it.

    Raises:
        UsageError: An option is given.
    """
    for name in ("title", *_STYLE_OPTIONS):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} applies to Gantt charts, not to {subject}",
                hint="-o FILE.svg draws a Gantt chart",
            )


def format_text_chart(timeline: Timeline, line_prefix: str = "") -> str:
    """Return a run as a text chart, as wide as the terminal.

    Args:
        timeline: The run.
        line_prefix: The text before each line.
    """
    from shutil import get_terminal_size

    from schedir.io.terminal_output import color_lines
    from schedir.viz.terminal_chart import text_chart

    lines = text_chart(timeline, get_terminal_size().columns - len(line_prefix))
    return color_lines([[(line_prefix, ""), *line] for line in lines])


def save_chart(args: argparse.Namespace, requests: Sequence[Request]) -> None:
    """Write a Gantt chart of several runs, one below another, with their lower bounds.

    Args:
        args: The parsed options of `add_chart_options`, and `args.output`, the file.
        requests: For each run, the source and the options of its program. The chart shows the
            memory limits of the first run.

    Raises:
        UsageError: The file name has no suffix of a picture.
    """
    from schedir.viz import compare, save
    from schedir.viz.figures.figure_files import require_figure_suffix

    require_figure_suffix(args.output)  # Fail before anything is drawn.
    values = {name: getattr(args, name) for name in _STYLE_OPTIONS}
    style = {name: value for name, value in values.items() if value is not None}
    if style.get("show") == "none":
        style["show"] = ""
    limits = {
        "device": requests[0].memory_limit,
        "host": requests[0].compile_options.get("host_memory_limit"),
    }
    style["memory_limits"] = {tier: limit for tier, limit in limits.items() if limit is not None}
    lower_bounds = map(find_lower_bound, requests)
    bounds = [bound and bound.value for bound in lower_bounds]
    runs = [request.timeline for request in requests]
    save(compare(runs, titles=args.title, bounds=bounds, **cast("Style", style)), args.output)
