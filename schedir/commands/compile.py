"""The command `compile`: compile a schedule into a program, and write it to a file."""

from __future__ import annotations

import argparse

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.commands.print import write_program

EXAMPLES = """\
  schedir compile zb_v -O zero=1 -O dp=2 -O overlap -o zb_v.sched
  schedir compile mine.py:my_schedule --config examples/demo.toml -o mine.sched

The page docs/reference/instructions.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compile`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    parser.add_argument(
        "-o", dest="output", metavar="FILE.sched", required=True,
        help="write the program to this file",
    )  # fmt: skip
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Write the program of a schedule, and return a line with the file name.

    Args:
        args: The parsed options of `compile`.
    """
    return write_program(make_request(args, args.source).program, args.output)
