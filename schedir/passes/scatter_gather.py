"""ScatterGather: only 1/t of a boundary's bytes cross it, for t tensor-parallel ranks.

"Efficient Large-Scale Language Model Training on GPU Clusters" (SC21), section 4.1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedir.ops import Opcode
from schedir.passes.insert import insert
from schedir.program import ADDRESS, OP, Program, Stream, Words

_SPLITS = {Opcode.SendAct: Opcode.Scatter, Opcode.SendGrad: Opcode.ScatterGrad}
# Which receive is made whole by what, just before whom: a host that blocks waits for no message
# sooner than it must.
_WHOLE = {
    Opcode.RecvAct: (Opcode.Gather, (Opcode.Forward,)),
    Opcode.RecvGrad: (Opcode.GatherGrad, (Opcode.Backward, Opcode.BackwardInput)),
}


def scatter_gather(program: Program) -> Program:
    """Lower replicated boundaries: scatter before each send, gather before each use.

    Nothing to do where tp is 1.  A boundary that is sequence-sharded already needs no lowering
    either: leave this pass out (`compile(..., boundary="sharded")`).
    """
    if program.tp == 1:
        return program
    return replace(program, streams=tuple(map(_stream, program.streams)))


def _stream(stream: Stream) -> Stream:
    op, address = stream.op, stream.words & ADDRESS
    at: list[Words] = []
    words: list[Words] = []
    for send, cut in _SPLITS.items():
        here = np.flatnonzero(op == send)
        at.append(here)
        words.append(address[here] | int(cut) << OP)
    for receive, (whole, users) in _WHOLE.items():
        got = address[op == receive]
        here = np.flatnonzero(np.isin(op, users) & np.isin(address, got))
        at.append(here)
        words.append(address[here] | int(whole) << OP)
    none = np.empty(0, np.int64)
    return insert(stream, (np.concatenate(at), np.concatenate(words)), (none, none))
