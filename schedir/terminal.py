"""What the command line prints: tables, coloured programs, refusals, JSON.

Rich is imported where it is needed: --help must not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from schedir.errors import ProgramError

if TYPE_CHECKING:
    from rich.text import Text


def coloured(text: str) -> str:
    """The text of a program as a terminal shows it; elsewhere, or with NO_COLOR, as it is."""
    if not in_colour():
        return text
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
    return _printed([lines], end="")


def painted(lines: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Lines made of pieces of text with a style each; plain where colours are not wanted."""
    if not in_colour():
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    from rich.text import Text

    return _printed(Text.assemble(*line) for line in lines)


def _printed(texts: Iterable[Text], end: str = "\n") -> str:
    """Styled lines as this terminal takes them."""
    from rich.console import Console

    said = StringIO()
    console = Console(file=said, highlight=False, force_terminal=True)
    for text in texts:
        console.print(text, soft_wrap=True, end=end)
    return said.getvalue()


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
    seen, said = sys.stdout.isatty(), StringIO()
    console = Console(file=said, highlight=False, force_terminal=seen, width=None if seen else 200)
    console.print(drawn)
    return "".join(f"{line.rstrip()}\n" for line in said.getvalue().splitlines() if line.strip())


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
