"""Limits on untrusted input: the number of instructions, and whether code may run.

A short text may contain a shape with billions of instructions.  A schedule that is given as
`file.py:function` is Python code, which runs when schedir loads it.

By default, schedir limits the number of instructions of a program from a file or a command.
schedir does not limit a program that Python code builds.  `input_limits` sets another limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from schedir.errors import ShapeError, UsageError

# The largest number of instructions of a program from a file or a command.  A program of this size
# takes about 1 GB of memory and a few seconds.
DEFAULT_MAX_INSTRUCTIONS: Final = 10**7
RAISE_LIMIT_HINT: Final = (
    "raise the limit with --max-instructions N, or `with schedir.input_limits(max_instructions=N)`"
)


@dataclass(frozen=True)
class InputTrust:
    """The limits that this process sets on its input.

    Attributes:
        max_instructions: The largest number of instructions of a program.  None means
            `DEFAULT_MAX_INSTRUCTIONS` for a program from a file, and no limit for other programs.
        allow_code: True if schedules may be loaded from Python files.
    """

    max_instructions: int | None = None
    allow_code: bool = True


_current_trust = InputTrust()


def get_input_trust() -> InputTrust:
    """Return the limits that this process sets on its input."""
    return _current_trust


@contextmanager
def input_limits(
    *, max_instructions: int | None = None, allow_code: bool | None = None
) -> Iterator[None]:
    """Limit the size of programs, or refuse schedules from Python files, in a `with` block.

    The limits apply to all threads of the process.  At the end of the block, the limits from before
    the block apply again.

    Args:
        max_instructions: The largest number of instructions of a program.  None keeps the present
            limit.  If no limit is set, a program from a file may have 10^7 instructions, and a
            program that Python code builds may have any number.
        allow_code: If False, a schedule that is given as `file.py:function` is refused before it
            runs.  None keeps the present setting.

    Yields:
        None.

    Raises:
        UsageError: `max_instructions` is less than 1.

    Example:
        >>> from schedir import PipelineShape, input_limits
        >>> from schedir.errors import ShapeError
        >>> with input_limits(max_instructions=50):
        ...     try:
        ...         PipelineShape(ranks=8, microbatches=8)
        ...     except ShapeError as error:
        ...         print(error.fact)
        8 stages x 8 microbatches need at least 64 instructions, but the limit is 50
    """
    global _current_trust
    if max_instructions is not None and max_instructions < 1:
        raise UsageError(f"max_instructions must be at least 1, not {max_instructions}")
    previous_trust = _current_trust
    _current_trust = InputTrust(
        previous_trust.max_instructions if max_instructions is None else max_instructions,
        previous_trust.allow_code if allow_code is None else allow_code,
    )
    try:
        yield
    finally:
        _current_trust = previous_trust


def format_trust_options() -> list[str]:
    """Return the command-line options that give another `schedir` process the same limits."""
    has_limit = _current_trust.max_instructions not in (None, DEFAULT_MAX_INSTRUCTIONS)
    options = [f"--max-instructions={_current_trust.max_instructions}"] if has_limit else []
    return options if _current_trust.allow_code else [*options, "--no-code"]


def get_max_file_instructions() -> int:
    """Return the largest number of instructions that a program from a file may have."""
    return (
        DEFAULT_MAX_INSTRUCTIONS
        if _current_trust.max_instructions is None
        else _current_trust.max_instructions
    )


def require_instruction_limit(
    count: int, subject: str, fields: Sequence[str], max_instructions: int | None = None
) -> None:
    """Raise an error if a program has more instructions than allowed.

    Args:
        count: A lower bound for the number of instructions of the program.
        subject: The part of the program that has `count` instructions, as the subject of the
            error message.
        fields: Names of the shape's fields that determine `count`.
        max_instructions: The limit.  None means the limit of this process for programs that Python
            code builds.

    Raises:
        ShapeError: `count` is more than the limit.
    """
    max_instructions = (
        _current_trust.max_instructions if max_instructions is None else max_instructions
    )
    if max_instructions is not None and count > max_instructions:
        raise ShapeError(
            f"{subject} need at least {count} instructions, but the limit is {max_instructions}",
            hint=RAISE_LIMIT_HINT,
            fields=fields,
        )


def require_code_allowed(source: str) -> None:
    """Raise an error if loading schedules from Python files is forbidden.

    Args:
        source: The schedule as the user wrote it, for the error message.

    Raises:
        UsageError: `input_limits(allow_code=False)` is active.
    """
    if not _current_trust.allow_code:
        raise UsageError(
            f"{source} is Python code, which --no-code or input_limits(allow_code=False) forbids",
            hint="use a FILE.sched, which has no code, or leave out --no-code or allow_code=False",
        )
