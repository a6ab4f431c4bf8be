"""Shard: parameters are poisoned but between their Unshard and their Reshard."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.rank import Call, Rank

_KEPT: WeakKeyDictionary[Rank, dict[int, list[Tensor]]] = WeakKeyDictionary()


def _parameters(rank: Rank, stage: int) -> list[Tensor]:
    return [p.data for p in rank.stages[stage].module.parameters()]


def handlers(base):
    def unshard(rank: Rank, i: Instr) -> Call:
        slot, kept = rank.slot(Token.FULL, i.stage, i.mb), _KEPT.setdefault(rank, {})

        def run() -> None:
            own = _parameters(rank, i.stage)
            for p, whole in zip(own, kept.get(i.stage, own), strict=True):
                p.copy_(whole)
            slot.fill(own)

        return Call(None, run)

    def reshard(rank: Rank, i: Instr) -> Call:
        slot, kept = rank.slot(Token.FULL, i.stage, i.mb), _KEPT.setdefault(rank, {})

        def run() -> None:
            kept[i.stage] = [p.clone() for p in slot.look()]
            for p in slot.look():
                p.fill_(torch.nan)
            slot.free()

        return Call(None, run)

    def step(rank: Rank, i: Instr) -> Call:
        wait, run = base[Opcode.OptimizerStep](rank, i)
        kept = _KEPT.setdefault(rank, {})

        def whole() -> None:
            for stage, own in kept.items():
                for p, value in zip(_parameters(rank, stage), own, strict=True):
                    p.copy_(value)
            kept.clear()
            run()

        return Call(wait, whole)

    return {Opcode.Unshard: unshard, Opcode.Reshard: reshard, Opcode.OptimizerStep: step}
