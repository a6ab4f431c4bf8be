"""Slots: the static buffers that the values of a rank live in, and who must have left one first.

A value lives in a slot of its rank and kind, from the start of the instruction that gives it to
the end of the one that frees it.  Slots are taken along the Stream, each fill taking the slot
that was freed earliest.  So of a kind with c slots the k-th fill takes what the (k-c)-th free
has left, and how many slots there are says all: which slot each value gets, and whom each fill
waits for.  That is interval colouring: c slots do if and only if no more than c values overlap.

What is taken in (ACT_IN, GRAD_IN) is filled by receives.  What is put out (ACT_OUT, GRAD_OUT) is
filled by compute and read by a send, or by the neighbouring stage's compute on the same rank.
SAVED and TAPE are filled and freed by compute alone, which is in order anyway: for them the
fewest slots cost nothing, and nobody has to say how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.index import NONE, Index, Positions
from schedir.ir.ops import BOUNDARY, HANDED, ROWS, Token, makers
from schedir.ir.program import Slots

KINDS: Final = (*BOUNDARY, Token.SAVED, Token.TAPE)  # the number of the first four is a choice

_FILLS: Final = {kind: np.array([row.op in makers(kind) for row in ROWS]) for kind in KINDS}
# Who frees a value, and how many stages further on: what is handed over is freed by its taker.
_FREERS: Final = {
    kind: [(r.op, 0) for r in ROWS if kind in r.frees]
    + [
        (r.op, -hop)
        for taken, (made, hop) in HANDED.items()
        for r in ROWS
        if made is kind and taken in r.frees
    ]
    for kind in KINDS
}


class Uses(NamedTuple):
    """The values of one kind, by where they are filled and freed.

    `fill` has the position that fills each value, rank by rank and along each Stream, `freed`
    the position that frees it, and `free` the latter in order.  Rank r has the values from
    `first[r]` to `first[r + 1]`.
    """

    fill: Positions
    freed: Positions
    free: Positions
    first: NDArray[np.intp]

    def peak(self, group: Positions) -> NDArray[np.int64]:
        """The most values that overlap along each Stream: the fewest slots there can be.

        `group` numbers the groups of instructions that are issued as one: what one of them
        frees is not free for another.
        """
        fills = group[self.fill]
        alive = np.arange(1, len(fills) + 1) - np.searchsorted(group[self.free], fills)
        return self.most(alive)

    def most(self, each: NDArray[Any]) -> NDArray[Any]:
        """The largest of each rank's numbers, or 0; `each` has one for each fill."""
        most = np.zeros(len(self.first) - 1, each.dtype)
        here = np.flatnonzero(np.diff(self.first))
        if len(here):
            most[here] = np.maximum.reduceat(each, self.first[here])
        return most


def uses(index: Index, kind: Token) -> Uses:
    """Where the values of a kind are filled and freed; those that nobody frees are none."""
    plan = index.program.plan
    fill = np.flatnonzero(_FILLS[kind][index.op] & index.valid).astype(np.int32)
    stage, key = index.stage[fill].astype(np.int32), index.key[fill]
    free = np.full(len(fill), NONE, np.int32)
    for op, hop in _FREERS[kind]:
        if op in index.at:
            there = (stage + hop >= 0) & (stage + hop < plan.stages)
            found = index.where(op, np.where(there, key + hop * plan.microbatches, NONE))
            free = np.where(free == NONE, found, free)
    own = (free != NONE) & (index.rank[free] == index.rank[fill])
    fill, freed = fill[own], free[own]
    return Uses(fill, freed, np.sort(freed), np.searchsorted(fill, index.program.offsets))


def fewest(index: Index) -> NDArray[np.int64]:
    """The fewest slots of each rank and kind, shape (ranks, kinds), kinds as in KINDS."""
    group = groups(index)
    return np.stack([uses(index, kind).peak(group) for kind in KINDS], 1)


def groups(index: Index) -> Positions:
    """The number of each instruction's group: of those that are issued as one."""
    return np.cumsum(~index.joined, dtype=np.int32)


def reuses(index: Index, slots: Sequence[Slots]) -> Positions:
    """Who frees the slot that each instruction fills; NONE where it is the slot's first value.

    `slots` has an entry per rank.  No instruction fills two slots of kinds whose number is a
    choice.
    """
    freed = np.full(len(index), NONE, np.int32)
    for kind, count in zip(BOUNDARY, np.array(slots).T, strict=True):
        fill, _, free, first = uses(index, kind)
        taken = np.arange(len(fill)) - np.repeat(count, np.diff(first))
        again = taken >= np.repeat(first[:-1], np.diff(first))
        freed[fill[again]] = free[taken[again]]
    return freed


def counts(index: Index) -> NDArray[np.int64]:
    """How many slots each rank has of each kind, shape (ranks, kinds), kinds as in KINDS.

    Where the program does not say, each value has its own, and there are never more.  Of SAVED
    and TAPE there are the fewest.
    """
    said, group = np.array(index.program.slots, np.int64), groups(index)
    columns = []
    for k, kind in enumerate(KINDS):
        own = uses(index, kind)
        if kind in BOUNDARY:
            values = np.diff(own.first)
            columns.append(np.minimum(said[:, k], values) if len(said) else values)
        else:
            columns.append(own.peak(group))
    return np.stack(columns, 1)


def assign(index: Index, rank: int) -> dict[tuple[Token, int, int], int]:
    """The slot of each value of a rank, by kind, stage and microbatch; from 0 in each kind."""
    slots: dict[tuple[Token, int, int], int] = {}
    for kind, count in zip(KINDS, counts(index)[rank].tolist(), strict=True):
        fill, freed, _, first = uses(index, kind)
        own = slice(first[rank], first[rank + 1])
        place = list(range(count))  # of the k-th fill: first those never used, then as they free
        order = np.argsort(freed[own], kind="stable").tolist()
        for k, at in enumerate(fill[own].tolist()):
            if k >= count:
                place.append(place[order[k - count]])
            slots[kind, int(index.stage[at]), int(index.mb[at])] = place[k]
    return slots
