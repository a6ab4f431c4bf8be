"""Placed: at which instruction each rank of a program stands, what it waits for, and who is late.

Transfers are seen, what is computed is not.  What has surely ended is all that an ended transfer
needs; what may have ended is what nothing unfinished keeps from it.  A rank stands at the first of
its instructions that is kept from starting, or that its host has not come to.  From there one goes
to what keeps it, on whatever rank that is, until one comes to a rank that nothing keeps, the cause,
or around a cycle, a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.graph import Graph
from schedir.dumps.matched import Matched
from schedir.ir.index import NONE
from schedir.ir.ops import RECEIVES, SENDS, TRANSFERS


class Kind(Enum):
    """What a chain of waits ends at.

    A rank whose host has not come to a transfer; one of which there is no dump; sides of a message
    that is issued on both, whose ranks may still compute what they wait for; a message that is
    issued on both sides, and that nothing keeps from passing; a side whose other side has ended.
    """

    LATE = 0
    SILENT = 1
    BUSY = 2
    STUCK = 3
    ENDED = 4


@dataclass(frozen=True)
class Place:
    """Where a rank of the program stands.

    `at` is the position of what it waits at, or of the next transfer that it has not issued where
    it is `late`; None if all its transfers have ended.  `since` are the instructions since its last
    transfer that is issued, which it may be computing.
    """

    rank: int
    at: int | None
    late: bool
    between: tuple[int, int]


@dataclass(frozen=True)
class Link:
    """A transfer that has not ended, and what it needs, which has not ended either."""

    at: int
    needs: int


@dataclass(frozen=True)
class Cause:
    """The end of a chain: transfers that nothing keeps, and that have not ended."""

    kind: Kind
    at: tuple[int, ...]


class Placed:
    """The ranks of a copy of a program, placed by what has been matched."""

    def __init__(self, graph: Graph, matched: Matched) -> None:
        self.graph, self.matched = graph, matched
        self.rank = graph.index.rank
        self.transfer = graph.index.is_op(TRANSFERS)
        self.silent = ~np.array(matched.dumped)[self.rank]
        self.ended = matched.ended | self._by_the_other_side()

    def _by_the_other_side(self) -> NDArray[np.bool_]:
        """Of ranks without a dump, the transfers whose other side has ended."""
        partner = self.graph.partner
        return np.asarray(self.silent & (partner != NONE) & self.matched.ended[partner])

    # ------------------------------------------------------------ what has ended, or may have

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """By its first member, what is issued as one."""
        if not self.graph.index.any_joined:
            return {}
        begins = np.flatnonzero(~self.graph.index.joined)
        ends = np.append(begins[1:], len(self.graph))
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        return {lo: [*range(lo, hi)] for lo, hi in pairs if hi - lo > 1}

    @cached_property
    def _first(self) -> dict[int, int]:
        return {one: first for first, members in self._members.items() for one in members}

    def _group(self, at: int) -> list[int]:
        """What is issued as one with an instruction, itself among it."""
        return self._members.get(self._first.get(at, -1), [at])

    def _before(self, at: int) -> set[int]:
        """What an instruction waits for on its own rank; a group for what any member does."""
        members = self._group(at)
        found: set[int] = set()
        for one in members:
            found.update(self.graph.waits[:, one].tolist())
            found.add(int(self.graph.queue_predecessor[one]))
        return found - {NONE, *members}

    @cached_property
    def _meets(self) -> dict[int, list[int]]:
        """The members of the collective that an instruction is of, itself among them."""
        return {
            one: members.tolist() for members in self.graph.collective_groups
            for one in members.tolist()
        }  # fmt: skip

    @cached_property
    def sure(self) -> NDArray[np.bool_]:
        """What has surely ended: all that stands before what has, and who sent what has come."""
        sure = self.ended.copy()
        left = np.flatnonzero(sure).tolist()
        receives = self.graph.index.is_op(RECEIVES)
        while left:
            at = left.pop()
            before = {n for n in self.graph.needs[:, at].tolist() if n != NONE}
            queued = int(self.graph.queue_predecessor[at])
            before |= {queued} - {NONE, *self._group(at)}
            if receives[at] and (send := int(self.graph.partner[at])) != NONE:
                before |= {n for n in self.graph.needs[:, send].tolist() if n != NONE}
            before.update(self._meets.get(at, ()))
            for one in before:
                if not sure[one]:
                    sure[one] = True
                    left.append(one)
        return sure

    @property
    def contradicts(self) -> tuple[int, int] | None:
        """A transfer that has not ended, and one behind it in its queue that has, if any."""
        wrong = np.flatnonzero(self.sure & self.transfer & ~self.ended & ~self.silent)
        for at in wrong.tolist():
            behind = np.flatnonzero((self.graph.queue == self.graph.queue[at]) & self.ended)
            if (behind := behind[behind > at]).size:
                return at, int(behind[0])
        for turns in self.matched.apart:  # what has process groups of its own has queues of its own
            queues = {*self.graph.queue[turns].tolist()}
            mine = self.rank[turns[0]]
            others = np.flatnonzero(self.transfer & (self.rank == mine) & self.matched.issued)
            others = np.setdiff1d(others, turns)
            both = others[np.isin(self.graph.queue[others], [*queues])]
            if both.size:
                return int(turns[0]), int(both[0])
        return None

    @cached_property
    def may(self) -> NDArray[np.bool_]:
        """What may have ended: transfers that have, and all else that nothing else keeps."""
        may = np.where(self.transfer, self.ended | (self.sure & self.silent), self.sure)
        order = np.flatnonzero(~self.transfer & ~may).tolist()
        found = True
        while found:
            found = False
            left = []
            for at in order:
                if all(may[one] for one in self._keeps(at)):
                    may[at] = found = True
                else:
                    left.append(at)
            order = left
        return may

    def _keeps(self, at: int) -> set[int]:
        """What an instruction that is no transfer waits for, with all members of its collective."""
        members = self._meets.get(at, [at])
        return set().union(*map(self._before, members)) - {*members}

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks whose dumps are older than others: what they have not issued has come elsewhere."""
        came = np.flatnonzero(self.graph.index.is_op(RECEIVES) & self.matched.ended)
        sends = self.graph.partner[came]
        unsaid = sends[~self.matched.issued[sends] & ~self.silent[sends]]
        return tuple(sorted({int(rank) for rank in self.rank[unsaid]}))

    # ------------------------------------------------------------ where ranks stand

    def place(self, rank: int) -> Place:
        """Where a rank of the program stands."""
        lo, hi = self.graph.program.offsets[rank : rank + 2].tolist()
        issued = self.matched.issued
        last = max((k for k in range(lo, hi) if self.transfer[k] and issued[k]), default=lo - 1)
        open_ = [k for k in range(lo, hi) if self.transfer[k] and not self.ended[k]]
        for at in range(lo, hi):
            if self.transfer[at] and issued[at]:
                continue
            if self.transfer[at]:
                kept = [n for n in self._before(at) if not self.may[n]]
                if not kept:
                    return Place(rank, at, True, (last + 1, at))
                return Place(rank, self._transfer_before(kept), False, (at, at))
            if not self.may[at]:
                kept = [n for n in self._keeps(at) if not self.may[n]]
                return Place(rank, self._transfer_before(kept), False, (at, at))
        stands = self._transfer_before(open_[:1]) if open_ else None
        return Place(rank, stands, False, (last + 1, hi))

    def _transfer_before(self, kept: list[int]) -> int:
        """The transfer or collective that has not ended, first found going back.

        Of transfers it is the head of the queue.
        """
        seen: set[int] = set()
        while kept:
            at = kept.pop(0)
            if self.transfer[at]:
                ahead = [n for n in self._before(at) if self.transfer[n] and not self.may[n]]
                if not ahead or at in seen:
                    return at
                seen.add(at)
                kept = [min(ahead)]
                continue
            if len(self._meets.get(at, ())) > 1:
                return at
            if at not in seen:
                seen.add(at)
                kept += sorted(n for n in self._keeps(at) if not self.may[n])
        raise AssertionError("nothing keeps what has not ended")

    # ------------------------------------------------------------ why

    def next(self, at: int) -> Link | Cause:
        """What a transfer that has not ended waits for: another one, or the end of the chain.

        A batch is over when all of it is, so one looks at all that is issued as one, on both sides.
        """
        if not self.transfer[at]:
            kept = [n for n in sorted(self._keeps(at)) if not self.may[n]]
            return Link(at, self._transfer_before(kept))
        seen, left = {at}, [at]
        suspects = []
        while left:
            one = left.pop(0)
            if (found := self._keeper(one)) is not None:
                return found if isinstance(found, Cause) else Link(at, found)
            other = self._other(one)
            if not self.ended[other]:
                sides = (one, other) if self.graph.index.op[one] in SENDS else (other, one)
                suspects += [side for side in sides if self._is_suspect(side)]
            around = [other, *self._group(one), *self._group(other)]
            fresh = [n for n in dict.fromkeys(around) if n not in seen and not self.ended[n]]
            seen.update(fresh)
            left += fresh
        if suspects:
            return Cause(Kind.BUSY, tuple(dict.fromkeys(suspects)))
        stuck = [n for n in sorted(seen) if not self.ended[n] and not self.ended[self._other(n)]]
        if stuck:
            return Cause(Kind.STUCK, tuple(sorted((stuck[0], self._other(stuck[0])))))
        return Cause(Kind.ENDED, (at,))

    def _other(self, at: int) -> int:
        return int(self.graph.partner[at])

    def _is_suspect(self, at: int) -> bool:
        """Whether a side of a message may not have started because of what its rank computes.

        A send needs its value; on a GPU either side waits for all kernels that were issued before.
        """
        lo = int(self.graph.program.offsets[int(self.rank[at])])
        before = ~self.transfer[lo:at] & ~self.sure[lo:at]
        # What the last step computed after its last transfer may not have ended, either.
        came = (self.transfer[lo:at] & self.ended[lo:at]).any()
        behind = before.any() or (self.matched.step != 0 and not came)
        return not self.matched.started[at] and bool(behind)

    def is_free(self, at: int) -> bool:
        """Whether nothing keeps what its rank computes before a transfer, in whatever order."""
        lo = int(self.graph.program.offsets[int(self.rank[at])])
        return bool((self.transfer[lo:at] | self.may[lo:at]).all())

    def _keeper(self, at: int) -> int | Cause | None:
        """What keeps a transfer on its own rank: another one, or its host, which is elsewhere."""
        if self.silent[at]:
            return None if self.ended[self.graph.partner[at]] else Cause(Kind.SILENT, (at,))
        if own := [n for n in sorted(self._before(at)) if not self.may[n]]:
            return self._transfer_before(own)
        if not self.matched.issued[at]:
            place = self.place(int(self.rank[at]))
            late = place.late or place.at is None
            return Cause(Kind.LATE, (at,)) if late else place.at
        return None

    def chain(self, at: int) -> tuple[list[Link], Cause | None]:
        """The waits from a transfer that has not ended to the cause; None for a circle."""
        links: list[Link] = []
        while True:
            found = self.next(at)
            if isinstance(found, Cause):
                return links, found
            links.append(found)
            if found.needs in [link.at for link in links]:
                return links, None
            at = found.needs

    def places(self) -> Iterator[Place]:
        """Where each rank of which there is a dump stands."""
        return (self.place(rank) for rank, there in enumerate(self.matched.dumped) if there)
