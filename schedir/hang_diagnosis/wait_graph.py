"""Build the graph of which rank waits for which, from the recorded operations alone.

No program is needed.  A rank waits at the first operation that it has issued and that has not
ended.  Whom that waits for is read off the other ranks' recordings: a message pairs with its other
side, the k-th from a to b in a process group with the k-th, and a collective with those of the same
number.
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

# Collectives that end nowhere before all members have issued them.
_find_synchronizing: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier"
).search
# Collectives whose members may come with different sizes.
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
    """What another rank has done for an operation that has not ended, in words.

    It has issued its part `BEHIND` another that has not ended; it has issued an `OTHER` part, which
    does not fit; or it is `THERE`, and so are all.
    """

    NO_DUMP = "left no dump"
    NOT_ISSUED = "not issued its side"
    BEHIND = "issued its side, behind"
    OTHER = "issued another part"
    THERE = "issued its side, too"


_BLOCKING_REASONS: Final = (WaitReason.NOT_ISSUED, WaitReason.BEHIND)


class PendingOperation(NamedTuple):
    """An operation of `rank` that has not ended, and what its part on rank `awaited_rank` does."""

    rank: int
    op: RecordedOperation
    awaited_rank: int
    reason: WaitReason
    counterpart: RecordedOperation | None


class DistributedJob:
    """All that is known of a job: its dumps, and what they say together.

    `waits` are what the first operation of each rank that has not ended waits for, with all of its
    batch.

    Args:
        dumps: The dumps by rank.
        extra_names: What else an operation is called, by its rank and number.
    """

    def __init__(
        self,
        dumps: Mapping[int, FlightRecorderDump],
        extra_names: Mapping[tuple[int, int], str] = MappingProxyType({}),
    ) -> None:
        self.dumps, self.extra_names = dumps, extra_names
        groups = {g for d in dumps.values() for g in (*d.groups, *(op.group for op in d.ops))}
        members = {id(group.ranks): group.ranks for group in groups}.values()
        self.ranks = tuple(sorted({*dumps, *(rank for some in members for rank in some)}))
        # Messages of a rank by channel, and its collectives by process group and number.
        self._messages: dict[tuple[int, RecordedGroup, int, int], list[RecordedOperation]] = (
            defaultdict(list)
        )
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
        """An operation of a rank in words."""
        name = self.extra_names.get((rank, op.number))
        return f"{op} ({name})" if name else str(op)

    def has_lost_entries(self, wait: PendingOperation) -> bool:
        """Whether one of the two has lost its beginning, so that a number says nothing of pairs."""
        return any(
            self.dumps[r].num_lost for r in (wait.rank, wait.awaited_rank) if r in self.dumps
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of which there is no dump."""
        return tuple(rank for rank in self.ranks if rank not in self.dumps)

    # ------------------------------------------------------------ who is the other side of what

    def find_counterpart(
        self, rank: int, op: RecordedOperation, other: int
    ) -> RecordedOperation | None:
        """What another rank has recorded of an operation of a rank, None if nothing.

        Of a collective in a batch that is the one at the same place in its batch.
        """
        if not op.is_message:
            own, theirs = (self._matching_collectives(one, op) for one in (rank, other))
            return theirs[min(own.index(op), len(theirs) - 1)] if theirs else None
        ends = _sender_and_receiver(rank, op)
        own, theirs = (self._messages.get((one, op.group, *ends), []) for one in (rank, other))
        if self.dumps[rank].num_lost or self.dumps[other].num_lost:
            # Where the beginning is lost, what has not ended is paired in order.
            if op.is_done:
                return None
            own, theirs = ([one for one in side if not one.is_done] for side in (own, theirs))
        at = bisect_left(own, op.number, key=lambda one: one.number)
        return theirs[at] if at < len(theirs) else None

    def _matching_collectives(self, rank: int, op: RecordedOperation) -> list[RecordedOperation]:
        """The collectives of a rank that have the number of another rank's."""
        return self._collectives.get((rank, op.group), {}).get(op.sequence_number, [])

    def _last_collective_number(self, rank: int, group: RecordedGroup) -> int:
        """The number of the last collective that a rank has issued in a process group."""
        return max(self._collectives.get((rank, group), (0,)))

    def _find_wait_reason(
        self, rank: int, op: RecordedOperation, other: int
    ) -> tuple[int, WaitReason, RecordedOperation | None]:
        """Another rank, what its part in an operation does, and which it is."""
        if other not in self.dumps:
            return other, WaitReason.NO_DUMP, None
        part = self.find_counterpart(rank, op, other)
        if part is None:
            # Of a collective that is no longer in its buffer, the rank has had it.
            later = (
                not op.is_message
                and self._last_collective_number(other, op.group) > op.sequence_number
            )
            return other, WaitReason.THERE if later else WaitReason.NOT_ISSUED, None
        if _are_mismatched(op, part):
            return other, WaitReason.OTHER, part
        behind = not part.is_done and part.number not in [
            head.number for head in self._pending_ops[other]
        ]
        return other, WaitReason.BEHIND if behind else WaitReason.THERE, part

    def _find_waits(self, rank: int) -> tuple[PendingOperation, ...]:
        found: list[PendingOperation] = []
        for op in self._pending_ops[rank]:
            if op.is_message:
                found.append(PendingOperation(rank, op, *self._find_wait_reason(rank, op, op.peer)))
                continue
            # Others do the same for all that have issued the same: it is asked once for all.
            place = self._matching_collectives(rank, op).index(op)
            key = (op.group, op.sequence_number, place, op.kind, op.sizes, op.dtypes)
            if key not in self._cached_waits:
                every = [self._find_wait_reason(rank, op, other) for other in op.group.ranks]
                self._cached_waits[key] = [
                    one for one in every if one[1] is not WaitReason.THERE
                ] or every
            found += [
                PendingOperation(rank, op, *one)
                for one in self._cached_waits[key]
                if one[0] != rank
            ]
        held = [wait for wait in found if wait.reason is not WaitReason.THERE]
        return tuple(held or found)

    # ------------------------------------------------------------ what that means

    @property
    def cycle(self) -> tuple[PendingOperation, ...]:
        """The waits around a cycle of ranks, each for the next, from the lowest rank that is found
        in one; empty if there is none."""
        left = {
            rank: [w for w in own if w.reason in _BLOCKING_REASONS]
            for rank, own in self.waits.items()
        }
        while done := [rank for rank, own in left.items() if not own]:
            for rank in done:
                del left[rank]
            left = {rank: [w for w in own if w.awaited_rank in left] for rank, own in left.items()}
        if not left:
            return ()
        path: list[PendingOperation] = []
        rank = min(left)
        while rank not in [wait.rank for wait in path]:
            path.append(left[rank][0])
            rank = path[-1].awaited_rank
        return tuple(path[[wait.rank for wait in path].index(rank) :])

    @property
    def roots(self) -> tuple[int, ...]:
        """The ranks for which others wait, and which wait for nobody here."""
        waited = {wait.awaited_rank for waits in self.waits.values() for wait in waits}
        return tuple(
            sorted(r for r in waited if not any(w.awaited_rank != r for w in self.waits.get(r, ())))
        )

    @property
    def unmatched(self) -> tuple[PendingOperation, ...]:
        """What does not fit, or has not ended though all of its ranks are there."""
        every = [wait for waits in self.waits.values() for wait in waits]
        return tuple(wait for wait in every if wait.reason in (WaitReason.OTHER, WaitReason.THERE))

    @cached_property
    def old_dump_ranks(self) -> tuple[int, ...]:
        """The ranks that have written their dumps before others have: they have not issued what has
        ended elsewhere, and cannot have without them."""
        found: set[int] = set()
        ended: dict[RecordedGroup, int] = defaultdict(int)
        for (_, group), parts in self._collectives.items():
            over = (
                n
                for n, some in parts.items()
                for op in some
                if op.is_done and _find_synchronizing(op.kind)
            )
            ended[group] = max(ended[group], *over, 0)
        for group, last in ended.items():
            there = self.dumps.keys() & group.ranks
            found |= {rank for rank in there if self._last_collective_number(rank, group) < last}
        for (rank, group, a, b), received in self._messages.items():
            if (
                rank == b
                and a in self.dumps
                and not (self.dumps[a].num_lost or self.dumps[b].num_lost)
            ):
                sent = len(self._messages.get((a, group, a, b), ()))
                found |= {a} if any(op.is_done for op in received[sent:]) else set()
        return tuple(sorted(found))


def _sender_and_receiver(rank: int, op: RecordedOperation) -> tuple[int, int]:
    """From whom to whom a message goes."""
    return (rank, op.peer) if op.kind == "send" else (op.peer, rank)


def _list_pending_ops(dump: FlightRecorderDump) -> tuple[RecordedOperation, ...]:
    left = [op for op in dump.ops if not op.is_done]
    return tuple(op for op in left if op is left[0] or (op.batch and op.batch == left[0].batch))


def _are_mismatched(op: RecordedOperation, counterpart: RecordedOperation) -> bool:
    """Whether two parts of one operation cannot be."""
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
