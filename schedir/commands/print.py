"""The command `print`: print the text of a program, or write it to a file."""

from __future__ import annotations

import argparse
import sys

from schedir.commands.common.chart_options import in_letters
from schedir.commands.common.schedule_options import add_shape, add_source, request_of
from schedir.errors import SchedirError, UsageError
from schedir.io.files import atomic_write
from schedir.io.program_request import Request
from schedir.io.terminal import coloured
from schedir.ir.program import Program

EXAMPLES = """\
  schedir print zb_h1 --ranks 4 --microbatches 8
  schedir print one_f_one_b -O zero=3 -O dp=2 --no-repeat

The page docs/ir.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
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
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The text, folded unless told otherwise."""
    from schedir.ir.text_format import to_text

    request = request_of(args, args.source)
    if args.output is None:
        return coloured(to_text(request.program, folded=not args.flat)) + _drawn(request)
    return write(request.program, args.output, folded=not args.flat)


def write(program: Program, output: str, *, folded: bool = True) -> str:
    """Write the text of a program to a `.sched` file, and return the line that says so."""
    from schedir.ir.text_format import to_text

    if not output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {output} does not")
    with atomic_write(output) as path:
        path.write_text(to_text(program, folded=folded), encoding="utf-8")
    return f"wrote {output}\n"


def _drawn(request: Request) -> str:
    """On a terminal, what the program will do, if it can; as comments, so that all still parses."""
    if not sys.stdout.isatty():
        return ""
    from schedir.analysis.memory.unshard_counts import in_parts

    try:
        said = f"\n# {parts}" if (parts := in_parts(request.program)) else ""
        return f"{said}\n" + in_letters(request.timeline, before="# ")
    except SchedirError:
        return ""  # what is wrong with it, `check` tells
