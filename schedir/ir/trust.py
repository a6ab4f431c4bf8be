"""Trust: what a process lets its input do, said once for all that it reads.

A plan of a few words may mean billions of instructions, and a schedule that is named as
`file.py:function` is code that runs as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from schedir.errors import UsageError

MOST: Final = 10**8  # instructions of a program, unless told
RAISED: Final = "--most-instructions N, or `with schedir.trusting(instructions=N)`, allows more"


@dataclass(frozen=True)
class Trust:
    """How many instructions a program may have, and whether files with code may be run."""

    instructions: int = MOST
    code: bool = True


_now = Trust()


def trust() -> Trust:
    """What this process lets its input do."""
    return _now


@contextmanager
def trusting(*, instructions: int | None = None, code: bool | None = None) -> Iterator[None]:
    """Within this, in all threads, a program may have so many `instructions`, 10^8 unless told, and
    with `code=False` a schedule that is named as `file.py:function` is refused before it is run.

    Raises UsageError for a number below 1.

    >>> from schedir import Plan, trusting
    >>> from schedir.errors import PlanError
    >>> with trusting(instructions=50):
    ...     try:
    ...         Plan(ranks=8, microbatches=8)
    ...     except PlanError as error:
    ...         print(error.fact)
    8 stages x 8 microbatches are at least 64 instructions, and a program may have 50
    """
    global _now
    if instructions is not None and instructions < 1:
        raise UsageError(f"a program has 1 instruction or more, not at most {instructions}")
    before = _now
    _now = Trust(
        before.instructions if instructions is None else instructions,
        before.code if code is None else code,
    )
    try:
        yield
    finally:
        _now = before


def words_of_now() -> list[str]:
    """The words by which another `schedir` is told to trust its input as this process does."""
    words = [f"--most-instructions={_now.instructions}"] if _now.instructions != MOST else []
    return words if _now.code else [*words, "--no-code"]


def require_trust(source: str) -> None:
    """Refuse a source that runs code, where none may be run.  Raises UsageError."""
    if not _now.code:
        raise UsageError(
            f"{source} is code, which reading it would run, and code is not to be run",
            hint="a FILE.sched says a program without code; without --no-code it would run",
        )
