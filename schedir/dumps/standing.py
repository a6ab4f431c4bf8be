"""Standing: where each rank of a job stands, and who waits for whom, by what they have recorded.

No program is needed.  A rank waits at the first operation that it has issued and that has not
ended.  Whom that waits for is read off the other ranks' recordings: a message pairs with its other
side, the k-th from a to b in a process group with the k-th, and a collective with those of the same
number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from schedir.dumps.flight_recorder import Dump, Group, Op

# Collectives that end nowhere before all members have issued them.
_ALL: Final = re.compile(r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier").search
# Collectives whose members may come with different sizes.
_UNEVEN: Final = ("gather", "scatter", "all_to_all", "v", "v_single", "new_window", "split")


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: the last operation that has ended, and the first begun that has not.

    `since` is when the rank issued that, or else when it was last heard of, in nanoseconds, and
    `source` the file that says so.
    """

    rank: int
    ended: Op | None
    begun: Op | None
    since: int
    source: str


class Why(Enum):
    """What another rank does to an operation that has not ended.

    It has left no dump; it has not issued its part, or has behind another that has not ended; its
    part does not fit; or it is there, and so are all.
    """

    NO_DUMP = 0
    NOT_ISSUED = 1
    BEHIND = 2
    OTHER = 3
    THERE = 4


class Wait(NamedTuple):
    """An operation of `rank` that has not ended, and what its part on rank `on` does."""

    rank: int
    op: Op
    on: int
    why: Why
    part: Op | None


@dataclass(frozen=True)
class Job:
    """All that is known of a job: its dumps, and what they say together.

    `names` says more of operations than they do themselves, by rank and number.  Ranks that are
    `behind` have written their dumps before others have: what they have not issued has ended there.
    """

    dumps: Mapping[int, Dump]
    names: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: tuple[int, ...] = field(init=False)
    standing: Mapping[int, Standing] = field(init=False)
    waits: Mapping[int, tuple[Wait, ...]] = field(init=False)
    behind: tuple[int, ...] = field(init=False)
    _pairs: _Pairs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = {g for d in self.dumps.values() for g in (*d.groups, *(op.group for op in d.ops))}
        members = {id(group.ranks): group.ranks for group in groups}.values()
        ranks = {*self.dumps, *(rank for some in members for rank in some)}
        object.__setattr__(self, "ranks", tuple(sorted(ranks)))
        standing = {rank: _standing(dump) for rank, dump in self.dumps.items()}
        object.__setattr__(self, "standing", standing)
        pairs = _Pairs(self.dumps)
        waits = {rank: pairs.waits(rank) for rank in self.dumps}
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "behind", pairs.behind())
        object.__setattr__(self, "_pairs", pairs)

    def say(self, rank: int, op: Op) -> str:
        """An operation of a rank in words."""
        name = self.names.get((rank, op.number))
        return f"{op} ({name})" if name else str(op)

    def part(self, wait: Wait, rank: int) -> Op | None:
        """What a rank has recorded of an operation that another waits at, None if nothing."""
        return wait.op if rank == wait.rank else self._pairs.part(wait.rank, wait.op, rank)[1]

    def lost(self, wait: Wait) -> bool:
        """Whether one of the two has lost its beginning, so that a number says nothing of pairs."""
        return any(self.dumps[r].lost for r in (wait.rank, wait.on) if r in self.dumps)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of which there is no dump."""
        return tuple(rank for rank in self.ranks if rank not in self.dumps)

    @property
    def cycle(self) -> tuple[Wait, ...]:
        """Ranks that wait for each other, each for the next; empty if there are none."""
        return a_cycle(self.waits)

    @property
    def roots(self) -> tuple[int, ...]:
        """The ranks for which others wait, and which wait for nobody here."""
        waited = {wait.on for waits in self.waits.values() for wait in waits}
        return tuple(sorted(r for r in waited if not any(w.on != r for w in self.waits.get(r, ()))))

    @property
    def unmet(self) -> tuple[Wait, ...]:
        """What does not fit, or has not ended though all of its ranks are there."""
        every = [wait for waits in self.waits.values() for wait in waits]
        return tuple(wait for wait in every if wait.why in (Why.OTHER, Why.THERE))


def _standing(dump: Dump) -> Standing:
    begun = next((op for op in dump.ops if not op.ended), None)
    ended = next((op for op in reversed(dump.ops) if op.ended), None)
    since = begun.created if begun else dump.last_time
    return Standing(dump.rank, ended, begun, since, dump.path)


def a_cycle(waits: Mapping[int, tuple[Wait, ...]]) -> tuple[Wait, ...]:
    """The waits around a cycle, from the lowest rank that is found in one; empty if none is."""
    left = {rank: [w for w in own if w.why in _HELD] for rank, own in waits.items()}
    while done := [rank for rank, own in left.items() if not own]:
        for rank in done:
            del left[rank]
        left = {rank: [w for w in own if w.on in left] for rank, own in left.items()}
    if not left:
        return ()
    path: list[Wait] = []
    rank = min(left)
    while rank not in [wait.rank for wait in path]:
        path.append(left[rank][0])
        rank = path[-1].on
    return tuple(path[[wait.rank for wait in path].index(rank) :])


_HELD: Final = (Why.NOT_ISSUED, Why.BEHIND)


class _Pairs:
    """Who is the other side of what."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        self._members: dict[object, list[tuple[int, Why, Op | None]]] = {}
        # Messages of a rank by channel, and collectives by process group and number.
        self.sides: dict[tuple[int, Group, int, int], list[Op]] = defaultdict(list)
        self.parts: dict[tuple[int, Group], dict[int, list[Op]]] = defaultdict(dict)
        self.place: dict[tuple[int, int], int] = {}
        for rank, dump in dumps.items():
            for op in dump.ops:
                if op.is_message:
                    into = self.sides[self._channel(rank, op)]
                else:
                    into = self.parts[rank, op.group].setdefault(op.nth, [])
                self.place[rank, op.number] = len(into)
                into.append(op)
        self.newest = {key: max(parts) for key, parts in self.parts.items()}
        self.open: dict[tuple[int, Group, int, int], list[Op]] = defaultdict(list)
        self.open_place: dict[tuple[int, int], int] = {}
        for channel, sides in self.sides.items():
            self.open[channel] = [op for op in sides if not op.ended]
            for at, op in enumerate(self.open[channel]):
                self.open_place[channel[0], op.number] = at

    @staticmethod
    def _channel(rank: int, op: Op) -> tuple[int, Group, int, int]:
        ends = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
        return (rank, op.group, *ends)

    def behind(self) -> tuple[int, ...]:
        """The ranks that have not issued what has ended elsewhere, and cannot have without them."""
        found: set[int] = set()
        ended: dict[Group, int] = {}
        for (_, group), parts in self.parts.items():
            over = (n for n, some in parts.items() for op in some if op.ended and _ALL(op.kind))
            ended[group] = max(ended.get(group, 0), max(over, default=0))
        for group, last in ended.items():
            found |= {
                r for r in group.ranks if r in self.dumps and self.newest.get((r, group), 0) < last
            }
        for (rank, group, a, b), sides in self.sides.items():
            if rank == b and a in self.dumps and not (self.dumps[a].lost or self.dumps[b].lost):
                sent = len(self.sides.get((a, group, a, b), ()))
                found |= {a} if any(op.ended for op in sides[sent:]) else set()
        return tuple(sorted(found))

    @cached_property
    def heads(self) -> dict[int, tuple[Op, ...]]:
        """What each rank waits at: the first that has not ended, with all of its batch."""
        return {rank: _heads(dump) for rank, dump in self.dumps.items()}

    @cached_property
    def _head_numbers(self) -> dict[int, set[int]]:
        return {rank: {op.number for op in heads} for rank, heads in self.heads.items()}

    def waits(self, rank: int) -> tuple[Wait, ...]:
        """What the first of a rank that has not ended waits for."""
        found = [w for op in self.heads[rank] for w in self._waits_of(rank, op)]
        held = [wait for wait in found if wait.why is not Why.THERE]
        return tuple(held or found)

    def _waits_of(self, rank: int, op: Op) -> list[Wait]:
        if op.is_message:
            return [Wait(rank, op, op.peer, *self.part(rank, op, op.peer))]
        # What members do is the same for all that have issued the same: it is asked once for all.
        key = (op.group, op.nth, self.place[rank, op.number], op.kind, op.sizes, op.dtypes)
        if key not in self._members:
            every = [(other, *self.part(rank, op, other)) for other in op.group.ranks]
            held = [one for one in every if one[1] is not Why.THERE]
            self._members[key] = held or every
        return [Wait(rank, op, *one) for one in self._members[key] if one[0] != rank]

    def part(self, rank: int, op: Op, other: int) -> tuple[Why, Op | None]:
        """What the part of another rank in an operation does, and which it is."""
        if other not in self.dumps:
            return Why.NO_DUMP, None
        part = self.other_side(rank, op) if op.is_message else self._member(rank, op, other)
        if part is None:
            # Of a collective that is no longer in its buffer, the rank has had it.
            later = not op.is_message and self.newest.get((other, op.group), 0) > op.nth
            return (Why.THERE if later else Why.NOT_ISSUED), None
        if _differ(op, part):
            return Why.OTHER, part
        behind = not part.ended and part.number not in self._head_numbers[other]
        return (Why.BEHIND if behind else Why.THERE), part

    def _member(self, rank: int, op: Op, other: int) -> Op | None:
        """The collective of another rank with the number of this one; of a batch, the same one."""
        found = self.parts.get((other, op.group), {}).get(op.nth, [])
        at = self.place[rank, op.number]
        return found[min(at, len(found) - 1)] if found else None

    def other_side(self, rank: int, op: Op) -> Op | None:
        """The recording of the other side of a message, None if that rank has not issued it."""
        _, group, a, b = self._channel(rank, op)
        theirs, place = self.sides, self.place
        if self.dumps[rank].lost or self.dumps[op.peer].lost:
            # Where the beginning is lost, what has not ended is paired in order.
            if op.ended:
                return None
            theirs, place = self.open, self.open_place
        sides, at = theirs.get((op.peer, group, a, b), []), place[rank, op.number]
        return sides[at] if at < len(sides) else None


def _heads(dump: Dump) -> tuple[Op, ...]:
    left = [op for op in dump.ops if not op.ended]
    return tuple(op for op in left if op is left[0] or (op.batch and op.batch == left[0].batch))


def _differ(op: Op, part: Op) -> bool:
    """Whether two parts of one operation cannot be."""
    if op.is_message:
        return sum(map(prod, op.sizes)) != sum(map(prod, part.sizes)) or op.dtypes != part.dtypes
    if op.kind != part.kind:
        return True
    if op.kind.removesuffix("_base").endswith(_UNEVEN):
        return False
    return op.sizes != part.sizes or op.dtypes != part.dtypes
