"""Index: where each instruction of a program stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.ops import ROWS, Instr, Opcode, Per
from schedir.ir.program import FIELDS, Program, unpack

Positions = NDArray[np.int32]

NONE: Final = -1
_COUNTED: Final = np.array([row.per is Per.MICROBATCH for row in ROWS])


class Index:
    """All instructions of a program, one rank behind the other, by position.

    `op`, `stage`, `mb` and `joined` (issued with the one before it) have one entry per
    instruction.  `key` is what an instruction is once for: stage*microbatches + mb, or the stage
    (for its second holder stages + the stage), or the rank (`Row.per`); the latter for update 0,
    then all of them for update 1, and so on.  `at[op]` has the position of each key, -1 where
    there is none.  What is out of range is not `valid` and not in `at`.
    """

    def __init__(self, program: Program) -> None:
        self.program, plan = program, program.plan
        self.size = {
            Per.MICROBATCH: plan.stages * plan.microbatches,
            Per.STAGE: plan.holders.size * plan.updates,
            Per.RANK: plan.ranks * plan.updates,
        }
        fields = program.words.view(FIELDS)  # no copy
        self.op: NDArray[np.uint8] = fields["op"].copy()
        self.stage: NDArray[np.uint16] = fields["stage"]
        self.mb: NDArray[np.uint32] = fields["mb"]
        self.joined = fields["joined"].astype(bool)
        self.valid = (self.stage < plan.stages) & (self.mb < plan.microbatches)
        self.key: Positions = np.multiply(self.stage, plan.microbatches, dtype=np.int32)
        np.add(self.key, self.mb, out=self.key, casting="unsafe")
        self.key[~self.valid] = 0
        for row in ROWS:
            if row.per is not Per.MICROBATCH:
                here = np.flatnonzero(self.op == row.op)
                self.valid[here] &= self.mb[here] < plan.updates
                here = here[self.valid[here]]
                self.key[here] = self.ending(row.per, here)
        self.at: dict[Opcode, Positions] = {}
        for row in ROWS:
            here = np.flatnonzero((self.op == row.op) & self.valid)
            if len(here):
                table = np.full(self.size[row.per], NONE, np.int32)
                table[self.key[here]] = here
                self.at[row.op] = table

    def __len__(self) -> int:
        return len(self.op)

    def ending(self, per: Per, at: NDArray[np.intp]) -> NDArray[np.int64]:
        """The key of what some instructions' stage, or rank (`per`), has once in their update."""
        plan = self.program.plan
        key = (self.stage if per is Per.STAGE else self.rank)[at].astype(np.int64)
        if per is Per.STAGE and plan.two_way:
            key += plan.stages * (plan.rank_of[key] != self.rank[at])
        if plan.updates > 1:
            key += self.update(at) * (self.size[per] // plan.updates)
        return key

    def update(self, at: NDArray[np.intp]) -> NDArray[np.int64]:
        """The update that each of some instructions is for."""
        mb = self.mb[at].astype(np.int64)
        return np.where(_COUNTED[self.op[at]], mb // self.program.plan.per_update, mb)

    def among(self, ops: Iterable[Opcode]) -> NDArray[np.bool_]:
        """Whether each instruction is one of `ops`."""
        found = np.zeros(len(self), bool)
        for op in ops:
            found |= self.op == op
        return found

    @property
    def rank(self) -> Positions:
        """The rank of each instruction."""
        ranks = np.arange(self.program.plan.ranks, dtype=np.int32)
        return np.repeat(ranks, np.diff(self.program.offsets))

    def where(self, op: Opcode, key: NDArray[np.int32]) -> Positions:
        """Positions of `op` at the given keys; -1 where there is none, or no such key."""
        table = self.at.get(op)
        if table is None:
            return np.full(len(key), NONE, np.int32)
        inside = (key >= 0) & (key < len(table))
        return np.where(inside, table[np.where(inside, key, 0)], np.int32(NONE))

    def messages(self) -> Positions:
        """The number of each transfer's message in `Program.order`; -1 where there is none."""
        number = np.full(len(self), NONE, np.int32)
        for send, numbers in self.program.order.items():
            for row in (ROWS[send], ROWS[ROWS[send].meets or send]):
                at = np.flatnonzero(self.op == row.op)
                hop = 0 if row.op is send else row.hop  # from a receive to its send
                number[at] = numbers[self.key[at] + np.int32(hop * self.program.plan.microbatches)]
        return number

    def place(self, position: int) -> tuple[int, int, Instr]:
        """Rank, index in its Stream and instruction at a position."""
        rank = int(np.searchsorted(self.program.offsets, position, side="right")) - 1
        instr = unpack(int(self.program.words[position]))
        return rank, position - int(self.program.offsets[rank]), instr
