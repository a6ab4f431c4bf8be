"""Build the graph of the waits between ranks from recorded operations, without a program.

A rank waits at its first operation that was issued and has not ended. The dumps of the other ranks
show for which of these ranks it waits. Messages from a rank to another rank in a process group are
paired by their order: the k-th message in the dump of the sender with the k-th message in the dump
of the receiver. Collectives are paired by their sequence number.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Final, NamedTuple

from schedir.hang_diagnosis.flight_recorder import (
    FlightRecorderDump,
    RecordedGroup,
    RecordedOperation,
)

# Matches the names of collectives that can end on a rank only after all members have issued them.
_find_synchronizing: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier"
).search
# Suffixes of the names of collectives whose members may have tensors of different sizes.
_UNEVEN_SUFFIXES: Final = (
    "gather",
    "scatter",
    "all_to_all",
    "v",
    "v_single",
    "new_window",
    "split",
)


class WaitReason(Enum):
    """The progress of another rank in an operation that has not ended.

    The values are parts of the sentences of a report.

    - NO_DUMP: The rank has no dump.
    - NOT_ISSUED: The rank has not issued its side.
    - QUEUED: The rank has issued its side after another operation that has not ended.
    - MISMATCH: The rank has issued an operation that does not match.
    - ISSUED: The rank has issued its side, and also waits for the operation.
    """

    NO_DUMP = "no dump"
    NOT_ISSUED = "not issued its side"
    QUEUED = "issued its side, after"
    MISMATCH = "issued an operation that does not match"
    ISSUED = "issued its side, too"


_BLOCKING_REASONS: Final = (WaitReason.NOT_ISSUED, WaitReason.QUEUED)


class PendingOperation(NamedTuple):
    """An operation that has not ended, and one of the ranks that it waits for.

    Attributes:
        rank: The rank that waits.
        op: The operation at which the rank waits.
        awaited_rank: The other rank.
        reason: The progress of the other rank.
        counterpart: The other rank's side of the operation, or None if this side is not in the
            dump.
    """

    rank: int
    op: RecordedOperation
    awaited_rank: int
    reason: WaitReason
    counterpart: RecordedOperation | None


class DistributedJob:
    """A job, with the dumps of its ranks and the waits between them.

    Args:
        dumps: The dumps by rank.
        extra_names: Additional names of operations, by rank and number.

    Attributes:
        ranks: The ranks with a dump, and the ranks in process groups of dumps.
        waits: The waits of each rank. These are the waits of the first operation that has not
            ended, and of the other operations in the batch of this operation.
    """

    def __init__(
        self,
        dumps: Mapping[int, FlightRecorderDump],
        extra_names: Mapping[tuple[int, int], str] = MappingProxyType({}),
    ) -> None:
        self.dumps = dumps
        self.extra_names = extra_names
        groups = {g for d in dumps.values() for g in (*d.groups, *(op.group for op in d.ops))}
        members = {id(group.ranks): group.ranks for group in groups}.values()
        self.ranks = tuple(
            sorted({*dumps, *(rank for group_ranks in members for rank in group_ranks)})
        )
        # (rank, process group, sender, receiver) -> messages.
        self._messages: dict[tuple[int, RecordedGroup, int, int], list[RecordedOperation]] = (
            defaultdict(list)
        )
        # (rank, process group) -> sequence number -> collectives.
        self._collectives: dict[tuple[int, RecordedGroup], dict[int, list[RecordedOperation]]] = (
            defaultdict(dict)
        )
        for rank, dump in dumps.items():
            for op in dump.ops:
                if op.is_message:
                    self._messages[rank, op.group, *_sender_and_receiver(rank, op)].append(op)
                else:
                    self._collectives[rank, op.group].setdefault(op.sequence_number, []).append(op)
        self._pending_ops = {rank: _list_pending_ops(dump) for rank, dump in dumps.items()}
        self._cached_waits: dict[
            object, list[tuple[int, WaitReason, RecordedOperation | None]]
        ] = {}
        self.waits = {rank: self._find_waits(rank) for rank in dumps}

    def describe_operation(self, rank: int, op: RecordedOperation) -> str:
        """Describe an operation of a rank in words, with its additional name if it has one.

        Args:
            rank: The rank.
            op: The operation.
        """
        name = self.extra_names.get((rank, op.number))
        return f"{op} ({name})" if name else str(op)

    def has_lost_entries(self, wait: PendingOperation) -> bool:
        """Return whether one of the two ranks of a wait has lost entries.

        If so, messages cannot be paired by number.

        Args:
            wait: The wait.
        """
        return any(
            self.dumps[r].num_lost for r in (wait.rank, wait.awaited_rank) if r in self.dumps
        )

    @property
    def ranks_without_dump(self) -> tuple[int, ...]:
        """The ranks without a dump."""
        return tuple(rank for rank in self.ranks if rank not in self.dumps)

    # ------------------------------------------------------------ pairs of operations

    def find_counterpart(
        self, rank: int, op: RecordedOperation, other: int
    ) -> RecordedOperation | None:
        """Return the operation of another rank that pairs with an operation, or None.

        A collective in a batch pairs with the collective at the same place in the other rank's
        batch. If entries are lost, messages that have not ended are paired in order.

        Args:
            rank: The rank of the operation.
            op: The operation.
            other: The other rank.
        """
        if not op.is_message:
            own_ops, other_ops = (self._matching_collectives(r, op) for r in (rank, other))
            return other_ops[min(own_ops.index(op), len(other_ops) - 1)] if other_ops else None
        ends = _sender_and_receiver(rank, op)
        own_ops, other_ops = (self._messages.get((r, op.group, *ends), []) for r in (rank, other))
        if self.dumps[rank].num_lost or self.dumps[other].num_lost:
            # If the first entries are lost, only messages that have not ended can be paired, in
            # order.
            if op.is_done:
                return None
            own_ops, other_ops = (
                [message for message in side if not message.is_done]
                for side in (own_ops, other_ops)
            )
        index = bisect_left(own_ops, op.number, key=lambda message: message.number)
        return other_ops[index] if index < len(other_ops) else None

    def _matching_collectives(self, rank: int, op: RecordedOperation) -> list[RecordedOperation]:
        return self._collectives.get((rank, op.group), {}).get(op.sequence_number, [])

    def _last_collective_number(self, rank: int, group: RecordedGroup) -> int:
        """Return the number of the last collective that a rank has issued in a process group."""
        return max(self._collectives.get((rank, group), (0,)))

    def _find_wait_reason(
        self, rank: int, op: RecordedOperation, other: int
    ) -> tuple[int, WaitReason, RecordedOperation | None]:
        """Return the other rank, its progress in an operation, and its side of the operation."""
        if other not in self.dumps:
            return other, WaitReason.NO_DUMP, None
        counterpart = self.find_counterpart(rank, op, other)
        if counterpart is None:
            # If the other rank has issued later collectives, its entry for this collective was
            # overwritten.
            has_later = (
                not op.is_message
                and self._last_collective_number(other, op.group) > op.sequence_number
            )
            return other, WaitReason.ISSUED if has_later else WaitReason.NOT_ISSUED, None
        if _are_mismatched(op, counterpart):
            return other, WaitReason.MISMATCH, counterpart
        is_queued = not counterpart.is_done and counterpart.number not in [
            head.number for head in self._pending_ops[other]
        ]
        return other, WaitReason.QUEUED if is_queued else WaitReason.ISSUED, counterpart

    def _find_waits(self, rank: int) -> tuple[PendingOperation, ...]:
        waits: list[PendingOperation] = []
        for op in self._pending_ops[rank]:
            if op.is_message:
                waits.append(PendingOperation(rank, op, *self._find_wait_reason(rank, op, op.peer)))
                continue
            # All ranks that have issued the same collective wait for the same ranks, so the awaited
            # ranks are computed once.
            index = self._matching_collectives(rank, op).index(op)
            key = (op.group, op.sequence_number, index, op.kind, op.sizes, op.dtypes)
            if key not in self._cached_waits:
                reasons = [self._find_wait_reason(rank, op, other) for other in op.group.ranks]
                self._cached_waits[key] = [
                    reason for reason in reasons if reason[1] is not WaitReason.ISSUED
                ] or reasons
            waits += [
                PendingOperation(rank, op, *reason)
                for reason in self._cached_waits[key]
                if reason[0] != rank
            ]
        blocked = [wait for wait in waits if wait.reason is not WaitReason.ISSUED]
        return tuple(blocked or waits)

    # ------------------------------------------------------------ conclusions

    @property
    def cycle(self) -> tuple[PendingOperation, ...]:
        """The waits around a cycle of ranks, or empty if there is no cycle.

        Each rank waits for the next rank. The search starts at the lowest rank that reaches a
        cycle.
        """
        open_waits = {
            rank: [w for w in rank_waits if w.reason in _BLOCKING_REASONS]
            for rank, rank_waits in self.waits.items()
        }
        while free_ranks := [rank for rank, rank_waits in open_waits.items() if not rank_waits]:
            for rank in free_ranks:
                del open_waits[rank]
            open_waits = {
                rank: [w for w in rank_waits if w.awaited_rank in open_waits]
                for rank, rank_waits in open_waits.items()
            }
        if not open_waits:
            return ()
        path: list[PendingOperation] = []
        rank = min(open_waits)
        while rank not in [wait.rank for wait in path]:
            path.append(open_waits[rank][0])
            rank = path[-1].awaited_rank
        return tuple(path[[wait.rank for wait in path].index(rank) :])

    @property
    def root_ranks(self) -> tuple[int, ...]:
        """The ranks that do not wait for other ranks, but for which other ranks wait."""
        awaited_ranks = {wait.awaited_rank for waits in self.waits.values() for wait in waits}
        return tuple(
            sorted(
                r
                for r in awaited_ranks
                if not any(w.awaited_rank != r for w in self.waits.get(r, ()))
            )
        )

    @property
    def unmatched(self) -> tuple[PendingOperation, ...]:
        """The waits for operations that do not match, or that all ranks have issued."""
        all_waits = [wait for waits in self.waits.values() for wait in waits]
        return tuple(
            wait for wait in all_waits if wait.reason in (WaitReason.MISMATCH, WaitReason.ISSUED)
        )

    @cached_property
    def old_dump_ranks(self) -> tuple[int, ...]:
        """The ranks whose dumps are older than others.

        An operation has ended on another rank, but is not issued yet in such a dump. The operation
        cannot end before all its ranks have issued it.
        """
        old_ranks: set[int] = set()
        last_ended: dict[RecordedGroup, int] = defaultdict(int)
        for (_, group), collectives in self._collectives.items():
            ended_numbers = (
                number
                for number, ops in collectives.items()
                for op in ops
                if op.is_done and _find_synchronizing(op.kind)
            )
            last_ended[group] = max(last_ended[group], *ended_numbers, 0)
        for group, last_number in last_ended.items():
            dumped_ranks = self.dumps.keys() & group.ranks
            old_ranks |= {
                rank
                for rank in dumped_ranks
                if self._last_collective_number(rank, group) < last_number
            }
        for (rank, group, sender, receiver), receives in self._messages.items():
            if (
                rank == receiver
                and sender in self.dumps
                and not (self.dumps[sender].num_lost or self.dumps[receiver].num_lost)
            ):
                num_sent = len(self._messages.get((sender, group, sender, receiver), ()))
                old_ranks |= {sender} if any(op.is_done for op in receives[num_sent:]) else set()
        return tuple(sorted(old_ranks))


def _sender_and_receiver(rank: int, op: RecordedOperation) -> tuple[int, int]:
    return (rank, op.peer) if op.kind == "send" else (op.peer, rank)


def _list_pending_ops(dump: FlightRecorderDump) -> tuple[RecordedOperation, ...]:
    pending_ops = [op for op in dump.ops if not op.is_done]
    return tuple(
        op
        for op in pending_ops
        if op is pending_ops[0] or (op.batch and op.batch == pending_ops[0].batch)
    )


def _are_mismatched(op: RecordedOperation, counterpart: RecordedOperation) -> bool:
    """Return whether the operations of two ranks cannot belong to one message or collective."""
    if op.is_message:
        return (
            sum(map(prod, op.sizes)) != sum(map(prod, counterpart.sizes))
            or op.dtypes != counterpart.dtypes
        )
    if op.kind != counterpart.kind:
        return True
    if op.kind.removesuffix("_base").endswith(_UNEVEN_SUFFIXES):
        return False
    return op.sizes != counterpart.sizes or op.dtypes != counterpart.dtypes
