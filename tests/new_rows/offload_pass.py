"""Offload: what a forward saved goes to the host behind it, and comes back before the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from schedir.ir.ops import COMPUTE, FORWARDS, ROWS, Lane, Opcode, Token
from schedir.ir.program import ADDRESS, OP, Program, Stream
from schedir.passes.insert import insert
from schedir.passes.record import Expected, Pass, Present

_USES = tuple(row.op for row in ROWS if Token.SAVED in row.needs and row.lane is Lane.COMPUTE)


def offload(program: Program) -> Program:
    """Offload behind each forward and Reload before it is used, if anything is between them."""
    return replace(program, streams=tuple(map(_stream, program.streams)))


def _stream(stream: Stream) -> Stream:
    op, address = stream.op, stream.words & ADDRESS
    made, used = (np.flatnonzero(np.isin(op, ops)) for ops in (FORWARDS, _USES))
    if not len(used):
        return stream
    values, first = np.unique(address[used], return_index=True)
    pair = used[first][np.searchsorted(values, address[made])]
    work = np.cumsum(np.isin(op, COMPUTE))
    far = work[pair] - work[made] > 1
    made, pair = made[far], pair[far]
    return insert(
        stream,
        (pair, address[pair] | int(Opcode.Reload) << OP),
        (made, address[made] | int(Opcode.Offload) << OP),
    )


def _both(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.Reload, present(Opcode.Offload), "nothing was moved to the host")
    yield Expected(Opcode.Offload, present(Opcode.Reload), "nothing comes back")


OFFLOAD = Pass(
    "offload",
    "memory",
    lambda program, options: offload(program),
    wanted=lambda program, options: bool(options.more.get("offload")),
    expected=_both,
    options=("offload",),
)
