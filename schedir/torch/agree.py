"""What the processes of a pipeline tell each other as they make a schedule, and refuse together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from schedir.errors import ProgramError, UsageError, said

_T = TypeVar("_T")


def told(make: Callable[[], _T], group: Any) -> list[_T]:
    """What each process of the group makes, by rank.

    Where one raises a ProgramError, all raise it: that of the lowest rank, which it names if others
    had none or another.
    """
    mine: _T | None = None
    error: ProgramError | None = None
    try:
        mine = make()
    except ProgramError as refused:
        error = refused
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, error and _portable(error)), group=group)
    refusals = [(rank, other) for rank, (_, other) in enumerate(everyone) if other is not None]
    if refusals:
        rank, first = refusals[0]
        if len({other.fact for _, other in refusals}) > 1 or len(refusals) < len(everyone):
            first.fact = f"rank {rank}: {first.fact}"
            raise first
        raise error or first
    return [what for what, _ in everyone]


def _portable(error: ProgramError) -> ProgramError:
    """An error that can be pickled: of one that cannot, the words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ProgramError(error.fact, program=error.program, hint=error.hint)
    return error


def require_same(what: str, each: Sequence[object], hint: str = "") -> None:
    """Raise UsageError where ranks were given different things."""
    for rank, other in enumerate(each):
        if other != each[0]:
            one, two = (v if isinstance(v, str) else said(v) for v in (each[0], other))
            raise UsageError(f"{what} is {one} on rank 0, and {two} on rank {rank}", hint=hint)
