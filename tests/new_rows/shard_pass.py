"""Shard: the weights of a stage are whole while it runs, and gathered a compute ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from schedir.ir.ops import ROWS, Opcode, Token
from schedir.ir.program import Program, Slots, Stream, pack
from schedir.passes.insert import insert
from schedir.passes.record import Expected, Pass, Present

_NEEDS = tuple(row.op for row in ROWS if Token.FULL in row.needs and Token.FULL not in row.frees)


def shard(program: Program) -> Program:
    """Unshard before and Reshard behind each run of one stage's computes, with two slots."""
    streams = tuple(map(_stream, program.streams))
    slots = (Slots.unsaid()._replace(full=2),) * program.plan.ranks
    return replace(program, streams=streams, slots=slots)


def _stream(stream: Stream) -> Stream:
    at = np.flatnonzero(np.isin(stream.op, _NEEDS))
    stage = stream.stage[at]
    begins = np.flatnonzero(np.append(True, stage[1:] != stage[:-1]))
    ends = np.append(begins[1:], len(at)) - 1
    turn = np.array([(stage[begins[:k]] == stage[b]).sum() for k, b in enumerate(begins.tolist())])
    ahead = at[np.maximum(begins - 1, 0)]  # a compute before the run begins
    ahead[0] = 0
    return insert(
        stream,
        (ahead, pack(Opcode.Unshard, stage[begins], turn)),
        (at[ends], pack(Opcode.Reshard, stage[begins], turn)),
    )


def _both(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.Reshard, present(Opcode.Unshard), "its weights were not whole")


SHARD = Pass(
    "shard",
    "memory",
    lambda program, options: shard(program),
    wanted=lambda program, options: bool(options.more.get("shard")),
    expected=_both,
    options=("shard",),
)
