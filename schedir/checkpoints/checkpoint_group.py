"""The processes that save or load together. If one of them fails, all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist

from schedir.errors import CheckpointError, SchedirError, describe_exception
from schedir.transports.json_collectives import RecordTypes, gather, require_process_group
from schedir.transports.transport import describe_peer_error

# The time that a process waits for the files of other processes. This is torch's default timeout.
DISK_TIMEOUT: Final = timedelta(minutes=30)

_T = TypeVar("_T")


def create_separate_group(group: Any = None) -> Any:
    """Create a new Gloo group with the same members, for a thread that saves checkpoints.

    All members call this. Messages of the thread in the new group do not mix with messages in other
    groups. The timeout of the new group is `DISK_TIMEOUT`.

    Args:
        group: A group of torch.distributed. By default the group of all processes.
    """
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(members, DISK_TIMEOUT, backend="gloo", use_local_synchronization=True)


class CheckpointGroup:
    """The processes that save or load together: a group of torch.distributed, or one process.

    Args:
        group: The group. By default the group of all processes.
        is_single_process: True if this process saves and loads alone, without torch.distributed.

    Attributes:
        process: The rank of this process in the group.
        processes: The number of processes.
    """

    def __init__(self, group: Any = None, *, is_single_process: bool = False) -> None:
        self.group = group
        self.is_single_process = is_single_process
        if not is_single_process:
            require_process_group()
        self.process: int = 0 if is_single_process else dist.get_rank(group)
        self.processes: int = 1 if is_single_process else dist.get_world_size(group)

    def gather_results(self, compute: Callable[[], _T], kinds: RecordTypes = ()) -> list[_T]:
        """Return the results of all processes, in order of rank.

        All processes call this. If `compute` fails in some processes, all processes raise the error
        of the first process in which it failed. The error names that process, except if all
        processes have the same error.

        Args:
            compute: Computes the result of this process: plain values, or records of `kinds`.
            kinds: The types of records that results may contain.

        Raises:
            CheckpointError: `compute` failed in a process, or a process has ended.
        """
        result: _T | None = None
        local_error: Exception | None = None
        failure: tuple[str, str, int | None, str] | None = None
        try:
            result = compute()
        except SchedirError as error:
            local_error = error
            step, file = getattr(error, "step", None), getattr(error, "file", "")
            failure = (error.fact, error.hint, step, file)
        except Exception as error:  # Other processes wait for this outcome, whatever the error is.
            local_error, failure = error, (describe_exception(error), "", None, "")
        outcome = (result, failure)
        outcomes = [outcome] if self.is_single_process else self._gather_outcomes(outcome, kinds)
        failures = [(k, *failure) for k, (_, failure) in enumerate(outcomes) if failure]
        if failures:
            process, fact, hint, step, file = failures[0]
            is_shared = (
                len(failures) == len(outcomes) and len({fact for _, fact, *_ in failures}) == 1
            )
            fact = fact if is_shared else f"process {process}: {fact}"
            raise CheckpointError(fact, step, file, hint) from local_error
        results: list[Any] = [result for result, _ in outcomes]
        return results

    def _gather_outcomes(self, outcome: object, kinds: RecordTypes) -> list[Any]:
        try:
            return gather(outcome, self.group, kinds)
        except RuntimeError as error:
            if fact := describe_peer_error(error):
                raise CheckpointError(
                    f"while processes saved or loaded, {fact}",
                    hint="all processes must call save and load, not only rank 0; "
                    "if another process failed, its error is the cause",
                ) from error
            raise

    def require_same(self, compute: Callable[[], str]) -> None:
        """Raise an error if `compute` does not return the same text in all processes.

        Args:
            compute: Returns a text that describes the next action of this process.

        Raises:
            CheckpointError: The texts differ, or `compute` failed in a process.
        """
        texts = self.gather_results(compute)
        for process, text in enumerate(texts):
            if text != texts[0]:
                raise CheckpointError(
                    f"process 0 {texts[0]}, but process {process} {text}",
                    hint="all processes must call the same function with the same step",
                )

    def broadcast_result(self, compute: Callable[[], _T]) -> _T:
        """Return the result of `compute` in the first process.

        If `compute` fails, all processes raise its error.

        Args:
            compute: Computes the result. Only the first process calls this function.

        Raises:
            CheckpointError: `compute` failed, or a process has ended.
        """
        (result, *_) = self.gather_results(lambda: compute() if not self.process else None)
        return cast(_T, result)
