"""The command `options`: list the options for compiling a schedule."""

from __future__ import annotations

import argparse
from textwrap import wrap

from schedir.commands import COMMANDS
from schedir.commands.common.program_options import (
    PROGRAM_OPTIONS,
    ProgramOption,
    unknown_option_error,
)
from schedir.commands.common.schedule_options import DEFAULT_RANKS, MICROBATCHES_PER_RANK
from schedir.errors import UsageError
from schedir.io.option_spelling import FIELDS_WITH_FLAGS, option_words
from schedir.io.terminal_output import format_json

EXAMPLES = """\
  schedir options recompute

The page docs/reference/command-line.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `schedir options`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument("name", metavar="NAME", nargs="?", help="describe this option only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> str:
    """Return a table of all options, or the description of one option.

    Args:
        args: The parsed arguments of `schedir options`.

    Raises:
        UsageError: There is no option of this name.
    """
    if args.name is not None and (name := args.name.replace("-", "_")) not in PROGRAM_OPTIONS:
        if name in COMMANDS:
            raise UsageError(
                f"{name} is a command, not an option for compiling", hint=f"schedir {name} --help"
            )
        raise unknown_option_error(name)
    chosen = PROGRAM_OPTIONS if args.name is None else {name: PROGRAM_OPTIONS[name]}
    rows = {name: _collect_option_facts(name, option) for name, option in chosen.items()}
    if args.json:
        return format_json(rows)
    if args.name is not None:
        return "".join(f"{key}: {text}\n" for key, text in rows[name].items() if text)
    return "".join(_format_option(row) for row in rows.values())


def _format_option(row: dict[str, str]) -> str:
    """Return the lines of the table for one option: its name, and its wrapped description."""
    setting = f" [{row['configuration']}]" if row["configuration"] else ""
    first, *other_lines = wrap(row["help"] + setting, 72)
    return f"{row['option']:<24} {first}\n" + "".join(f"{'':<24} {line}\n" for line in other_lines)


def _collect_option_facts(name: str, option: ProgramOption) -> dict[str, str]:
    return {
        "option": " ".join(option_words(name, option.kind.metavar)),
        "python": f"compile({name}=...)",
        "configuration": option.config_key,
        "values": option.kind.requirement if name not in FIELDS_WITH_FLAGS else "",
        "help": option.help.format(ranks=DEFAULT_RANKS, per_rank=MICROBATCHES_PER_RANK),
    }
