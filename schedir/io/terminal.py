"""Print tables, coloured programs, errors and JSON for the command line.

Rich is imported where it is needed: --help must not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import isfinite
from shutil import get_terminal_size
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from schedir.errors import SchedirError

if TYPE_CHECKING:
    from rich.text import Text

_MAX_LINE_LENGTH = 2000  # characters of a line of a refusal


def color_program(text: str) -> str:
    """The text of a program as a terminal shows it; elsewhere, or with NO_COLOR, as it is."""
    if not should_color():
        return text
    from rich.text import Text

    from schedir.ir.isa.instructions import INSTRUCTIONS

    styles = {"F": "bright_blue", "R": "blue", "B": "magenta", "I": "yellow", "W": "green"}
    lines = Text(text)
    lines.highlight_regex(r"(?m)^\S.*$", "bold")
    for row in INSTRUCTIONS:
        style = styles.get(row.text, "cyan" if row.peer else "bright_black")
        lines.highlight_regex(
            rf"(?m)(?<=\s){row.text}(?: \d+(\.\d+([+-]\d*)?)?)?(?=$|[;\s])", style
        )
    return _render_text([lines], end="")


def color_lines(lines: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Lines made of pieces of text with a style each; plain where colours are not wanted."""
    if not should_color():
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    from rich.text import Text

    return _render_text(Text.assemble(*line) for line in lines)


def _render_text(texts: Iterable[Text], end: str = "\n") -> str:
    """Styled lines as this terminal takes them."""
    from rich.console import Console

    said = StringIO()
    console = Console(file=said, highlight=False, force_terminal=True)
    for text in texts:
        console.print(text, soft_wrap=True, end=end)
    return said.getvalue()


def should_color() -> bool:
    """Whether what is printed goes to a person's terminal, who has not asked for NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def format_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and numbers to the right.

    On a narrow terminal the words of a heading stand below each other.  No number is ever cut.
    """
    rows, heads = list(rows), [[name] for name in headings]
    gap, gaps = "   ", len(headings) - 1
    wide = sum(_measure_columns(heads, rows)) + 3 * gaps
    if sys.stdout.isatty() and wide >= get_terminal_size().columns:
        gap, heads = "  ", [name.split() for name in headings]
    widths, high = _measure_columns(heads, rows), max(map(len, heads))

    def line(cells: Sequence[str]) -> str:
        room = [
            " " * (width - _measure_width(cell)) for cell, width in zip(cells, widths, strict=True)
        ]
        first, *others = zip(cells, room, strict=True)
        return " " + gap.join(["".join(first), *(left + cell for cell, left in others)]).rstrip()

    top = [line(words) for words in zip(*([""] * (high - len(h)) + h for h in heads), strict=True)]
    if should_color():
        top = [f"\x1b[1m{words}\x1b[0m" for words in top]
    rule = " " + "\u2500" * (sum(widths) + len(gap) * gaps)
    return "\n".join([*top, rule, *map(line, rows), ""])


def _measure_columns(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = zip(*rows, strict=True) if rows else [[] for _ in heads]
    return [
        max(map(_measure_width, (*own, *cells))) for own, cells in zip(heads, columns, strict=True)
    ]


def _measure_width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(1 + (east_asian_width(letter) in "WF") for letter in text)


def format_error(error: SchedirError) -> str:
    """What was refused, and where in a person's file it comes from.

    What a file says is shown so that a terminal takes nothing of it for an order.
    """
    from schedir.io.source_loader import find_error_origin

    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    if error.__cause__ and (where := find_error_origin(error)):
        lines.append(f"  at {where}")
    return "\n".join(map(_sanitize_line, "\n".join(lines).split("\n")))


def _sanitize_line(line: str) -> str:
    """A line without what a terminal would act upon, and of a length that a person reads."""
    cut = line if len(line) <= _MAX_LINE_LENGTH else f"{line[:_MAX_LINE_LENGTH]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def join_words(words: Sequence[str]) -> str:
    """Words in a sentence.

    >>> join_words(["edge", "pair", "device"]), join_words(["edge"]), join_words([])
    ('edge, pair and device', 'edge', '')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def format_json(value: object) -> str:
    """JSON for a program to read; numbers that JSON does not have are null.

    >>> format_json({"loss": float("nan"), "seconds": 1.5, "most": (2, float("inf"))}).split()
    ['{', '"loss":', 'null,', '"seconds":', '1.5,', '"most":', '[', '2,', 'null', ']', '}']
    """
    return json.dumps(replace_nonfinite(value), indent=2, allow_nan=False) + "\n"


def replace_nonfinite(value: object) -> object:
    """The value as JSON can say it: NaN and infinities, which it has not, are None."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(own) for own in value]
    return value
