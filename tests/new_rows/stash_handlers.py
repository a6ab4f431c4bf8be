"""Stash: what autograd keeps of a forward is copied, poisoned where it was, and copied back."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from schedir.ir.isa.instructions import Instr, Opcode, Value
from schedir.runtime.rank_state import Call, Handler, ProgramService, State


class Holder:
    """A tensor that is on the device, or on the disk."""

    def __init__(self, tensor: Tensor) -> None:
        self.device: Tensor | None = tensor.clone()
        self.disk: Tensor | None = None


class Stashes(ProgramService):
    """By stage and microbatch, what autograd kept. With "disk" before, what the slot had."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.held: dict[Any, Any] = defaultdict(list)


def forward(plain: Handler) -> Handler:
    def link(state: State, i: Instr) -> Call:
        wait, run = plain(state, i)
        held = state.service(Stashes).held

        def pack(tensor: Tensor) -> Tensor | Holder:
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
            held[i[1:]].append(holder := Holder(tensor))
            return holder

        def unpack(found: Tensor | Holder) -> Tensor:
            if isinstance(found, Tensor):
                return found
            assert found.device is not None, "what is on the disk is not read"
            return found.device

        def keep() -> None:
            held[i[1:]].clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                run()

        return Call(wait, keep)

    return link


def stash(state: State, i: Instr) -> Call:
    slot = state.find_slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    held = state.service(Stashes).held

    def run() -> None:
        held["disk", *i[1:]] = slot.peek()
        slot.free()
        for holder in held[i[1:]]:
            assert holder.device is not None
            holder.disk = holder.device.clone()
            holder.device.zero_().log_()  # nobody reads it now
            holder.device = None

    return Call(None, run)


def take(state: State, i: Instr) -> Call:
    slot = state.find_slot(Value.SAVED, i.stage, i.mb, state.index_of[i])
    held = state.service(Stashes).held

    def run() -> None:
        slot.fill(held.pop(("disk", *i[1:])))
        for holder in held[i[1:]]:
            assert holder.disk is not None
            holder.device, holder.disk = holder.disk.clone(), None

    return Call(None, run)


HANDLERS = {Opcode.Stash: stash, Opcode.Take: take}
WRAPPERS = {Opcode.Forward: forward}
