"""Print tables, coloured programs, errors and JSON for the command line.

Rich is imported in the functions that need it, so that --help does not wait for the import.
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

from schedir.errors import CommandHint, SchedirError

if TYPE_CHECKING:
    from rich.text import Text

_MAX_LINE_LENGTH = 2000  # characters of one line of an error, so that a user can still read it


def color_program(text: str) -> str:
    """Return the text of a program with terminal colours.

    Args:
        text: The text of a program.

    Returns:
        The coloured text, or `text` itself if `should_color` is false.
    """
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
    """Return lines of styled text for the terminal.

    Args:
        lines: Lines, each a sequence of (text, style) pairs. A style is one that rich parses.

    Returns:
        The lines with terminal colours, or plain text if `should_color` is false.
    """
    if not should_color():
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    from rich.text import Text

    return _render_text(Text.assemble(*line) for line in lines)


def _render_text(texts: Iterable[Text], end: str = "\n") -> str:
    """Return rich texts as a string with the escape codes of the terminal."""
    from rich.console import Console

    buffer = StringIO()
    console = Console(file=buffer, highlight=False, force_terminal=True)
    for text in texts:
        console.print(text, soft_wrap=True, end=end)
    return buffer.getvalue()


def should_color() -> bool:
    """Return whether standard output is a terminal and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def format_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with the first column left-aligned and the others right-aligned.

    If the table is wider than the terminal, each word of a heading gets its own line. No number is
    cut.

    Args:
        headings: The heading of each column.
        rows: The cells of each row.

    Returns:
        The lines of the table, with a line break after the last one.
    """
    rows, heads = list(rows), [[name] for name in headings]
    gap, gaps = "   ", len(headings) - 1
    total_width = sum(_measure_columns(heads, rows)) + 3 * gaps
    if sys.stdout.isatty() and total_width >= get_terminal_size().columns:
        gap, heads = "  ", [name.split() for name in headings]
    widths = _measure_columns(heads, rows)
    height = max(map(len, heads))

    def format_row(cells: Sequence[str]) -> str:
        padding = [
            " " * (width - _measure_width(cell)) for cell, width in zip(cells, widths, strict=True)
        ]
        first, *others = zip(cells, padding, strict=True)
        return " " + gap.join(["".join(first), *(pad + cell for cell, pad in others)]).rstrip()

    heading_lines = [
        format_row(words)
        for words in zip(*([""] * (height - len(h)) + h for h in heads), strict=True)
    ]
    if should_color():
        heading_lines = [f"\x1b[1m{line}\x1b[0m" for line in heading_lines]
    rule = " " + "\u2500" * (sum(widths) + len(gap) * gaps)
    return "\n".join([*heading_lines, rule, *map(format_row, rows), ""])


def _measure_columns(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = zip(*rows, strict=True) if rows else [[] for _ in heads]
    return [
        max(map(_measure_width, (*heading, *cells)))
        for heading, cells in zip(heads, columns, strict=True)
    ]


def _measure_width(text: str) -> int:
    """Return the number of terminal columns of a text. East Asian wide characters take two."""
    return sum(1 + (east_asian_width(letter) in "WF") for letter in text)


def format_error(error: SchedirError, *, is_command: bool = False) -> str:
    """Return an error as the text that the command line prints.

    Characters that a terminal could interpret as a command are replaced, because files may contain
    them.

    Args:
        error: The error.
        is_command: True if the user can follow hints with options of the command line.

    Returns:
        The name of the error, its message and its notes, and the line of a user's file that caused
        it.
    """
    from schedir.io.source_loader import find_error_origin

    if is_command and isinstance(error.hint, CommandHint):
        error.hint = error.hint.command
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    if error.__cause__ and (origin := find_error_origin(error)):
        lines.append(f"  at {origin}")
    return "\n".join(map(sanitize_line, "\n".join(lines).split("\n")))


def sanitize_line(line: str, max_length: int = _MAX_LINE_LENGTH) -> str:
    """Remove characters that control a terminal from a text of unknown origin.

    Args:
        line: The text. Unprintable characters become "?".
        max_length: A longer text is cut off after this number of characters.
    """
    short_line = line if len(line) <= max_length else f"{line[:max_length]}..."
    return "".join(c if c.isprintable() else "?" for c in short_line)


def join_words(words: Sequence[str]) -> str:
    """Join words for a sentence, with commas and "and".

    Args:
        words: The words.

    Example:
        >>> join_words(["edge", "pair", "device"]), join_words(["edge"]), join_words([])
        ('edge, pair and device', 'edge', '')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def format_json(value: object) -> str:
    """Return a value as JSON. NaN and infinities, which JSON does not have, become null.

    Args:
        value: Values that `json.dumps` accepts.

    Example:
        >>> format_json({"loss": float("nan"), "seconds": 1.5, "most": (2, float("inf"))}).split()
        ['{', '"loss":', 'null,', '"seconds":', '1.5,', '"most":', '[', '2,', 'null', ']', '}']
    """
    return json.dumps(replace_nonfinite(value), indent=2, allow_nan=False) + "\n"


def replace_nonfinite(value: object) -> object:
    """Return a value with each NaN and infinity replaced by None.

    Args:
        value: A value, or nested mappings, lists and tuples. Tuples become lists.
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value
