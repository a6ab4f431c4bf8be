"""Shard: the weights of a stage are whole while it runs, and gathered a compute ahead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.ops import ROWS, Opcode, Token
from schedir.ir.program import STAGE, Program, Slots, pack
from schedir.passes.insert import before, behind
from schedir.passes.record import Expected, Pass, Present

_NEEDS = tuple(row.op for row in ROWS if Token.FULL in row.needs and Token.FULL not in row.frees)


def shard(program: Program) -> Program:
    """Unshard before and Reshard behind each run of one stage's computes, with two slots."""
    at = np.flatnonzero(np.isin(program.op, _NEEDS))
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    stage = program.words[at] >> STAGE & 0xFFFF
    new = np.append(True, (stage[1:] != stage[:-1]) | (rank[1:] != rank[:-1]))
    begins = np.flatnonzero(new)
    own, last = stage[begins], at[np.append(begins[1:], len(at)) - 1]
    turn = np.array([(own[:k] == one).sum() for k, one in enumerate(own.tolist())])
    first = np.append(True, rank[begins][1:] != rank[begins][:-1])
    # A compute before the run begins, or at the beginning of the Stream.
    ahead = np.where(first, program.offsets[rank[begins]], at[np.maximum(begins - 1, 0)])
    program = behind(program, last, pack(Opcode.Reshard, own, turn))
    ahead += np.searchsorted(last, ahead)
    program = before(program, ahead, pack(Opcode.Unshard, own, turn))
    return program.with_slots((Slots.unsaid()._replace(full=2),) * program.plan.ranks)


def _both(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.Reshard, present(Opcode.Unshard), "its weights were not whole")


PASSES = (
    Pass(
        "shard",
        "memory",
        lambda program, options: shard(program),
        wanted=lambda program, options: bool(options.more.get("shard")),
        expected=_both,
        options=("shard",),
        order=1,
    ),
)
