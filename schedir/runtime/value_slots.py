"""Slots that hold the values of a rank while a program runs, by kind and number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import TRAINING_VALUES, VALUES, Value
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, get_versions


class SlotTable:
    """The slots of one kind: what is in each, how many are taken, and the most that ever were."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.num_occupied = self.max_occupied = 0
        # In the first step: a function whose result changes if a value is written to, and its
        # result for the value in each slot.
        self.compute_fingerprint: Callable[[Any], list[int]] | None = None
        self.fingerprints: list[list[int]] = [[]] * count

    def set_value(self, number: int, value: Any) -> None:
        """Let a slot have a value, or None."""
        self.num_occupied += (value is not None) - (self.values[number] is not None)
        self.values[number] = value
        self.max_occupied = max(self.max_occupied, self.num_occupied)

    def clear(self) -> None:
        """Let go whatever is in them."""
        self.values[:] = [None] * len(self.values)
        self.num_occupied = self.max_occupied = 0


class Slot:
    """The slot of one value, looked up when an instruction is linked."""

    __slots__ = ("number", "table", "values")

    def __init__(self, slots: SlotTable, number: int) -> None:
        self.table, self.values, self.number = slots, slots.values, number

    def fill(self, value: object) -> None:
        """Put the value in; whatever was there must be gone."""
        slots, values, number = self.table, self.values, self.number
        assert values[number] is None, "the checker proves that slots are free"
        values[number] = value
        slots.num_occupied = taken = slots.num_occupied + 1
        if taken > slots.max_occupied:
            slots.max_occupied = taken
        if slots.compute_fingerprint is not None:
            slots.fingerprints[number] = slots.compute_fingerprint(value)

    def peek(self) -> Any:
        """The value; it stays."""
        value = self.values[self.number]
        assert value is not None, "the checker proves that every value is there"
        return value

    def free(self) -> None:
        """Let the value go."""
        self.values[self.number] = None
        self.table.num_occupied -= 1


class OutputSlot(Slot):
    """The slot of a value that a stage returned. Its memory must not change until it is used.

    Only the first step checks this.
    """

    __slots__ = ("kind", "mb", "stage")

    def __init__(self, slots: SlotTable, number: int, kind: Value, stage: int, mb: int) -> None:
        super().__init__(slots, number)
        self.kind, self.stage, self.mb = kind, stage, mb

    def accept_write(self) -> None:
        """Accept the value as it is now, after the executor itself has written to it."""
        slots, number = self.table, self.number
        if slots.compute_fingerprint is not None:
            slots.fingerprints[number] = slots.compute_fingerprint(self.values[number])

    def peek(self) -> Any:
        """Return the value.  Raises ModelError if it was written to since the slot was filled."""
        value, fingerprint_of = self.values[self.number], self.table.compute_fingerprint
        assert value is not None, "the checker proves that every value is there"
        before = self.table.fingerprints[self.number]
        if fingerprint_of is not None and fingerprint_of(value) != before:
            raise self.overwrite_error()
        return value

    def overwrite_error(self) -> ModelError:
        """Return the error for a value that was written to before it was used."""
        if self.kind in TRAINING_VALUES:
            hint = "a hook, or a backward of your own, must not write to a gradient that it returns"
        else:
            hint = "return a new tensor in each forward: return self.buffer.clone()"
        return ModelError(
            f"{VALUES[self.kind].phrase} that stage {self.stage} returned for microbatch {self.mb} "
            "was written to before it was used",
            hint=hint,
        )


def collect_versions(value: Any) -> list[int]:
    """Return the version counter of a tensor, or those of a tuple: torch adds 1 at each write."""
    return get_versions((value,) if isinstance(value, Tensor) else value)


def collect_versions_and_sums(value: Any) -> list[int]:
    """Return the version counters and checksums of a tensor, or of each tensor of a tuple.

    Checksums also find writes to `data`, and writes by kernels that torch does not track.
    """
    return collect_versions(value) + compute_checksums(
        (value,) if isinstance(value, Tensor) else value
    )
