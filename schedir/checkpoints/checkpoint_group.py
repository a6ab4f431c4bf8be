"""The processes that save and load together, and agree on one outcome."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist

from schedir.errors import CheckpointError, SchedirError, in_words
from schedir.transports.json_collectives import Kinds, gather
from schedir.transports.transport import of_peers

DISKS: Final = timedelta(minutes=30)  # that processes wait for what others write: torch's default

_T = TypeVar("_T")


def apart(group: Any = None) -> Any:
    """A group of its own for the processes of another one, or for all, who call this: what a thread
    tells in it meets nothing that others tell, and all wait as long as disks take (`DISKS`)."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(members, DISKS, backend="gloo", use_local_synchronization=True)


class CheckpointGroup:
    """The processes of a group of torch.distributed, or this one alone."""

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:
        self.group, self.alone = group, alone
        self.number = 0 if alone else dist.get_rank(group)
        self.processes = 1 if alone else dist.get_world_size(group)

    def told(self, make: Callable[[], _T], kinds: Kinds = ()) -> list[_T]:
        """What each process makes, in their order: plain values, and records of these kinds.

        Where one fails, all raise CheckpointError, as the first of these does, and name it; so do
        those that are left where one has ended.
        """
        mine: _T | None = None
        own: Exception | None = None
        wrong: tuple[str, str, int | None, str] | None = None
        try:
            mine = make()
        except SchedirError as error:
            own, place = error, (getattr(error, "step", None), getattr(error, "file", ""))
            wrong = (error.fact, error.hint, *place)
        except Exception as error:  # of whatever kind: the others wait for what this one tells
            own, wrong = error, (in_words(error), "", None, "")
        told = (mine, wrong)
        everyone = [told] if self.alone else self._gathered(told, kinds)
        failed = [(k, *wrong) for k, (_, wrong) in enumerate(everyone) if wrong]
        if failed:
            process, fact, hint, step, file = failed[0]
            alike = len(failed) == len(everyone) and len({fact for _, fact, *_ in failed}) == 1
            fact = fact if alike else f"process {process}: {fact}"
            raise CheckpointError(fact, step, file, hint) from own
        made: list[Any] = [made for made, _ in everyone]
        return made

    def _gathered(self, told: object, kinds: Kinds) -> list[Any]:
        try:
            return gather(told, self.group, kinds)
        except RuntimeError as error:
            if fact := of_peers(error):
                raise CheckpointError(f"of those that save or load together {fact}") from error
            raise

    def expect_alike(self, make: Callable[[], str]) -> None:
        """Raise CheckpointError where the processes make different things: what each is about to
        do, in words."""
        told = self.told(make)
        for process, other in enumerate(told):
            if other != told[0]:
                raise CheckpointError(
                    f"process 0 {told[0]}, and process {process} {other}",
                    hint="all processes call the same",
                )

    def first(self, make: Callable[[], _T], kinds: Kinds = ()) -> _T:
        """What the first process makes, told to all; where it fails, all raise what it does."""
        (made, *_) = self.told(lambda: make() if not self.number else None, kinds)
        return cast(_T, made)
