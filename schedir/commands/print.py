"""The command `print`: print the text of a program, or write it to a file."""

from __future__ import annotations

import argparse
import sys

from schedir.commands.common.chart_options import format_text_chart
from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.errors import SchedirError, UsageError
from schedir.io.files import atomic_write
from schedir.io.program_request import Request
from schedir.io.terminal import color_program
from schedir.ir.program import Program

EXAMPLES = """\
  schedir print zb_h1 --ranks 4 --microbatches 8
  schedir print one_f_one_b -O zero=3 -O dp=2 --no-repeat

The page docs/ir.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A source, and how to print it."""
    add_source(parser)
    parser.add_argument(
        "--no-repeat", dest="flat", action="store_true", help="one line per instruction"
    )
    parser.add_argument(
        "--compute-only",
        dest="draft",
        action="store_true",
        help="compute only, before the lowering",
    )
    parser.add_argument("-o", dest="output", metavar="FILE.sched", help="write it there")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """The text, folded unless told otherwise."""
    from schedir.ir.text_format import to_text

    request = make_request(args, args.source)
    if args.output is None:
        return color_program(to_text(request.program, folded=not args.flat)) + _draw_preview(
            request
        )
    return write_program(request.program, args.output, folded=not args.flat)


def write_program(program: Program, output: str, *, folded: bool = True) -> str:
    """Write the text of a program to a `.sched` file, and return the line that says so."""
    from schedir.ir.text_format import to_text

    if not output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {output} does not")
    with atomic_write(output) as path:
        path.write_text(to_text(program, folded=folded), encoding="utf-8")
    return f"wrote {output}\n"


def _draw_preview(request: Request) -> str:
    """On a terminal, what the program will do, if it can; as comments, so that all still parses."""
    if not sys.stdout.isatty():
        return ""
    from schedir.analysis.memory.unshard_counts import describe_sharding

    try:
        said = f"\n# {parts}" if (parts := describe_sharding(request.program)) else ""
        return f"{said}\n" + format_text_chart(request.timeline, line_prefix="# ")
    except SchedirError:
        return ""  # what is wrong with it, `check` tells
