"""Index: where each instruction of a program stands."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.ops import ROWS, Instr, Opcode, Per
from schedir.program import JOINED, OP, OPS, STAGE, Program

Positions = NDArray[np.int32]

NONE: Final = -1


class Index:
    """All instructions of a program, one rank behind the other, by position.

    `op` and `rank` have one entry per instruction.  `key` is what an instruction is once for:
    stage*microbatches + mb, or the stage (for its second holder stages + the stage), or the rank
    (`Row.per`).  `at[op]` has the position of each key, -1 where there is none.  What is out of
    range is not `valid` and not in `at`.
    """

    def __init__(self, program: Program) -> None:
        self.program, plan = program, program.plan
        self.size = {
            Per.MICROBATCH: plan.stages * plan.microbatches,
            Per.STAGE: plan.holders.size,
            Per.RANK: plan.ranks,
        }
        self.op = (program.words >> OP).astype(np.uint8)
        stage, mb = self.stage, self.mb
        self.valid = (stage < plan.stages) & (mb < plan.microbatches)
        key = np.where(self.valid, stage, 0).astype(np.int32)
        key *= np.int32(plan.microbatches)
        key += np.where(self.valid, mb, 0).astype(np.int32)
        self.key: Positions = key
        for row in ROWS:
            if row.per is not Per.MICROBATCH:
                here = np.flatnonzero((self.op == row.op) & self.valid)
                key[here] = (stage if row.per is Per.STAGE else self.rank)[here]
                if row.per is Per.STAGE and plan.two_way:
                    second = plan.rank_of[stage[here]] != self.rank[here]
                    key[here[second]] += np.int32(plan.stages)
        self.at: dict[Opcode, Positions] = {}
        for row in ROWS:
            here = np.flatnonzero((self.op == row.op) & self.valid)
            if len(here):
                table = np.full(self.size[row.per], NONE, np.int32)
                table[key[here]] = here
                self.at[row.op] = table

    def __len__(self) -> int:
        return len(self.op)

    @property
    def stage(self) -> NDArray[np.uint16]:
        """The stage of each instruction."""
        return (self.program.words >> STAGE).astype(np.uint16)

    @property
    def mb(self) -> NDArray[np.uint32]:
        """The microbatch of each instruction."""
        return self.program.words.astype(np.uint32)

    @cached_property
    def rank(self) -> Positions:
        """The rank of each instruction."""
        ranks = np.arange(self.program.plan.ranks, dtype=np.int32)
        return np.repeat(ranks, np.diff(self.program.offsets))

    @cached_property
    def joined(self) -> NDArray[np.bool_]:
        """Whether each instruction is issued together with the one before it."""
        return np.asarray(self.program.words & JOINED, bool)

    def where(self, op: Opcode, key: NDArray[np.int32]) -> Positions:
        """Positions of `op` at the given keys; -1 where there is none, or no such key."""
        table = self.at.get(op)
        if table is None:
            return np.full(len(key), NONE, np.int32)
        inside = (key >= 0) & (key < len(table))
        return np.where(inside, table[np.where(inside, key, 0)], np.int32(NONE))

    def place(self, position: int) -> tuple[int, int, Instr]:
        """Rank, index in its Stream and instruction at a position."""
        rank = int(np.searchsorted(self.program.offsets, position, side="right")) - 1
        word = int(self.program.words[position])
        instr = Instr(OPS[word >> OP & 0xFF], word >> STAGE & 0xFFFF, word & 0xFFFFFFFF)
        return rank, position - int(self.program.offsets[rank]), instr
