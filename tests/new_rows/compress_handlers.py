"""Compress: send float64 activations as float32, which must represent them exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.ir.isa.instructions import INSTRUCTIONS, Form, Instr, Opcode
from schedir.runtime.handlers.transfer_handlers import FORM_LAYOUTS, get_received_value
from schedir.runtime.program_state import Call, ProgramState


def _get_first_half(value: Tensor) -> Tensor:
    """Return the first half of a float64 value's memory, as float32."""
    flat = value.view(-1)
    return flat.view(torch.float32)[: len(flat)]


FORM_LAYOUTS[Form.PACKED] = _get_first_half


def compress(state: ProgramState, i: Instr) -> Call:
    """Return the call of Compress: replace an activation in its slot by its float32 copy."""
    out = state.find_slot(INSTRUCTIONS[i.op].gives[0], i.stage, i.mb)

    def run() -> None:
        value = out.peek()
        packed = value.float()
        assert torch.equal(packed.double(), value), "float32 cannot represent this activation"
        out.free()
        out.fill(packed.view(-1))

    return Call(None, run)


def decompress(state: ProgramState, i: Instr) -> Call:
    """Return the call of Decompress: convert a received activation to float64 in place."""
    value = get_received_value(state, i)

    def run() -> None:
        value.decoded.copy_(value.encoded.clone())  # Both begin at one address.

    return Call(value.wait, run)


HANDLERS = {Opcode.Compress: compress, Opcode.Decompress: decompress}
