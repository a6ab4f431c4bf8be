"""Recompute: keep of a forward its input only, and run it again just before the backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedir.ir.ops import BACKWARDS, FORWARDS, Opcode
from schedir.ir.program import ADDRESS, OP, Program, Stream
from schedir.passes.insert import insert
from schedir.passes.record import Pass


def recompute(program: Program) -> Program:
    """R before each backward that does not follow its own forward at once."""
    return replace(program, streams=tuple(map(_stream, program.streams)))


def _stream(stream: Stream) -> Stream:
    op, address = stream.op, stream.words & ADDRESS
    at = np.flatnonzero(np.isin(op, BACKWARDS))
    own = np.isin(op[at - 1], FORWARDS) & (address[at - 1] == address[at])
    at = at[~own]
    none = np.empty(0, np.int64)
    return insert(stream, (at, address[at] | int(Opcode.Recompute) << OP), (none, none))


RECOMPUTE = Pass(
    "recompute",
    "draft",
    lambda program, options: recompute(program),
    wanted=lambda program, options: bool(options.more.get("recompute")),
    options=("recompute",),
)
