"""The command `options`: list the options of how a schedule is compiled."""

from __future__ import annotations

import argparse
from textwrap import wrap

from schedir.commands.common.program_options import ALL, ProgramOption, unknown
from schedir.commands.common.schedule_options import PER_RANK, RANKS
from schedir.io.command_line import FLAGS, option_words
from schedir.io.terminal import as_json

EXAMPLES = """\
  schedir options             all options
  schedir options recompute   one of them
  schedir compile zb_v -O recompute=fit --memory-limit 8GB --sizes saved=1GB -o zb_v.sched

The page README.md has more.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="describe this option only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> str:
    """Return a table of all options, or the description of one."""
    if args.name is not None and (name := args.name.replace("-", "_")) not in ALL:
        raise unknown(name)
    chosen = ALL if args.name is None else {name: ALL[name]}
    rows = {name: _row(name, option) for name, option in chosen.items()}
    if args.json:
        return as_json(rows)
    if args.name is not None:
        return "".join(f"{key}: {text}\n" for key, text in rows[name].items() if text)
    return "".join(_described(row) for row in rows.values())


def _described(row: dict[str, str]) -> str:
    """Return the lines of one option: its name, and its wrapped description."""
    setting = f" [{row['configuration']}]" if row["configuration"] else ""
    first, *rest = wrap(row["help"] + setting, 72)
    return f"{row['option']:<24} {first}\n" + "".join(f"{'':<24} {line}\n" for line in rest)


def _row(name: str, option: ProgramOption) -> dict[str, str]:
    return {
        "option": " ".join(option_words(name, option.kind.metavar)),
        "python": f"compile({name}=...)",
        "configuration": option.setting,
        "values": option.kind.takes if name not in FLAGS else "",
        "help": option.help.format(ranks=RANKS, per_rank=PER_RANK),
    }
