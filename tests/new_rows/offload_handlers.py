"""Offload: what autograd keeps of a forward is copied, poisoned where it was, and copied back."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.rank import Call, Handler, State


class Holder:
    """A tensor that is on the device, or on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.device: Tensor | None = tensor.clone()
        self.host: Tensor | None = None


_HELD: WeakKeyDictionary[State, dict[Any, Any]] = WeakKeyDictionary()


def forward(plain: Handler) -> Handler:
    def link(state: State, i: Instr) -> Call:
        wait, run = plain(state, i)
        held = _HELD.setdefault(state, defaultdict(list))

        def pack(tensor: Tensor) -> Tensor | Holder:
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
            held[i[1:]].append(holder := Holder(tensor))
            return holder

        def unpack(found: Tensor | Holder) -> Tensor:
            if isinstance(found, Tensor):
                return found
            assert found.device is not None, "what is on the host is not read"
            return found.device

        def keep() -> None:
            held[i[1:]].clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                run()

        return Call(wait, keep)

    return link


def offload(state: State, i: Instr) -> Call:
    slot = state.slot(Token.SAVED, i.stage, i.mb, state.index_of[i])

    def run() -> None:
        _HELD[state]["host", *i[1:]] = slot.look()
        slot.free()
        for holder in _HELD[state][i[1:]]:
            assert holder.device is not None
            holder.host = holder.device.clone()
            holder.device.zero_().log_()  # nobody reads it now
            holder.device = None

    return Call(None, run)


def reload(state: State, i: Instr) -> Call:
    slot = state.slot(Token.SAVED, i.stage, i.mb, state.index_of[i])

    def run() -> None:
        slot.fill(_HELD[state].pop(("host", *i[1:])))
        for holder in _HELD[state][i[1:]]:
            assert holder.host is not None
            holder.device, holder.host = holder.host.clone(), None

    return Call(None, run)


HANDLERS = {Opcode.Offload: offload, Opcode.Reload: reload}
WRAPPERS = {Opcode.Forward: forward}
