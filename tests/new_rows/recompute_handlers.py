"""Recompute: a forward that keeps its input, and one more that keeps all."""

from __future__ import annotations

import torch

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.around import around
from schedir.runtime.given import one_number
from schedir.runtime.handlers import _root
from schedir.runtime.rank import Call, Rank


def handlers(base):
    def forward(rank: Rank, i: Instr) -> Call:
        wait, run = base[Opcode.Forward](rank, i)
        if (Opcode.Recompute, i.stage, i.mb) not in rank.where:
            return Call(wait, run)

        def keep() -> None:
            with torch.no_grad():  # so that nothing but the input is saved
                run()

        return Call(wait, keep)

    def recompute(rank: Rank, i: Instr) -> Call:
        saved, module = rank.slot(Token.SAVED, i.stage, i.mb), rank.stages[i.stage].module
        last = i.stage == rank.plan.stages - 1

        def run() -> None:
            x, root = saved.look()
            assert root is None, "a checkpoint has nothing to go back from"
            y = module(x)
            if last:
                y = one_number(rank.loss(y, rank.targets[i.mb]))
            saved.free()
            saved.fill((x, _root(y)))

        return Call(None, around(rank, Instr(Opcode.Forward, *i[1:]), run))

    return {Opcode.Forward: forward, Opcode.Recompute: recompute}
