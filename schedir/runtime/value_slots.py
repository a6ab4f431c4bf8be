"""Slots: the places in which a rank keeps values while a program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from schedir.analysis.memory.buffer_slots import find_slot_reuses
from schedir.errors import ModelError
from schedir.ir.isa.instructions import TRAINING_VALUES, VALUES, Value
from schedir.ir.program import Program
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, get_versions


class SlotTable:
    """The slots of a rank for one kind of value.

    Args:
        count: The number of slots.

    Attributes:
        values: The value in each slot, or None.
        num_occupied: The number of slots with a value.
        max_occupied: The largest `num_occupied` since the table was created or cleared.
        compute_fingerprint: In the first step, a function whose result changes if a value is
            written to. None in later steps.
        fingerprints: The fingerprint of the value in each slot.
    """

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.num_occupied: int = 0
        self.max_occupied: int = 0
        self.compute_fingerprint: Callable[[Any], list[int]] | None = None
        self.fingerprints: list[list[int]] = [[]] * count

    def clear(self) -> None:
        """Free all slots."""
        self.values[:] = [None] * len(self.values)
        self.num_occupied = self.max_occupied = 0


class Slot:
    """A reference to one slot. A handler creates it when it creates the `Call` of an instruction.

    Args:
        slots: All slots for this kind of value.
        number: The index of the slot in `slots`.
    """

    __slots__ = ("number", "table", "values")

    def __init__(self, slots: SlotTable, number: int) -> None:
        self.table: SlotTable = slots
        self.values: list[Any] = slots.values
        self.number: int = number

    def fill(self, value: object) -> None:
        """Put a value into the slot, which must be free.

        Args:
            value: The value.
        """
        table, values, number = self.table, self.values, self.number
        assert values[number] is None, "the checker proves that slots are free"
        values[number] = value
        table.num_occupied = num_occupied = table.num_occupied + 1
        if num_occupied > table.max_occupied:
            table.max_occupied = num_occupied
        if table.compute_fingerprint is not None:
            table.fingerprints[number] = table.compute_fingerprint(value)

    def peek(self) -> Any:
        """Return the value without freeing the slot."""
        value = self.values[self.number]
        assert value is not None, "the checker proves that every value is there"
        return value

    def free(self) -> None:
        """Free the slot."""
        self.values[self.number] = None
        self.table.num_occupied -= 1


class OutputSlot(Slot):
    """A slot with a value that a stage returned. The value must not change before its use.

    Only the first step checks this.

    Args:
        slots: All slots for this kind of value.
        number: The index of the slot in `slots`.
        kind: The kind of the value.
        stage: The stage that returned the value.
        mb: The microbatch.
    """

    __slots__ = ("kind", "mb", "stage")

    def __init__(self, slots: SlotTable, number: int, kind: Value, stage: int, mb: int) -> None:
        super().__init__(slots, number)
        self.kind: Value = kind
        self.stage: int = stage
        self.mb: int = mb

    def accept_write(self) -> None:
        """Update the fingerprint of the value, after the executor has written to it."""
        table, number = self.table, self.number
        if table.compute_fingerprint is not None:
            table.fingerprints[number] = table.compute_fingerprint(self.values[number])

    def peek(self) -> Any:
        """Return the value without freeing the slot.

        Raises:
            ModelError: The value was written to after the slot was filled.
        """
        value, compute_fingerprint = self.values[self.number], self.table.compute_fingerprint
        assert value is not None, "the checker proves that every value is there"
        fingerprint = self.table.fingerprints[self.number]
        if compute_fingerprint is not None and compute_fingerprint(value) != fingerprint:
            raise self.overwrite_error()
        return value

    def overwrite_error(self) -> ModelError:
        """Return the error for a value that was written to before it was used."""
        if self.kind in TRAINING_VALUES:
            hint = "do not write to a gradient that a hook or a custom backward has returned"
        else:
            hint = "return a new tensor in each forward: return self.buffer.clone()"
        return ModelError(
            f"{VALUES[self.kind].phrase} that stage {self.stage} returned for microbatch {self.mb} "
            "was written to before it was used",
            hint=hint,
        )


def collect_versions(value: Any) -> list[int]:
    """Return the version counters of a value's tensors. torch adds 1 to a counter at each write.

    Args:
        value: A tensor or a tuple of tensors.
    """
    return get_versions((value,) if isinstance(value, Tensor) else value)


def collect_versions_and_sums(value: Any) -> list[int]:
    """Return the version counters and the checksums of a value.

    Checksums also detect writes to `data`, and writes by kernels that torch does not track.

    Args:
        value: A tensor or a tuple of tensors.
    """
    return collect_versions(value) + compute_checksums(
        (value,) if isinstance(value, Tensor) else value
    )


def find_freeing_instructions(program: Program, rank: int, kind: Value) -> dict[int, int]:
    """Find, for each instruction that reuses a slot, the instruction that freed the slot.

    Args:
        program: The program.
        rank: The pipeline rank.
        kind: The kind of values in the slots.

    Returns:
        Index of the instruction that reuses a slot -> index of the instruction that freed the slot.
    """
    return {
        fill: free
        for slot_kind, fill, free in iterate_slot_reuses(program, rank)
        if slot_kind == kind
    }


def iterate_slot_reuses(program: Program, rank: int) -> Iterator[tuple[Value, int, int]]:
    """Yield (kind, fill, free) for each reuse of a slot.

    `fill` is the index in the stream of the instruction that reuses the slot. `free` is the index
    of the instruction that freed the slot.

    Args:
        program: The program.
        rank: The pipeline rank.
    """
    begin, end = map(int, program.offsets[rank : rank + 2])
    for kind, (fills, frees) in find_slot_reuses(program).items():
        for fill, free in zip(fills.tolist(), frees.tolist(), strict=True):
            if begin <= fill < end:
                yield kind, fill - begin, free - begin
