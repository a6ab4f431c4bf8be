"""Stash: move the tensors that autograd saved to a stand-in for the disk, and back.

The "disk" is a copy in memory. A stash overwrites the original with NaN, so that a backward that
reads it too early gives wrong bits.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.runtime.program_state import Call, Handler, ProgramService, ProgramState


class SavedTensor:
    """A copy of a tensor that autograd saved, on the device or on the disk."""

    def __init__(self, tensor: Tensor) -> None:
        self.on_device: Tensor | None = tensor.clone()
        self.on_disk: Tensor | None = None


class Stashes(ProgramService):
    """The saved tensors of a program.

    Attributes:
        saved: The saved tensors, by (stage, microbatch).
        slot_values: The value that the slot of a stashed microbatch had, by (stage, microbatch).
    """

    def __init__(self, state: ProgramState) -> None:
        super().__init__(state)
        self.saved: dict[tuple[int, int], list[SavedTensor]] = defaultdict(list)
        self.slot_values: dict[tuple[int, int], Any] = {}


def record_forward(handler: Handler, state: ProgramState, i: Instr) -> Call:
    """Make a forward put each tensor that autograd saves into a `SavedTensor`."""
    call = handler(state, i)
    saved = state.service(Stashes).saved

    def pack(tensor: Tensor) -> Tensor | SavedTensor:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        saved[i[1:]].append(found := SavedTensor(tensor))
        return found

    def unpack(found: Tensor | SavedTensor) -> Tensor:
        if isinstance(found, Tensor):
            return found
        assert found.on_device is not None, "a backward must not read a tensor that is on the disk"
        return found.on_device

    def run() -> None:
        saved[i[1:]].clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            call.run()

    return Call(call.wait, run)


def stash(state: ProgramState, i: Instr) -> Call:
    """Return the call of Stash: copy saved tensors to the disk, and free their slot."""
    slot = state.find_slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    stashes = state.service(Stashes)

    def run() -> None:
        stashes.slot_values[i[1:]] = slot.peek()
        slot.free()
        for tensor in stashes.saved[i[1:]]:
            assert tensor.on_device is not None
            tensor.on_disk = tensor.on_device.clone()
            tensor.on_device.fill_(torch.nan)
            tensor.on_device = None

    return Call(None, run)


def unstash(state: ProgramState, i: Instr) -> Call:
    """Return the call of Unstash: copy saved tensors back, and fill their slot."""
    slot = state.find_slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    stashes = state.service(Stashes)

    def run() -> None:
        slot.fill(stashes.slot_values.pop(i[1:]))
        for tensor in stashes.saved[i[1:]]:
            assert tensor.on_disk is not None
            tensor.on_device, tensor.on_disk = tensor.on_disk.clone(), None

    return Call(None, run)


HANDLERS = {Opcode.Stash: stash, Opcode.Unstash: unstash}
WRAPPERS = {Opcode.Forward: record_forward}
