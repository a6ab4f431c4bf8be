"""Find all instructions that touch a value, in the order of the Stream.

For values that are made again and again, or that change their state on the way: where they lie (a
tier), and in which form (a field of Sizes).  Who makes a value leaves it in the form that the first
change wants.  A reader wants it as the last change leaves it, in the first tier, unless its own row
says by a `Change` where, and in which form, it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.instruction_index import NO_POSITION, Positions
from schedir.ir.isa.instructions import TIERS, Change

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NO_FORM: Final = -1  # that of the token itself
_UNCHANGED: Final = -2


class ChainMember(NamedTuple):
    """Instructions of one row, and the values that they touch: whether they give these, and make
    them, and how they change them, if they do."""

    positions: Positions
    keys: Ints
    is_giver: bool
    is_producer: bool
    change: Change | None


class ValueChains(NamedTuple):
    """Events by value and position: `is_giver` are makers and changes, the others free.

    `tier` and `form` are what the value is after each event, `final_form` the form after the last
    change of its life; `changes_tier` says that the tier changes.
    """

    positions: Positions
    keys: Ints
    is_giver: Mask
    is_producer: Mask
    changes_tier: Mask
    tier: Ints
    form: Ints
    final_form: Ints
    forms: tuple[str, ...]
    initial_tier: str

    @classmethod
    def from_members(
        cls, members: Sequence[ChainMember], *, accumulated: bool = False, initial_tier: str = ""
    ) -> ValueChains:
        """All events that some rows make.

        Of what is `accumulated` from many, who gives it first makes it, and others add to it; what
        `initial_tier` on a tier is there from the start.
        """
        names = [
            name
            for part in members
            for name in _get_change_states(part.change)
            if name not in TIERS
        ]
        forms = tuple(dict.fromkeys(names))

        def column(value: Sequence[int]) -> Ints:
            return np.repeat(np.array(value, np.int64), [len(part.positions) for part in members])

        at = np.concatenate([np.empty(0, np.int32), *(part.positions for part in members)])
        key = np.concatenate([np.empty(0, np.int64), *(part.keys for part in members)])
        sort = np.lexsort((at, key))
        gives = column([part.is_giver for part in members])[sort] > 0
        makes = column([part.is_producer for part in members])[sort] > 0
        key = key[sort]
        first = np.append(True, key[1:] != key[:-1])[: len(key)]
        if accumulated:
            makes = gives & (first | np.append(True, ~gives[:-1])[: len(key)])
        life = np.cumsum(makes | first) - 1
        begins = np.flatnonzero(makes | first)

        def state(names: Sequence[str], rest: int) -> tuple[Ints, Ints, Mask]:
            """What it is after each event, after the last of its life, and which events set it."""
            places = {name: k for k, name in enumerate(names)}
            ends = [_get_change_states(part.change) or ("", "") for part in members]
            before, after = (
                column([places.get(end[side], _UNCHANGED) for end in ends])[sort] for side in (0, 1)
            )
            sets = after != _UNCHANGED
            start, end = np.full((2, len(begins)), rest)
            at = np.flatnonzero(sets)
            end[life[at]] = after[at]
            if names is not TIERS:  # who makes a value does so in the first of these
                start[life[at[::-1]]] = before[at[::-1]]
            known = np.where(sets, after, _UNCHANGED)
            known[begins] = np.where(sets[begins], after[begins], start)
            since = np.maximum.accumulate(np.where(known != _UNCHANGED, np.arange(len(known)), 0))
            return known[since], end[life], sets

        tier, _, moves = state(TIERS, 0)
        form, last, _ = state(forms, NO_FORM)
        return cls(at[sort], key, gives, makes, moves, tier, form, last, forms, initial_tier)

    def _has_required_state(self, events: Ints, change: Change | None) -> Mask:
        """Whether the value is, after each of some events, as who comes next wants it."""
        tier = TIERS.index(change.before) if change and change.before in TIERS else 0
        fits: Mask = self.is_giver[events] & (self.tier[events] == tier)
        if change is None:
            fits &= self.form[events] == self.final_form[events]
        elif change.before in self.forms:
            fits &= self.form[events] == self.forms.index(change.before)
        return fits

    def find_givers(
        self, key: Ints, needer: Positions, change: Change | None
    ) -> tuple[Positions, list[tuple[int, int]]]:
        """Who gives a value to each of some instructions, and who has left it unfit for which.

        The giver is the nearest earlier event if that leaves the value fit, else the next event
        that will; -1 where nothing touches the value, or it lies there fit before anything does.
        """
        giver = np.full(len(needer), NO_POSITION, np.int32)
        stale: list[tuple[int, int]] = []
        if not len(self.positions):
            return giver, stale
        span = max(int(self.positions.max()), int(needer.max(initial=0))) + 1
        order = self.keys * span + self.positions
        event = np.searchsorted(order, key * span + needer) - 1
        near = np.maximum(event, 0)
        known = (event >= 0) & (self.keys[near] == key)
        fits = known & self._has_required_state(near, change)
        giver[fits] = self.positions[near[fits]]
        if self.initial_tier and (change.before if change else TIERS[0]) == self.initial_tier:
            fits |= ~known
        for k in np.flatnonzero(~fits & np.isin(key, self.keys)).tolist():
            one, where = int(key[k]), int(needer[k])
            later = np.flatnonzero((self.keys == one) & (self.positions > where))
            later = later[self._has_required_state(later, change)]
            if len(later):
                giver[k] = self.positions[later[0]]
            elif known[k]:
                stale.append((where, int(self.positions[near[k]])))
            elif len(later := np.flatnonzero((self.keys == one) & self.is_producer)):
                giver[k] = self.positions[later[0]]
        return giver, stale

    def find_overwrites(self) -> list[tuple[int, int]]:
        """Who makes a value that is still there, and who has left it there."""
        again = self.is_producer[1:] & self.is_giver[:-1] & (self.keys[1:] == self.keys[:-1])
        return [
            (int(self.positions[k + 1]), int(self.positions[k]))
            for k in np.flatnonzero(again).tolist()
        ]

    def find_unfreed(self) -> list[int]:
        """Who touches values last that nobody frees."""
        end = np.append(self.keys[1:] != self.keys[:-1], True)[: len(self.positions)]
        return [int(at) for at in self.positions[end & self.is_giver]]

    def _find_intervals(self, events: Ints) -> tuple[Ints, Ints]:
        """Events that give, and what comes next to the same value, of those among which we look."""
        one, two = events[:-1], events[1:]
        whole = self.is_giver[one] & (self.keys[one] == self.keys[two]) & ~self.is_producer[two]
        one, two = one[whole], two[whole]
        sort = np.argsort(self.positions[one], kind="stable")
        return one[sort], two[sort]

    def find_tier_intervals(self, tier: int) -> tuple[Positions, Positions]:
        """Where values come to a tier, and where they leave it or are freed."""
        one, two = self._find_intervals(
            np.flatnonzero(self.is_producer | self.changes_tier | ~self.is_giver)
        )
        here = self.tier[one] == tier
        return self.positions[one[here]], self.positions[two[here]]

    def find_state_intervals(self) -> tuple[Positions, Positions, Ints, Ints, Mask, Mask]:
        """As `flow.States`."""
        one, two = self._find_intervals(np.arange(len(self.positions)))
        return (
            self.positions[one], self.positions[two], self.tier[one], self.form[one],
            self.is_producer[one], ~self.is_giver[two],
        )  # fmt: skip


def _get_change_states(change: Change | None) -> tuple[str, ...]:
    """What a value is before and after a change; nothing where there is none."""
    return (change.before, change.after) if change else ()
