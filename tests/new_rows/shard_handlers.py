"""Shard: parameters are poisoned but between their Unshard and their Reshard."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.rank import Call, Handler, State

_KEPT: WeakKeyDictionary[State, dict[int, list[Tensor]]] = WeakKeyDictionary()


def _parameters(state: State, stage: int) -> list[Tensor]:
    return [p.data for p in state.stages[stage].module.parameters()]


def unshard(state: State, i: Instr) -> Call:
    slot, kept = state.slot(Token.FULL, i.stage, i.mb), _KEPT.setdefault(state, {})

    def run() -> None:
        own = _parameters(state, i.stage)
        for p, whole in zip(own, kept.get(i.stage, own), strict=True):
            p.copy_(whole)
        slot.fill(own)

    return Call(None, run)


def reshard(state: State, i: Instr) -> Call:
    slot, kept = state.slot(Token.FULL, i.stage, i.mb), _KEPT.setdefault(state, {})

    def run() -> None:
        kept[i.stage] = [p.clone() for p in slot.look()]
        for p in slot.look():
            p.fill_(torch.nan)
        slot.free()

    return Call(None, run)


def step(plain: Handler) -> Handler:
    def link(state: State, i: Instr) -> Call:
        wait, run = plain(state, i)
        kept = _KEPT.setdefault(state, {})

        def whole() -> None:
            for stage, own in kept.items():
                for p, value in zip(_parameters(state, stage), own, strict=True):
                    p.copy_(value)
            kept.clear()
            run()

        return Call(wait, whole)

    return link


HANDLERS = {Opcode.Unshard: unshard, Opcode.Reshard: reshard}
WRAPPERS = {Opcode.OptimizerStep: step}
