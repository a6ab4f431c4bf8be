"""The command `schedules`: list the built-in schedules."""

from __future__ import annotations

import argparse
from textwrap import wrap
from typing import Any

from schedir.io.terminal_output import format_json
from schedir.schedules import get_built_in_schedules, get_summary
from schedir.schedules.schedule_algebra import (
    Schedule,
    get_placement_mark,
    get_stages_per_rank,
)

EXAMPLES = """\
  schedir schedules

The page docs/reference/schedules.md has their bubbles and formulas.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `schedules`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> str:
    """Return the names of the built-in schedules with a description of each.

    Args:
        args: The parsed options of `schedules`.
    """
    facts = [_collect_facts(name, schedule) for name, schedule in get_built_in_schedules().items()]
    return format_json(facts) if args.json else "".join(map(_format_schedule, facts))


def _collect_facts(name: str, schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": name,
        "stages_per_rank": get_stages_per_rank(schedule),
        "placement": str(get_placement_mark(schedule)[0] or "loop"),
        "description": get_summary(schedule),
    }


def _format_schedule(facts: dict[str, Any]) -> str:
    """Return the lines about one schedule: its name, and its wrapped description."""
    text = facts["description"]
    if facts["stages_per_rank"] > 1:
        placement_text = "" if facts["placement"] == "loop" else f" on {facts['placement']}"
        text += f" By default {facts['stages_per_rank']} stages per rank{placement_text}."
    first, *other_lines = wrap(text, 80)
    return f"{facts['schedule']:<15} {first}\n" + "".join(
        f"{'':<15} {line}\n" for line in other_lines
    )
