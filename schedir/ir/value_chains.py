"""Find the instructions that make, change and free each value, in the order of the Stream.

This module is for kinds of values that are made several times, or that change their state.  A state
is a memory tier or a form.  A form is a field of `Sizes`.  A new value has the form that its first
change of form needs.  An instruction that only reads a value needs it on the device, in the form
after its last change of form.  If an instruction reads a value in another state, its row of the
instruction table has a `Change`.
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
        is_giver: True if the instructions make or change the values, False if they free the values.
        is_producer: True if the instructions make the values, False if they change or free the
            values.
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
        final_form: For each event, the last form of its value, as an index into `forms`.
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
        """Group instructions by value, and sort each group by position.

        Args:
            members: One member for each row of the instruction table whose instructions make,
                change or free the values.
            accumulated: True for values that several instructions add to.  The first of these
                instructions makes the value.  If the value is freed, the next of these instructions
                makes it again.
            initial_tier: The memory tier on which the values exist from the start; "" if
                instructions make them.
        """
        if not members:  # as for the optimizer states of most programs
            no_numbers, no_events = np.empty(0, np.int64), np.empty(0, bool)
            return cls(
                np.empty(0, np.int32), no_numbers, no_events, no_events, no_events,
                no_numbers, no_numbers, no_numbers, (), initial_tier,
            )  # fmt: skip
        names = [
            name
            for member in members
            for name in _get_change_states(member.change)
            if name not in TIERS
        ]
        forms = tuple(dict.fromkeys(names))

        def column(value: Sequence[int]) -> Ints:
            return np.repeat(
                np.array(value, np.int64), [len(member.positions) for member in members]
            )

        positions = np.concatenate(
            [np.empty(0, np.int32), *(member.positions for member in members)]
        )
        key = np.concatenate([np.empty(0, np.int64), *(member.keys for member in members)])
        order = np.lexsort((positions, key))
        is_giver = column([member.is_giver for member in members])[order] > 0
        is_producer = column([member.is_producer for member in members])[order] > 0
        key = key[order]
        is_first = np.append(True, key[1:] != key[:-1])[: len(key)]
        if accumulated:
            is_producer = is_giver & (is_first | np.append(True, ~is_giver[:-1])[: len(key)])
        life_index = np.cumsum(is_producer | is_first) - 1
        begins = np.flatnonzero(is_producer | is_first)

        def state(names: Sequence[str], initial_state: int) -> tuple[Ints, Ints, Mask]:
            """Return the state after each event, and the last state of each event's value.

            The third result is a mask of the events that set a state.
            """
            state_numbers = {name: k for k, name in enumerate(names)}
            change_states = [_get_change_states(member.change) or ("", "") for member in members]
            before, after = (
                column([state_numbers.get(ends[side], _UNCHANGED) for ends in change_states])[order]
                for side in (0, 1)
            )
            is_set = after != _UNCHANGED
            start_states, end_states = np.full((2, len(begins)), initial_state)
            set_events = np.flatnonzero(is_set)
            end_states[life_index[set_events]] = after[set_events]
            if names is not TIERS:  # a new value has the form that its first change needs
                start_states[life_index[set_events[::-1]]] = before[set_events[::-1]]
            known_states = np.where(is_set, after, _UNCHANGED)
            known_states[begins] = np.where(is_set[begins], after[begins], start_states)
            last_known = np.maximum.accumulate(
                np.where(known_states != _UNCHANGED, np.arange(len(known_states)), 0)
            )
            return known_states[last_known], end_states[life_index], is_set

        tier, _, changes_tier = state(TIERS, 0)
        form, final_form, _ = state(forms, NO_FORM)
        return cls(
            positions[order], key, is_giver, is_producer, changes_tier,
            tier, form, final_form, forms, initial_tier,
        )  # fmt: skip

    def _has_required_state(self, events: Ints, change: Change | None) -> Mask:
        """Return a mask: the events after which an instruction with `change` can use the value."""
        tier = TIERS.index(change.before) if change and change.before in TIERS else 0
        is_valid: Mask = self.is_giver[events] & (self.tier[events] == tier)
        if change is None:
            is_valid &= self.form[events] == self.final_form[events]
        elif change.before in self.forms:
            is_valid &= self.form[events] == self.forms.index(change.before)
        return is_valid

    def find_givers(
        self, key: Ints, needer: Positions, change: Change | None
    ) -> tuple[Positions, list[tuple[int, int]]]:
        """Return the givers of values, and the events that leave a value in a wrong state.

        The giver of a value is the event that leaves the value in the state that an instruction
        needs.  It is the nearest earlier event, if this event leaves the value in that state.
        Otherwise it is the next later event that does.  If there is no such later event and no
        earlier event at all, the giver is the first event that makes the value.

        Args:
            key: Key of the value that each instruction needs, shape (needers,).
            needer: Positions of the instructions that need the values, shape (needers,).
            change: The change that the instructions make; None if they only read the values.

        Returns:
            The positions of the givers, shape (needers,), and a list of pairs of positions: an
            instruction, and the event that left its value in a wrong state.  The position of the
            giver is -1 if the value has no event, or if the list has a pair for the instruction.
            It is also -1 if the value exists from the start in the required state, and no earlier
            event changes it.
        """
        giver = np.full(len(needer), NO_POSITION, np.int32)
        stale: list[tuple[int, int]] = []
        if not len(self.positions):
            return giver, stale
        span = max(int(self.positions.max()), int(needer.max(initial=0))) + 1
        sort_keys = self.keys * span + self.positions
        event = np.searchsorted(sort_keys, key * span + needer) - 1
        nearest = np.maximum(event, 0)
        has_event = (event >= 0) & (self.keys[nearest] == key)
        is_valid = has_event & self._has_required_state(nearest, change)
        giver[is_valid] = self.positions[nearest[is_valid]]
        if self.initial_tier and (change.before if change else TIERS[0]) == self.initial_tier:
            is_valid |= ~has_event
        for k in np.flatnonzero(~is_valid & np.isin(key, self.keys)).tolist():
            value_key, position = int(key[k]), int(needer[k])
            later_events = np.flatnonzero((self.keys == value_key) & (self.positions > position))
            later_events = later_events[self._has_required_state(later_events, change)]
            if len(later_events):
                giver[k] = self.positions[later_events[0]]
            elif has_event[k]:
                stale.append((position, int(self.positions[nearest[k]])))
            elif len(later_events := np.flatnonzero((self.keys == value_key) & self.is_producer)):
                giver[k] = self.positions[later_events[0]]
        return giver, stale

    def find_overwrites(self) -> list[tuple[int, int]]:
        """Return the instructions that make a value again before it is freed.

        Returns:
            Pairs of positions: the instruction, and the previous event of the value.
        """
        is_overwrite = self.is_producer[1:] & self.is_giver[:-1] & (self.keys[1:] == self.keys[:-1])
        return [
            (int(self.positions[k + 1]), int(self.positions[k]))
            for k in np.flatnonzero(is_overwrite).tolist()
        ]

    def find_unfreed(self) -> list[int]:
        """Return the position of the last event of each value that no instruction frees."""
        is_last = np.append(self.keys[1:] != self.keys[:-1], True)[: len(self.positions)]
        return [int(position) for position in self.positions[is_last & self.is_giver]]

    def _find_intervals(self, events: Ints) -> tuple[Ints, Ints]:
        """Return the first and the second event of each pair of consecutive events of one value.

        The first event makes or changes the value. Events that are not in `events` are ignored. A
        pair is left out if its second event makes the value again.
        """
        begin, end = events[:-1], events[1:]
        is_same_life = (
            self.is_giver[begin] & (self.keys[begin] == self.keys[end]) & ~self.is_producer[end]
        )
        begin, end = begin[is_same_life], end[is_same_life]
        order = np.argsort(self.positions[begin], kind="stable")
        return begin[order], end[order]

    def find_tier_intervals(self, tier: int) -> tuple[Positions, Positions]:
        """Return the intervals in which values are on a memory tier.

        Args:
            tier: The memory tier, as an index into TIERS.

        Returns:
            Two arrays.  The first has the positions at which values are made on the tier or move to
            it, ascending. The second has the positions at which these values leave the tier or are
            freed.
        """
        begin, end = self._find_intervals(
            np.flatnonzero(self.is_producer | self.changes_tier | ~self.is_giver)
        )
        is_on_tier = self.tier[begin] == tier
        return self.positions[begin[is_on_tier]], self.positions[end[is_on_tier]]

    def find_state_intervals(self) -> tuple[Positions, Positions, Ints, Ints, Mask, Mask]:
        """Return the fields of `ValueStates`."""
        begin, end = self._find_intervals(np.arange(len(self.positions)))
        return (
            self.positions[begin], self.positions[end], self.tier[begin], self.form[begin],
            self.is_producer[begin], ~self.is_giver[end],
        )  # fmt: skip


def _get_change_states(change: Change | None) -> tuple[str, ...]:
    """Return the states before and after a change; empty if there is none."""
    return (change.before, change.after) if change else ()
