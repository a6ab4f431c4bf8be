"""Compress: what float32 can hold of float64 is sent as float32."""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.ir.isa.instructions import INSTRUCTIONS, Form, Instr, Opcode
from schedir.runtime.handlers.transfer_handlers import FORM_LAYOUTS, get_received_value
from schedir.runtime.rank_state import Call, State


def _in_front(whole: Tensor) -> Tensor:
    """The first half of the memory of a value."""
    flat = whole.view(-1)
    return flat.view(torch.float32)[: len(flat)]


FORM_LAYOUTS[Form.PACKED] = _in_front


def compress(state: State, i: Instr) -> Call:
    out = state.find_slot(INSTRUCTIONS[i.op].gives[0], i.stage, i.mb)

    def run() -> None:
        whole = out.peek()
        packed = whole.float()
        assert torch.equal(packed.double(), whole), "only what float32 holds can be packed"
        out.free()
        out.fill(packed.view(-1))

    return Call(None, run)


def decompress(state: State, i: Instr) -> Call:
    value = get_received_value(state, i)

    def run() -> None:
        value.decoded.copy_(value.encoded.clone())  # both begin at one address

    return Call(value.wait, run)


HANDLERS = {Opcode.Compress: compress, Opcode.Decompress: decompress}
