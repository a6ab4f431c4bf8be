"""Shard: the weights of a stage are whole while it is computed with, and parts in between.

ZeRO (arXiv 1910.02054) as instructions: at level 3 as many stages of a rank are whole at once as
`active` says, below it all of them are, from the beginning of a step to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from schedir.ir.ops import ROWS, Opcode, Token
from schedir.ir.program import STAGE, Program, pack
from schedir.passes.insert import before, behind
from schedir.passes.record import Expected, Options, Pass, Present

_READS: Final = tuple(row.op for row in ROWS if Token.FULL in {*row.needs} - {*row.frees})


def shard(program: Program, options: Options) -> Program:
    """Unshard before and Reshard behind each run of one stage's computes."""
    at = np.flatnonzero(np.isin(program.op, _READS))
    stage = program.words[at] >> STAGE & 0xFFFF
    at, stage = at[stage >= program.frozen], stage[stage >= program.frozen]
    rank = np.searchsorted(program.offsets, at, side="right") - 1
    key = rank * program.plan.stages + stage
    if program.zero < 3:
        begins = np.sort(np.unique(key, return_index=True)[1])
        last = np.array([np.flatnonzero(key == key[k])[-1] for k in begins])
    else:
        begins = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
        last = np.append(begins[1:], len(at))[: len(begins)] - 1
    turn = np.array([(key[begins][:k] == one).sum() for k, one in enumerate(key[begins].tolist())])
    own, begins, last = stage[begins], at[begins], at[last]
    order = np.argsort(last)
    words = pack(Opcode.Reshard, own, turn)
    program = behind(program, last[order], words[order])
    begins = begins + np.searchsorted(np.sort(last), begins)
    return before(program, begins, pack(Opcode.Unshard, own, turn))


def _both(program: Program, present: Present) -> Iterator[Expected]:
    once = present(Opcode.Unshard).copy()
    each = np.arange(program.plan.stages) >= program.frozen
    once[: program.plan.holders.size] = np.tile(each, program.plan.rows)
    once &= program.zero > 0
    why = "the program says 'zero 0'" if not program.zero else "its weights are not gathered"
    yield Expected(Opcode.Unshard, once, why)
    yield Expected(Opcode.Reshard, once, why)


PASSES = (
    Pass("shard", "memory", shard, lambda program, options: program.zero > 0, _both, order=1),
)
