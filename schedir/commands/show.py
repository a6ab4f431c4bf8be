"""The command `show`: print the text of a program."""

from __future__ import annotations

import argparse
import sys

from schedir.commands.common.chart_options import in_letters
from schedir.commands.common.schedule_options import add_shape, add_source, request_of
from schedir.errors import ProgramError, UsageError
from schedir.io.files import atomic_write
from schedir.io.program_request import Request
from schedir.io.terminal import coloured


def arguments(parser: argparse.ArgumentParser) -> None:
    """A source, and how to print it."""
    add_source(parser)
    parser.add_argument("--flat", action="store_true", help="one line per instruction")
    parser.add_argument("--draft", action="store_true", help="compute only, before the lowering")
    parser.add_argument("-o", dest="output", metavar="FILE.sched", help="write it there")
    add_shape(parser)


def run(args: argparse.Namespace) -> str:
    """The text, folded unless told otherwise."""
    from schedir.ir.text_format import to_text

    request = request_of(args, args.source)
    text = to_text(request.program, folded=not args.flat)
    if args.output is None:
        return coloured(text) + _drawn(request)
    if not args.output.endswith(".sched"):
        raise UsageError(f"a program's file ends in .sched: {args.output} does not")
    with atomic_write(args.output) as path:
        path.write_text(text, encoding="utf-8")
    return f"wrote {args.output}\n"


def _drawn(request: Request) -> str:
    """On a terminal, what the program will do, if it can; as comments, so that all still parses."""
    if not sys.stdout.isatty():
        return ""
    from schedir.analysis.memory.unshard_counts import in_parts

    try:
        said = f"\n# {parts}" if (parts := in_parts(request.program)) else ""
        return f"{said}\n" + in_letters(request.timeline, before="# ")
    except ProgramError:
        return ""  # what is wrong with it, `check` tells
