"""The output of a segment, which a collective between segments changes.

A collective changes the first tensor that a segment outputs. Other tensors, such as a residual
stream, do not change. The collective overlaps with compute until the next segment reads the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import (
    BOUNDARY_GATHER_OPS,
    EP_COLLECTIVE_OPS,
    INSTRUCTIONS,
    LOCAL_HANDOVER,
    Instr,
    Value,
)
from schedir.runtime.program_state import Call, ProgramState
from schedir.runtime.value_slots import OutputSlot
from schedir.transports.transport import ChainedWork, Transport, Work


class SegmentOutput(NamedTuple):
    """The output slot of a segment, and the transport of the collective after the segment.

    Attributes:
        slot: The output slot.
        transport: The transport that runs the collective.
    """

    slot: OutputSlot
    transport: Transport

    def replace_first(self, first: Tensor, rest: Sequence[Tensor]) -> None:
        """Replace the first tensor in the slot.

        Args:
            first: The new first tensor.
            rest: The other tensors.
        """
        self.slot.free()
        self.slot.fill((first, *rest))


def find_collective_boundary(state: ProgramState, i: Instr) -> int:
    """Return the segment before the boundary at which a collective runs.

    Args:
        state: The state of the rank.
        i: The collective.
    """
    return min(i.stage, state.program.peer_stage(INSTRUCTIONS[i.op].gives[0], i.stage))


def make_collective_call(
    state: ProgramState, i: Instr, start: Callable[[SegmentOutput], Work]
) -> Call:
    """Return the call that starts a collective on the first output tensor of a segment.

    Args:
        state: The state of the rank.
        i: The collective.
        start: A function that starts the collective, and returns its Work.

    Raises:
        ModelError: The first output tensor requires no gradient, according to the boundary.
    """
    kind = INSTRUCTIONS[i.op].gives[0]
    producer_stage, (output_kind, _) = state.program.peer_stage(kind, i.stage), LOCAL_HANDOVER[kind]
    slot = state.find_slot(output_kind, producer_stage, i.mb)
    assert isinstance(slot, OutputSlot)
    output = SegmentOutput(slot, state.transport)
    boundary = find_collective_boundary(state, i)
    first_tensor = state.boundaries[i.mb].get_value_tensors(Value.ACT_OUT, boundary).tensors[0]
    if not first_tensor.requires_grad:
        verb = "gathers" if i.op in BOUNDARY_GATHER_OPS else "sums"
        raise ModelError(
            f"{i} {'exchanges' if i.op in EP_COLLECTIVE_OPS else verb} tensor 0 of the "
            f"boundary after stage {boundary}, but this tensor has no gradient: {first_tensor}",
            hint="let the segment return the tensor for the collective as its first output",
        )
    arrivals, key = state.stages[i.stage].arrivals, (kind, i.mb)

    def run() -> None:
        arrivals[key] = ChainedWork(start(output), output.slot.accept_write)

    return Call(None, run)
