"""Slots: where the values of a rank are while it runs, by kind and number."""

from __future__ import annotations

from typing import Any


class Slots:
    """The slots of one kind: what is in each, how many are taken, and the most that ever were."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.taken = self.most = 0

    def put(self, number: int, value: Any) -> None:
        """Let a slot have a value, or None."""
        self.taken += (value is not None) - (self.values[number] is not None)
        self.values[number] = value
        self.most = max(self.most, self.taken)

    def forget(self) -> None:
        """Let go whatever is in them."""
        self.values[:] = [None] * len(self.values)
        self.taken = self.most = 0


class Slot:
    """The slot of one value, looked up when an instruction is linked."""

    __slots__ = ("number", "slots", "values")

    def __init__(self, slots: Slots, number: int) -> None:
        self.slots, self.values, self.number = slots, slots.values, number

    def fill(self, value: object) -> None:
        """Put the value in; whatever was there must be gone."""
        slots, values, number = self.slots, self.values, self.number
        assert values[number] is None, "the checker proves that slots are free"
        values[number] = value
        slots.taken = taken = slots.taken + 1
        if taken > slots.most:
            slots.most = taken

    def look(self) -> Any:
        """The value; it stays."""
        value = self.values[self.number]
        assert value is not None, "the checker proves that every value is there"
        return value

    def free(self) -> None:
        """Let the value go."""
        self.values[self.number] = None
        self.slots.taken -= 1
