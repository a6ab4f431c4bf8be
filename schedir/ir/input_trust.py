"""Limits on untrusted input: the number of instructions, and whether files with code may run.

A shape of a few words may mean billions of instructions, and a schedule that is named as
`file.py:function` is code that runs as it is read.

Files, and all that a command does, have a limit of instructions by default.  A program that Python
code builds has no limit but memory, unless `input_limits` sets one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from schedir.errors import ShapeError, UsageError

MOST: Final = 10**7  # instructions of a program of a file or a command: 1 GB, and some seconds
RAISED: Final = "--max-instructions N, or `with schedir.input_limits(instructions=N)`, allows more"


@dataclass(frozen=True)
class InputTrust:
    """How many instructions a program may have, and whether files with code may be run.

    With `instructions` None a program of a file may have `MOST`, and others as many as memory has
    room for.
    """

    instructions: int | None = None
    code: bool = True


_now = InputTrust()


def trust() -> InputTrust:
    """What this process lets its input do."""
    return _now


@contextmanager
def input_limits(*, instructions: int | None = None, code: bool | None = None) -> Iterator[None]:
    """Within this, in all threads, a program may have so many `instructions`, and with `code=False`
    a schedule that is named as `file.py:function` is refused before it is run.

    By default a program that is read from a file may have 10^7 instructions, and a program that
    Python code builds is limited by memory alone.  Raises UsageError for a number below 1.

    >>> from schedir import PipelineShape, input_limits
    >>> from schedir.errors import ShapeError
    >>> with input_limits(instructions=50):
    ...     try:
    ...         PipelineShape(ranks=8, microbatches=8)
    ...     except ShapeError as error:
    ...         print(error.fact)
    8 stages x 8 microbatches are at least 64 instructions, and a program may have 50
    """
    global _now
    if instructions is not None and instructions < 1:
        raise UsageError(f"a program has 1 instruction or more, not at most {instructions}")
    before = _now
    _now = InputTrust(
        before.instructions if instructions is None else instructions,
        before.code if code is None else code,
    )
    try:
        yield
    finally:
        _now = before


def words_of_now() -> list[str]:
    """The words by which another `schedir` is told to trust its input as this process does."""
    differs = _now.instructions not in (None, MOST)
    words = [f"--max-instructions={_now.instructions}"] if differs else []
    return words if _now.code else [*words, "--no-code"]


def most_of_a_file() -> int:
    """Return how many instructions a program that is read from a file may have."""
    return MOST if _now.instructions is None else _now.instructions


def require_room(count: int, of: str, fields: Sequence[str], most: int | None = None) -> None:
    """Raise ShapeError if a program has more instructions than it may.

    Args:
        count: How many instructions the program has at least.
        of: What has so many instructions, as the subject of the error's sentence.
        fields: The fields of the shape that decide how many there are.
        most: How many there may be; by default as many as this process allows programs that Python
            code builds.
    """
    most = _now.instructions if most is None else most
    if most is not None and count > most:
        raise ShapeError(
            f"{of} are at least {count} instructions, and a program may have {most}",
            hint=RAISED,
            fields=fields,
        )


def require_trust(source: str) -> None:
    """Refuse a source that runs code, where none may be run.  Raises UsageError."""
    if not _now.code:
        raise UsageError(
            f"{source} is code, which reading it would run, and code is not to be run",
            hint="a FILE.sched says a program without code; without --no-code it would run",
        )
