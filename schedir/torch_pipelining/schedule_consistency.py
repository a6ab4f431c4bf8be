"""Compare what the processes of a pipeline were given, and raise one error in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from schedir import errors
from schedir.errors import InstructionSite, SchedirError, UsageError, describe
from schedir.transports.json_collectives import Kinds, encoded, gather

_T = TypeVar("_T")


def told(make: Callable[[], _T], group: Any, kinds: Kinds = ()) -> list[_T]:
    """What each process of the group makes, by rank: plain values, and records of these kinds.

    Where one raises a SchedirError, all raise it: that of the lowest rank, which it names if others
    had none or another.
    """
    mine: _T | None = None
    error: SchedirError | None = None
    try:
        mine = make()
        encoded(mine, kinds)
    except SchedirError as refused:
        error, mine = refused, None
    except TypeError as refused:
        error, mine = UsageError(str(refused)), None
    everyone = gather((mine, error and _told(error)), group, [*kinds, InstructionSite])
    refusals = [(rank, _made(other)) for rank, (_, other) in enumerate(everyone) if other]
    if refusals:
        rank, first = refusals[0]
        if len({other.fact for _, other in refusals}) > 1 or len(refusals) < len(everyone):
            first.fact = f"rank {rank}: {first.fact}"
            raise first
        raise error or first
    return [what for what, _ in everyone]


def _told(error: SchedirError) -> tuple[Any, ...]:
    """An error as plain values; of one that says more than others do, as all its lines."""
    sites = [InstructionSite(s.rank, s.index, str(s.instr), s.note) for s in error.sites]
    fact = error.fact
    if not _is_plain(type(error)):
        fact, sites = "\n  ".join([fact, *error.lines()]), []
    return type(error).__name__, fact, error.program, sites, error.hint, [*error.fields]


def _is_plain(kind: Any) -> bool:
    """Whether errors of a kind have what all have, and no more."""
    known = isinstance(kind, type) and issubclass(kind, SchedirError)
    return known and getattr(kind, "__init__") is getattr(SchedirError, "__init__")  # noqa: B009


def _made(told: tuple[Any, ...]) -> SchedirError:
    """The error that a process tells, of its kind where that takes no more than is told."""
    name, fact, program, sites, hint, fields = told
    found: Any = getattr(errors, str(name), None)
    kind: type[SchedirError] = found if _is_plain(found) else SchedirError
    made: SchedirError = kind(fact, program=program, sites=sites, hint=hint, fields=fields)
    return made


def require_same(what: str, each: Sequence[object], hint: str = "") -> None:
    """Raise UsageError where ranks were given different things."""
    for rank, other in enumerate(each):
        if other != each[0]:
            one, two = (v if isinstance(v, str) else describe(v) for v in (each[0], other))
            raise UsageError(f"{what} is {one} on rank 0, and {two} on rank {rank}", hint=hint)
