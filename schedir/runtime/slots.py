"""Slots: where the values of a rank are while it runs, by kind and number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.ops import TO_TRAIN, TOKENS, Token
from schedir.runtime.bits import sums_of, versions_of


class Slots:
    """The slots of one kind: what is in each, how many are taken, and the most that ever were."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.taken = self.most = 0
        # In the first step: a function that finds writes to a value, and what it returned for each.
        self.marks_of: Callable[[Any], list[int]] | None = None
        self.marks: list[list[int]] = [[]] * count

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
        if slots.marks_of is not None:
            slots.marks[number] = slots.marks_of(value)

    def look(self) -> Any:
        """The value; it stays."""
        value = self.values[self.number]
        assert value is not None, "the checker proves that every value is there"
        return value

    def free(self) -> None:
        """Let the value go."""
        self.values[self.number] = None
        self.slots.taken -= 1


class OutputSlot(Slot):
    """The slot of a value that a stage returns, whose memory must not change while it is needed.

    Writes are looked for in the first step only.
    """

    __slots__ = ("kind", "mb", "stage")

    def __init__(self, slots: Slots, number: int, kind: Token, stage: int, mb: int) -> None:
        super().__init__(slots, number)
        self.kind, self.stage, self.mb = kind, stage, mb

    def mark(self) -> None:
        """Accept the value as it is now: the executor itself has written to it."""
        if self.slots.marks_of is not None:
            self.slots.marks[self.number] = self.slots.marks_of(self.values[self.number])

    def look(self) -> Any:
        """Return the value.  Raises ModelError if a tensor of it was written to meanwhile."""
        value, marks_of = self.values[self.number], self.slots.marks_of
        assert value is not None, "the checker proves that every value is there"
        if marks_of is not None and marks_of(value) != self.slots.marks[self.number]:
            raise self.overwritten()
        return value

    def overwritten(self) -> ModelError:
        """Return the error for a value that was written to before it was used."""
        if self.kind in TO_TRAIN:
            hint = "a hook, or a backward of your own, must not write to a gradient that it returns"
        else:
            hint = "return a new tensor in each forward: return self.buffer.clone()"
        return ModelError(
            f"{TOKENS[self.kind].words} that stage {self.stage} returned for microbatch {self.mb} "
            "was written to before it was used",
            hint=hint,
        )


def versions_in(value: Any) -> list[int]:
    """Return the version of a tensor, or of each of a tuple: torch adds 1 with each write."""
    return versions_of((value,) if isinstance(value, Tensor) else value)


def versions_and_sums_in(value: Any) -> list[int]:
    """The same, with the sums of the bits: they show a write to `data`, or by a kernel that torch
    does not know."""
    return versions_in(value) + sums_of((value,) if isinstance(value, Tensor) else value)
