"""Options that limit what input files may do."""

from __future__ import annotations

import argparse

from schedir.ir.cost.number_parsing import parse_integer
from schedir.ir.input_trust import DEFAULT_MAX_INSTRUCTIONS


def add_input_limits(parser: argparse.ArgumentParser) -> None:
    """Add options that limit the size of programs, and whether a source may run code.

    Args:
        parser: The parser of the command.
    """
    group = parser.add_argument_group("limits for untrusted files")
    group.add_argument(
        "--max-instructions", dest="most_instructions", type=_parse_positive_count, metavar="N",
        help=f"refuse programs with more instructions than this ({DEFAULT_MAX_INSTRUCTIONS}); an "
        "instruction takes about 30 to 100 bytes of memory",
    )  # fmt: skip
    group.add_argument(
        "--no-code", action="store_true",
        help="do not execute Python files: refuse a schedule file.py:function on the command line "
        "and in a configuration",
    )  # fmt: skip


def _parse_positive_count(text: str) -> int:
    try:
        number = parse_integer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return number
