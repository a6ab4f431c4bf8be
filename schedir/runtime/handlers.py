"""Handlers: what runs each instruction, one for every row of the instruction table.

A handler links an instruction of a rank to a Call: everything that can be looked up is looked
up then, and running it is only the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from schedir.ir.ops import Instr, Opcode
from schedir.runtime.compute import backward, backward_input, backward_weight, forward
from schedir.runtime.rank import Call, State
from schedir.runtime.reductions import reduce_grads, reduce_holders, reduce_norm, reduce_tied, step
from schedir.runtime.transfers import gather, gather_once, pack_once, recv, scatter, send


class Handler(NamedTuple):
    """How an instruction is linked, and how it is warmed up before the first step.

    A warm-up is to load, compile and connect what the first step would.  "stage": it is, where the
    stage is run forward and backward.  "run": by the linked call, once for each stage; gradients,
    and what the calls leave in slots, are forgotten.  "skip": nothing is to be done.  Or by a
    function, once.
    """

    link: Callable[[State, Instr], Call]
    warm_up: Literal["stage", "run", "skip"] | Callable[[State], None]


HANDLERS: Final[dict[Opcode, Handler]] = {
    Opcode.Forward: Handler(forward, "stage"),
    Opcode.Backward: Handler(backward, "stage"),
    Opcode.BackwardInput: Handler(backward_input, "stage"),
    Opcode.BackwardWeight: Handler(backward_weight, "stage"),
    Opcode.SendAct: Handler(send, "skip"),
    Opcode.RecvAct: Handler(recv, "skip"),
    Opcode.SendGrad: Handler(send, "skip"),
    Opcode.RecvGrad: Handler(recv, "skip"),
    Opcode.Scatter: Handler(scatter, pack_once),
    Opcode.Gather: Handler(gather, gather_once),
    Opcode.ScatterGrad: Handler(scatter, pack_once),
    Opcode.GatherGrad: Handler(gather, gather_once),
    Opcode.ReduceGrads: Handler(reduce_grads, "run"),
    Opcode.ReduceHolders: Handler(reduce_holders, "run"),
    Opcode.ReduceTied: Handler(reduce_tied, "run"),
    Opcode.ReduceNorm: Handler(reduce_norm, "run"),
    Opcode.OptimizerStep: Handler(step, "skip"),
}
