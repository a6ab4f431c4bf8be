"""What the command line prints: tables, coloured programs, refusals, JSON.

Rich is imported where it is needed: --help must not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence

from schedir.errors import ProgramError


def coloured(text: str) -> str:
    """The text of a program as a terminal shows it; elsewhere, or with NO_COLOR, as it is."""
    if not in_colour():
        return text
    from rich.console import Console
    from rich.text import Text

    from schedir.ops import ROWS

    styles = {"F": "bright_blue", "B": "magenta", "I": "yellow", "W": "green"}
    lines = Text(text)
    lines.highlight_regex(r"(?m)^\S.*$", "bold")
    for row in ROWS:
        style = styles.get(row.text, "cyan" if row.hop else "bright_black")
        lines.highlight_regex(
            rf"(?m)(?<=\s){row.text}(?: \d+(\.\d+([+-]\d*)?)?)?(?=$|[;\s])", style
        )
    console = Console(highlight=False)
    with console.capture() as said:
        console.print(lines, soft_wrap=True, end="")
    return said.get()


def painted(lines: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Lines made of pieces of text with a style each; plain where colours are not wanted."""
    if not in_colour():
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    with console.capture() as said:
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=True)
    return said.get()


def in_colour() -> bool:
    """Whether what is printed goes to a person's terminal, who has not asked for NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for k, name in enumerate(head):
        drawn.add_column(name, justify="right" if k else "left", no_wrap=not k)
    for row in rows:
        drawn.add_row(*map(escape, row))
    # A file has no width, so that a table keeps its columns there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as said:
        console.print(drawn)
    return "".join(f"{line.rstrip()}\n" for line in said.get().splitlines() if line.strip())


def told(error: ProgramError) -> str:
    """What was refused, and where in a person's file it comes from."""
    from schedir.load import origin

    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    if error.__cause__ and (where := origin(error)):
        lines.append(f"  at {where}")
    return "\n".join(lines)


def as_json(value: object) -> str:
    """JSON for a program to read."""
    return json.dumps(value, indent=2) + "\n"
