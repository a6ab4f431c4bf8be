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

DEFAULT_MAX_INSTRUCTIONS: Final = (
    10**7
)  # instructions of a program of a file or a command: 1 GB, and some seconds
RAISE_LIMIT_HINT: Final = (
    "--max-instructions N, or `with schedir.input_limits(max_instructions=N)`, allows more"
)


@dataclass(frozen=True)
class InputTrust:
    """How many instructions a program may have, and whether files with code may be run.

    With `max_instructions` None a program of a file may have `DEFAULT_MAX_INSTRUCTIONS`, and others
    as many as memory has room for.
    """

    max_instructions: int | None = None
    allow_code: bool = True


_current_trust = InputTrust()


def get_input_trust() -> InputTrust:
    """What this process lets its input do."""
    return _current_trust


@contextmanager
def input_limits(
    *, max_instructions: int | None = None, allow_code: bool | None = None
) -> Iterator[None]:
    """Within this, in all threads, a program may have so many `max_instructions`, and with
    `code=False` a schedule that is named as `file.py:function` is refused before it is run.

    By default a program that is read from a file may have 10^7 instructions, and a program that
    Python code builds is limited by memory alone.  Raises UsageError for a number below 1.

    >>> from schedir import PipelineShape, input_limits
    >>> from schedir.errors import ShapeError
    >>> with input_limits(max_instructions=50):
    ...     try:
    ...         PipelineShape(ranks=8, microbatches=8)
    ...     except ShapeError as error:
    ...         print(error.fact)
    8 stages x 8 microbatches are at least 64 instructions, and a program may have 50
    """
    global _current_trust
    if max_instructions is not None and max_instructions < 1:
        raise UsageError(f"a program has 1 instruction or more, not at most {max_instructions}")
    before = _current_trust
    _current_trust = InputTrust(
        before.max_instructions if max_instructions is None else max_instructions,
        before.allow_code if allow_code is None else allow_code,
    )
    try:
        yield
    finally:
        _current_trust = before


def format_trust_options() -> list[str]:
    """The words by which another `schedir` is told to trust its input as this process does."""
    differs = _current_trust.max_instructions not in (None, DEFAULT_MAX_INSTRUCTIONS)
    words = [f"--max-instructions={_current_trust.max_instructions}"] if differs else []
    return words if _current_trust.allow_code else [*words, "--no-code"]


def get_max_file_instructions() -> int:
    """Return how many instructions a program that is read from a file may have."""
    return (
        DEFAULT_MAX_INSTRUCTIONS
        if _current_trust.max_instructions is None
        else _current_trust.max_instructions
    )


def require_instruction_limit(
    count: int, subject: str, fields: Sequence[str], max_instructions: int | None = None
) -> None:
    """Raise ShapeError if a program has more instructions than it may.

    Args:
        count: How many instructions the program has at least.
        subject: What has so many instructions, as the subject of the error's sentence.
        fields: The fields of the shape that decide how many there are.
        max_instructions: How many there may be; by default as many as this process allows programs
        that Python
            code builds.
    """
    max_instructions = (
        _current_trust.max_instructions if max_instructions is None else max_instructions
    )
    if max_instructions is not None and count > max_instructions:
        raise ShapeError(
            f"{subject} are at least {count} instructions, and a program may have "
            f"{max_instructions}",
            hint=RAISE_LIMIT_HINT,
            fields=fields,
        )


def require_code_allowed(source: str) -> None:
    """Refuse a source that runs code, where none may be run.  Raises UsageError."""
    if not _current_trust.allow_code:
        raise UsageError(
            f"{source} is code, which reading it would run, and code is not to be run",
            hint="a FILE.sched says a program without code; without --no-code it would run",
        )
