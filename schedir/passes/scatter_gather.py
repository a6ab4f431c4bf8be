"""ScatterGather: only 1/t of a boundary's bytes cross it, for t tensor-parallel ranks.

"Efficient Large-Scale Language Model Training on GPU Clusters" (SC21), section 4.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from schedir.analysis.models import Model
from schedir.ir.ops import ROWS, SHARDING, makers, takers
from schedir.ir.program import ADDRESS, OP, Program, Stream, Words
from schedir.passes.insert import insert
from schedir.passes.record import Pass


def scatter_gather(program: Program) -> Program:
    """Lower replicated boundaries: scatter before each send, gather just before each use.

    Not sooner: a host that blocks waits at a gather for its message.

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
    for change in SHARDING:  # of a value of this rank, before whoever takes it
        (token,) = ROWS[change].gives
        made = address[np.isin(op, makers(token))]
        here = np.flatnonzero(np.isin(op, takers(token)) & np.isin(address, made))
        at.append(here)
        words.append(address[here] | int(change) << OP)
    none = np.empty(0, np.int64)
    return insert(stream, (np.concatenate(at), np.concatenate(words)), (none, none))


def _read(program: Program, model: Model) -> dict[str, Any]:
    whole = program.tp == 1 or not program.ops.isdisjoint(SHARDING)
    return {"boundary": "replicated" if whole else "sharded"}


SCATTER_GATHER: Final = Pass(
    "scatter_gather",
    "messages",
    lambda program, options: scatter_gather(program),
    wanted=lambda program, options: options.boundary == "replicated",
    read=_read,
)
