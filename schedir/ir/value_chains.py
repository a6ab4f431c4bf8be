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

from schedir.ir.instruction_index import NONE, Positions
from schedir.ir.isa.instructions import TIERS, Change

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

NO_FORM: Final = -1  # that of the token itself
_ANY: Final = -2


class ChainMember(NamedTuple):
    """Instructions of one row, and the values that they touch: whether they give these, and make
    them, and how they change them, if they do."""

    at: Positions
    key: Ints
    gives: bool
    makes: bool
    change: Change | None


class ValueChains(NamedTuple):
    """Events by value and position: `gives` are makers and changes, the others free.

    `tier` and `form` are what the value is after each event, `last` the form after the last change
    of its life; `moves` says that the tier changes.
    """

    at: Positions
    key: Ints
    gives: Mask
    makes: Mask
    moves: Mask
    tier: Ints
    form: Ints
    last: Ints
    forms: tuple[str, ...]
    lies: str

    @classmethod
    def of(
        cls, parts: Sequence[ChainMember], *, collected: bool = False, lies: str = ""
    ) -> ValueChains:
        """All events that some rows make.

        Of what is `collected` from many, who gives it first makes it, and others add to it; what
        `lies` on a tier is there from the start.
        """
        names = [name for part in parts for name in _states(part.change) if name not in TIERS]
        forms = tuple(dict.fromkeys(names))

        def column(value: Sequence[int]) -> Ints:
            return np.repeat(np.array(value, np.int64), [len(part.at) for part in parts])

        at = np.concatenate([np.empty(0, np.int32), *(part.at for part in parts)])
        key = np.concatenate([np.empty(0, np.int64), *(part.key for part in parts)])
        sort = np.lexsort((at, key))
        gives = column([part.gives for part in parts])[sort] > 0
        makes = column([part.makes for part in parts])[sort] > 0
        key = key[sort]
        first = np.append(True, key[1:] != key[:-1])[: len(key)]
        if collected:
            makes = gives & (first | np.append(True, ~gives[:-1])[: len(key)])
        life = np.cumsum(makes | first) - 1
        begins = np.flatnonzero(makes | first)

        def state(names: Sequence[str], rest: int) -> tuple[Ints, Ints, Mask]:
            """What it is after each event, after the last of its life, and which events set it."""
            places = {name: k for k, name in enumerate(names)}
            ends = [_states(part.change) or ("", "") for part in parts]
            before, after = (
                column([places.get(end[side], _ANY) for end in ends])[sort] for side in (0, 1)
            )
            sets = after != _ANY
            start, end = np.full((2, len(begins)), rest)
            at = np.flatnonzero(sets)
            end[life[at]] = after[at]
            if names is not TIERS:  # who makes a value does so in the first of these
                start[life[at[::-1]]] = before[at[::-1]]
            known = np.where(sets, after, _ANY)
            known[begins] = np.where(sets[begins], after[begins], start)
            since = np.maximum.accumulate(np.where(known != _ANY, np.arange(len(known)), 0))
            return known[since], end[life], sets

        tier, _, moves = state(TIERS, 0)
        form, last, _ = state(forms, NO_FORM)
        return cls(at[sort], key, gives, makes, moves, tier, form, last, forms, lies)

    def _fits(self, event: Ints, change: Change | None) -> Mask:
        """Whether the value is, after each of some events, as who comes next wants it."""
        tier = TIERS.index(change.before) if change and change.before in TIERS else 0
        fits: Mask = self.gives[event] & (self.tier[event] == tier)
        if change is None:
            fits &= self.form[event] == self.last[event]
        elif change.before in self.forms:
            fits &= self.form[event] == self.forms.index(change.before)
        return fits

    def givers(
        self, key: Ints, needer: Positions, change: Change | None
    ) -> tuple[Positions, list[tuple[int, int]]]:
        """Who gives a value to each of some instructions, and who has left it unfit for which.

        The giver is the nearest earlier event if that leaves the value fit, else the next event
        that will; -1 where nothing touches the value, or it lies there fit before anything does.
        """
        giver = np.full(len(needer), NONE, np.int32)
        stale: list[tuple[int, int]] = []
        if not len(self.at):
            return giver, stale
        span = max(int(self.at.max()), int(needer.max(initial=0))) + 1
        order = self.key * span + self.at
        event = np.searchsorted(order, key * span + needer) - 1
        near = np.maximum(event, 0)
        known = (event >= 0) & (self.key[near] == key)
        fits = known & self._fits(near, change)
        giver[fits] = self.at[near[fits]]
        if self.lies and (change.before if change else TIERS[0]) == self.lies:
            fits |= ~known
        for k in np.flatnonzero(~fits & np.isin(key, self.key)).tolist():
            one, where = int(key[k]), int(needer[k])
            later = np.flatnonzero((self.key == one) & (self.at > where))
            later = later[self._fits(later, change)]
            if len(later):
                giver[k] = self.at[later[0]]
            elif known[k]:
                stale.append((where, int(self.at[near[k]])))
            elif len(later := np.flatnonzero((self.key == one) & self.makes)):
                giver[k] = self.at[later[0]]
        return giver, stale

    def too_many(self) -> list[tuple[int, int]]:
        """Who makes a value that is still there, and who has left it there."""
        again = self.makes[1:] & self.gives[:-1] & (self.key[1:] == self.key[:-1])
        return [(int(self.at[k + 1]), int(self.at[k])) for k in np.flatnonzero(again).tolist()]

    def left(self) -> list[int]:
        """Who touches values last that nobody frees."""
        end = np.append(self.key[1:] != self.key[:-1], True)[: len(self.at)]
        return [int(at) for at in self.at[end & self.gives]]

    def _pieces(self, among: Ints) -> tuple[Ints, Ints]:
        """Events that give, and what comes next to the same value, of those among which we look."""
        one, two = among[:-1], among[1:]
        whole = self.gives[one] & (self.key[one] == self.key[two]) & ~self.makes[two]
        one, two = one[whole], two[whole]
        sort = np.argsort(self.at[one], kind="stable")
        return one[sort], two[sort]

    def on_tier(self, tier: int) -> tuple[Positions, Positions]:
        """Where values come to a tier, and where they leave it or are freed."""
        one, two = self._pieces(np.flatnonzero(self.makes | self.moves | ~self.gives))
        here = self.tier[one] == tier
        return self.at[one[here]], self.at[two[here]]

    def pieces(self) -> tuple[Positions, Positions, Ints, Ints, Mask, Mask]:
        """As `flow.States`."""
        one, two = self._pieces(np.arange(len(self.at)))
        return (
            self.at[one], self.at[two], self.tier[one], self.form[one],
            self.makes[one], ~self.gives[two],
        )  # fmt: skip


def _states(change: Change | None) -> tuple[str, ...]:
    """What a value is before and after a change; nothing where there is none."""
    return (change.before, change.after) if change else ()
