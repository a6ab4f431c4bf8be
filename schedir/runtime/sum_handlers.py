"""Sums: handlers of what pieces of a stage sum over their tensor-parallel group.

Of what a piece hands over the first tensor is summed, in its place; what else passes, as a residual
stream, passes untouched.  The group is at it beside what computes, until the next piece takes it.
"""

from __future__ import annotations

from typing import Final

from torch.autograd.graph import increment_version

from schedir.errors import ModelError
from schedir.ir.ops import LOCAL_HANDOVER, ROWS, SUMS, Instr, Token
from schedir.runtime.compute_handlers import share_memory
from schedir.runtime.rank import Call, State


def sum_(state: State, i: Instr) -> Call:
    kind = ROWS[i.op].gives[0]
    other, (made, _) = state.program.other(kind, i.stage), LOCAL_HANDOVER[kind]
    given = state.slot(made, other, i.mb)
    before = min(i.stage, other)
    if not (first := state.passing[i.mb].carried(Token.ACT_OUT, before).tensors[0]).grad:
        raise ModelError(
            f"{i} sums the first tensor that passes between stages {before} and {before + 1}, and "
            f"that has no gradient: {first}",
            hint="what is summed comes first, and beside it what passes on as it is",
        )
    arrivals, key, start = state.stages[i.stage].arrivals, (kind, i.mb), state.transport.collective

    def run() -> None:
        own, *rest = given.look()
        if any(share_memory(own, one) for one in rest):
            own = own.clone()
            given.free()
            given.fill((own, *rest))
        else:  # who has saved it for a backward must not take the sum for it
            increment_version(own)
        arrivals[key] = start("all_reduce", "tp", own, own)

    return Call(None, run)


HANDLERS: Final = dict.fromkeys(SUMS, sum_)
