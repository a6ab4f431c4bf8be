"""The command `recognize`: name the built-in schedule that a program follows."""

from __future__ import annotations

import argparse

from schedir.commands.common.schedule_options import add_compile_options, add_source, make_request
from schedir.io.terminal_output import format_json

EXAMPLES = """\
  schedir recognize mine.py:my_schedule --ranks 4 --microbatches 8
  schedir recognize run.timeline

The page docs/reference/schedules.md has the built-in schedules.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `recognize`.

    Args:
        parser: The parser of the command.
    """
    add_source(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_compile_options(parser)


def run(args: argparse.Namespace) -> str:
    """Return the built-in schedule that a program follows, as a sentence or as JSON.

    Args:
        args: The parsed options of `recognize`.

    Raises:
        SchedirError: The program or an option is invalid.
    """
    from schedir.compiler.schedule_recognition import recognize

    program = make_request(args, args.source).program
    recognition = recognize(program)
    if args.json:
        return format_json(
            {"program": program.name, "is_exact": recognition.is_exact} | recognition._asdict()
        )
    return f"{program.name}: {recognition}\n"
