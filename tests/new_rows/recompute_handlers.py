"""Recompute: a forward that keeps its input, and one more that keeps all."""

from __future__ import annotations

import torch

from schedir.ir.ops import Instr, Opcode, Token
from schedir.runtime.around import around
from schedir.runtime.batch import tensors_of
from schedir.runtime.compute_handlers import _root
from schedir.runtime.given import one_number
from schedir.runtime.random import FORWARD
from schedir.runtime.rank import Call, Handler, State


def forward(plain: Handler) -> Handler:
    def link(state: State, i: Instr) -> Call:
        wait, run = plain(state, i)
        if (Opcode.Recompute, i.stage, i.mb) not in state.index_of:
            return Call(wait, run)

        def keep() -> None:
            with torch.no_grad():  # so that nothing but the input is saved
                run()

        return Call(wait, keep)

    return link


def recompute(state: State, i: Instr) -> Call:
    saved, module = state.slot(Token.SAVED, i.stage, i.mb), state.stages[i.stage].module
    last = i.stage == state.plan.stages - 1

    def run() -> None:
        xs, roots = saved.look()
        assert not roots, "a checkpoint has nothing to go back from"
        y = module(*(xs or tensors_of(state.batch.inputs[i.mb], i.mb)))
        if last:
            y = one_number(state.loss(y, state.batch.targets[i.mb]))
        saved.free()
        saved.fill((xs, [_root(y)]))

    return Call(None, around(state, i, FORWARD, run))


HANDLERS = {Opcode.Recompute: recompute}
WRAPPERS = {Opcode.Forward: forward}
