"""Find the instructions that make, change and free each value, in the order of the Stream.

This module is for kinds of values that are made several times, or that change their state.  A state
is a memory tier or a form.  A form is a field of `Sizes`.  A new value has the form that its first
change of form needs.  A reader needs the value on the device, in the form after its last change of
form.  An instruction that reads the value in another state has a `Change` in its row.
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

NO_FORM: Final = -1  # the size in the value's row of `VALUES`
_UNCHANGED: Final = -2  # an event that does not change the state


class ChainMember(NamedTuple):
    """The instructions of one row, and the values that they make, change or free.

    Attributes:
        positions: Position of each instruction.
        keys: Key of the value of each instruction.
        is_giver: True if the instructions give the values, False if they free the values.
        is_producer: True if the instructions make the values.
        change: The change of the values' state; None if there is none.
    """

    positions: Positions
    keys: Ints
    is_giver: bool
    is_producer: bool
    change: Change | None


class ValueChains(NamedTuple):
    """All events of all values of one kind, ordered by value and then by position.

    An event is an instruction that makes, changes or frees a value.

    Attributes:
        positions: Position of each event, shape (events,).
        keys: Key of the value of each event.
        is_giver: True for events that make or change the value, False for those that free it.
        is_producer: True for events that make the value.
        changes_tier: True for events that move the value to another memory tier.
        tier: Memory tier after each event, as an index into TIERS.
        form: Form after each event, as an index into `forms`; NO_FORM is the size in the value's
            row of `VALUES`.
        final_form: Form of each event's value after the last change of this value, as an index into
            `forms`.
        forms: The forms of the values, as names of fields of `Sizes`.
        initial_tier: The memory tier on which the values exist from the start; "" if instructions
            make them.
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
        """Sort instructions into the chains of their values.

        Args:
            members: The instructions of each row of the instruction table that uses the values.
            accumulated: True for values that several instructions add to.  The first instruction
                that gives such a value makes it.
            initial_tier: The memory tier on which the values exist from the start; "" if
                instructions make them.
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
            """Return the state after each event, and the last state of each event's value.

            The third result is a mask of the events that set a state.
            """
            places = {name: k for k, name in enumerate(names)}
            ends = [_get_change_states(part.change) or ("", "") for part in members]
            before, after = (
                column([places.get(end[side], _UNCHANGED) for end in ends])[sort] for side in (0, 1)
            )
            sets = after != _UNCHANGED
            start, end = np.full((2, len(begins)), rest)
            at = np.flatnonzero(sets)
            end[life[at]] = after[at]
            if names is not TIERS:  # a value is made in the first form of its changes
                start[life[at[::-1]]] = before[at[::-1]]
            known = np.where(sets, after, _UNCHANGED)
            known[begins] = np.where(sets[begins], after[begins], start)
            since = np.maximum.accumulate(np.where(known != _UNCHANGED, np.arange(len(known)), 0))
            return known[since], end[life], sets

        tier, _, moves = state(TIERS, 0)
        form, last, _ = state(forms, NO_FORM)
        return cls(at[sort], key, gives, makes, moves, tier, form, last, forms, initial_tier)

    def _has_required_state(self, events: Ints, change: Change | None) -> Mask:
        """Return a mask of the events after which a reader with `change` can use the value."""
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
        """Return the givers of values, and the events that leave a value in a wrong state.

        The giver is the nearest earlier event, if it leaves the value in the required state.
        Otherwise the giver is the next later event that leaves the value in this state.  If there
        is neither such a later event nor any earlier event, the giver is the first maker.

        Args:
            key: Key of the value that each instruction needs, shape (needers,).
            needer: Positions of the instructions that need the values, shape (needers,).
            change: The change that the instructions make; None if they only read the values.

        Returns:
            The positions of the givers, shape (needers,), and a list of pairs of positions: an
            instruction, and the event that left its value in a wrong state.  A giver is -1 if the
            value has no events, if its initial state is right, or if the list has a pair for the
            instruction.
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
        """Return the instructions that make a value again before it is freed.

        Returns:
            Pairs of positions: the instruction, and the previous event of the value.
        """
        again = self.is_producer[1:] & self.is_giver[:-1] & (self.keys[1:] == self.keys[:-1])
        return [
            (int(self.positions[k + 1]), int(self.positions[k]))
            for k in np.flatnonzero(again).tolist()
        ]

    def find_unfreed(self) -> list[int]:
        """Return the position of the last event of each value that no instruction frees."""
        end = np.append(self.keys[1:] != self.keys[:-1], True)[: len(self.positions)]
        return [int(at) for at in self.positions[end & self.is_giver]]

    def _find_intervals(self, events: Ints) -> tuple[Ints, Ints]:
        """Return the events that make or change a value, and the next event of each such value.

        Events that are not in `events` are ignored. A pair is left out if its second event makes
        the value again.
        """
        one, two = events[:-1], events[1:]
        same_life = self.is_giver[one] & (self.keys[one] == self.keys[two]) & ~self.is_producer[two]
        one, two = one[same_life], two[same_life]
        sort = np.argsort(self.positions[one], kind="stable")
        return one[sort], two[sort]

    def find_tier_intervals(self, tier: int) -> tuple[Positions, Positions]:
        """Return the intervals in which values are on a memory tier.

        Args:
            tier: The memory tier, as an index into TIERS.

        Returns:
            The positions at which values are made on the tier or move to it, ascending, and the
            positions at which these values leave the tier or are freed.
        """
        one, two = self._find_intervals(
            np.flatnonzero(self.is_producer | self.changes_tier | ~self.is_giver)
        )
        here = self.tier[one] == tier
        return self.positions[one[here]], self.positions[two[here]]

    def find_state_intervals(self) -> tuple[Positions, Positions, Ints, Ints, Mask, Mask]:
        """Return the fields of `ValueStates`."""
        one, two = self._find_intervals(np.arange(len(self.positions)))
        return (
            self.positions[one], self.positions[two], self.tier[one], self.form[one],
            self.is_producer[one], ~self.is_giver[two],
        )  # fmt: skip


def _get_change_states(change: Change | None) -> tuple[str, ...]:
    """Return the states before and after a change; empty if there is none."""
    return (change.before, change.after) if change else ()
