"""MessageBuffers: the static memory of the values that a rank sends and receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from torch import Tensor

from schedir.analysis.memory.buffer_slots import assign_slots, count_slots
from schedir.ir.isa.instructions import (
    BOUNDARY_VALUES,
    INSTRUCTIONS,
    RECV_OPS,
    TP_SPLIT_OPS,
    Opcode,
    Value,
)
from schedir.ir.program import Program
from schedir.runtime.boundaries.microbatch_boundaries import BoundaryTable
from schedir.runtime.rank_resources import RankResources, RankService
from schedir.transports.transport import SlotKey, allocate_bytes


class MessageBuffers(RankService):
    """The message buffers of a rank, which all its programs share.

    Args:
        resources: The resources of the rank.

    Attributes:
        sizes: Kind of value -> bytes of each slot.
        received: Slot -> memory of its received values.
        sent: (Kind, slot, opcodes that changed the form of the value) -> memory of the sent values.
    """

    def __init__(self, resources: RankResources) -> None:
        super().__init__(resources)
        self.sizes: dict[Value, list[int]] = {}
        self.received: dict[SlotKey, Tensor] = {}
        self.sent: dict[tuple[Value, int, tuple[Opcode, ...]], Tensor] = {}

    def allocate(self, runs: Sequence[tuple[Program, BoundaryTable]]) -> None:
        """Allocate the buffers of received values.

        A buffer has the size of the largest message of its slot in all programs. Programs share the
        buffers, because only one program runs at a time. All processes must call this method.

        Args:
            runs: Each program with its boundaries.
        """
        resources = self.resources
        for program, boundaries in runs:
            for kind, sizes in _compute_sizes(program, resources.rank, boundaries).items():
                size_pairs = zip_longest(self.sizes.get(kind, ()), sizes, fillvalue=0)
                self.sizes[kind] = [max(pair) for pair in size_pairs]
        received_sizes = {
            kind: self.sizes[kind] for op in RECV_OPS for kind in INSTRUCTIONS[op].gives
        }
        programs = [program for program, _ in runs]
        self.received = resources.transport.allocate_buffers(
            received_sizes, resources.device, programs
        )

    def get_send_buffer(
        self, kind: Value, number: int, form_changes: tuple[Opcode, ...]
    ) -> Tensor | None:
        """Return the memory from which the value in a slot is sent. The first call allocates it.

        All values of the slot with these form changes use the same memory. This is safe, because
        the next instruction that fills the slot waits for the send, or runs in a later step.

        Args:
            kind: The kind of the value.
            number: The index of the value's slot.
            form_changes: The opcodes that changed the form of the value.

        Returns:
            A flat uint8 tensor. None if the transport sends a value from the memory in which it was
            computed.
        """
        key, resources = (kind, number, form_changes), self.resources
        if resources.transport.uses_static_buffers and key not in self.sent:
            is_split = any(op in TP_SPLIT_OPS for op in form_changes)
            size = self.sizes[kind][number] // (resources.program.tp if is_split else 1)
            self.sent[key] = allocate_bytes(resources.device, size)
        return self.sent.get(key)

    def list_device_tensors(self) -> Iterable[Tensor]:
        """Return the memory of received values."""
        return self.received.values()


def _compute_sizes(
    program: Program, rank: int, boundaries: BoundaryTable
) -> dict[Value, list[int]]:
    """Return a dict: kind of value -> bytes of the message buffer of each slot.

    A buffer has the size of the largest value that is sent from the slot or received into it. The
    size is 0 if all values of the slot stay on the rank.
    """
    slot_counts = count_slots(program, BOUNDARY_VALUES)[rank].tolist()
    sizes = {kind: [0] * n for kind, n in zip(BOUNDARY_VALUES, slot_counts, strict=True)}
    for (kind, stage, mb), fills in assign_slots(program, rank).items():
        if kind in sizes and program.peer_stage(kind, stage) >= 0:
            size = boundaries[mb].get_value_tensors(kind, stage).nbytes
            for slot in fills.values():
                sizes[kind][slot] = max(sizes[kind][slot], size)
    return sizes
