"""The processes that save and load together, and agree on one outcome."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist

from schedir.errors import CheckpointError, SchedirError, describe_exception
from schedir.transports.json_collectives import RecordTypes, gather
from schedir.transports.transport import describe_peer_error

DISK_TIMEOUT: Final = timedelta(
    minutes=30
)  # that processes wait for what others write: torch's default

_T = TypeVar("_T")


def create_separate_group(group: Any = None) -> Any:
    """A group of its own for the processes of another one, or for all, who call this: what a thread
    tells in it meets nothing that others tell, and all wait as long as disks take
    (`DISK_TIMEOUT`)."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(members, DISK_TIMEOUT, backend="gloo", use_local_synchronization=True)


class CheckpointGroup:
    """The processes of a group of torch.distributed, or this one alone."""

    def __init__(self, group: Any = None, *, is_single_process: bool = False) -> None:
        self.group, self.is_single_process = group, is_single_process
        self.process = 0 if is_single_process else dist.get_rank(group)
        self.processes = 1 if is_single_process else dist.get_world_size(group)

    def gather_results(self, compute: Callable[[], _T], kinds: RecordTypes = ()) -> list[_T]:
        """What each process makes, in their order: plain values, and records of these kinds.

        Where one fails, all raise CheckpointError, as the first of these does, and name it; so do
        those that are left where one has ended.
        """
        mine: _T | None = None
        own: Exception | None = None
        wrong: tuple[str, str, int | None, str] | None = None
        try:
            mine = compute()
        except SchedirError as error:
            own, place = error, (getattr(error, "step", None), getattr(error, "file", ""))
            wrong = (error.fact, error.hint, *place)
        except Exception as error:  # of whatever kind: the others wait for what this one tells
            own, wrong = error, (describe_exception(error), "", None, "")
        told = (mine, wrong)
        everyone = [told] if self.is_single_process else self._gather_outcomes(told, kinds)
        failed = [(k, *wrong) for k, (_, wrong) in enumerate(everyone) if wrong]
        if failed:
            process, fact, hint, step, file = failed[0]
            alike = len(failed) == len(everyone) and len({fact for _, fact, *_ in failed}) == 1
            fact = fact if alike else f"process {process}: {fact}"
            raise CheckpointError(fact, step, file, hint) from own
        made: list[Any] = [made for made, _ in everyone]
        return made

    def _gather_outcomes(self, outcome: object, kinds: RecordTypes) -> list[Any]:
        try:
            return gather(outcome, self.group, kinds)
        except RuntimeError as error:
            if fact := describe_peer_error(error):
                raise CheckpointError(f"of those that save or load together {fact}") from error
            raise

    def require_same(self, compute: Callable[[], str]) -> None:
        """Raise CheckpointError where the processes make different things: what each is about to
        do, in words."""
        told = self.gather_results(compute)
        for process, other in enumerate(told):
            if other != told[0]:
                raise CheckpointError(
                    f"process 0 {told[0]}, and process {process} {other}",
                    hint="all processes call the same",
                )

    def broadcast_result(self, compute: Callable[[], _T], kinds: RecordTypes = ()) -> _T:
        """What the first process makes, told to all; where it fails, all raise what it does."""
        (made, *_) = self.gather_results(lambda: compute() if not self.process else None, kinds)
        return cast(_T, made)
