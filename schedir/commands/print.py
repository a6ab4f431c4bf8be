"""The command `print`: print the text of a program, or write it to a file."""

from __future__ import annotations

import argparse
import sys

from schedir.commands.common.chart_options import format_text_chart
from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.errors import SchedirError
from schedir.io.files import atomic_write, require_suffix
from schedir.io.program_request import Request
from schedir.io.terminal_output import color_program
from schedir.ir.program import Program

EXAMPLES = """\
  schedir print zb_h1 --ranks 4 --microbatches 8
  schedir print one_f_one_b -O zero=3 -O dp=2 --no-repeat

The page docs/reference/file-formats.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `print`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    parser.add_argument("--no-repeat", action="store_true", help="print one line per instruction")
    parser.add_argument(
        "--compute-only", dest="draft", action="store_true",
        help="print only the compute instructions, as they are before schedir adds "
        "communication",
    )  # fmt: skip
    parser.add_argument(
        "-o", dest="output", metavar="FILE.sched", help="write the program to this file"
    )
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return the text of a program, or write it to a file.

    By default, repeated lines are folded. `--no-repeat` writes one line per instruction.

    Args:
        args: The parsed options of `print`.

    Raises:
        UsageError: The file has the wrong suffix.
    """
    from schedir.ir.text_format import to_text

    request = make_request(args, args.source)
    if args.output is None:
        return color_program(to_text(request.program, folded=not args.no_repeat)) + _draw_preview(
            request
        )
    return write_program(request.program, args.output, folded=not args.no_repeat)


def write_program(program: Program, output: str, *, folded: bool = True) -> str:
    """Write the text of a program to a file, and return a line with the file name.

    Args:
        program: The program.
        output: A path that ends in ".sched".
        folded: True to fold repeated lines. False to write one line per instruction.

    Raises:
        UsageError: The path has another suffix, or the file cannot be written.
    """
    from schedir.ir.text_format import to_text

    require_suffix(output, "the file of a program", ".sched")
    with atomic_write(output) as path:
        path.write_text(to_text(program, folded=folded), encoding="utf-8")
    return f"wrote {output}\n"


def _draw_preview(request: Request) -> str:
    """Return the predicted run as a text chart, or "" if the output is not a terminal.

    The lines are comments, so that the output can still be parsed as a program.
    """
    if not sys.stdout.isatty():
        return ""
    from schedir.analysis.memory.unshard_counts import describe_sharding

    try:
        text = f"\n# {parts}" if (parts := describe_sharding(request.program)) else ""
        return f"{text}\n" + format_text_chart(request.timeline, line_prefix="# ")
    except SchedirError:
        return ""  # The command `check` reports the error.
