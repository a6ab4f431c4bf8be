"""Inspector: tables of one program for the checks, and how they refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CompletenessError, InstructionSite, SchedirError
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Opcode, PeerRule
from schedir.ir.program import Program


class Inspector:
    """One program under inspection.

    `stage` and `mb` have an entry for each key stage*microbatches + mb.
    """

    def __init__(self, program: Program, index: InstructionIndex) -> None:
        self.program, self.index, self.shape = program, index, program.shape
        shape = self.shape.stages, self.shape.microbatches
        self.stage, self.mb = np.indices(shape, np.int32).reshape(2, -1)

    def make_site(self, position: int, note: str = "") -> InstructionSite:
        """The instruction at a position, for an error."""
        return InstructionSite(*self.index.locate(position), note)

    def refuse(
        self,
        fact: str,
        *sites: InstructionSite,
        kind: type[SchedirError] = CompletenessError,
        hint: str = "",
    ) -> NoReturn:
        """Refuse the program."""
        raise kind(fact, program=self.program.name, sites=sites, hint=hint)

    def refuse_first(self, wrong: NDArray[np.bool_], fact: Callable[[int], str]) -> None:
        """Refuse the first instruction that is marked wrong."""
        if wrong.any():
            at = int(wrong.argmax())
            self.refuse(fact(at), self.make_site(at))

    def is_present(self, op: Opcode) -> NDArray[np.bool_]:
        """Where `op` exists, by stage*microbatches + mb (or by stage, or rank)."""
        table = self.index.position_by_key.get(op)
        if table is None:
            return np.zeros(self.index.key_count[INSTRUCTIONS[op].scope], bool)
        return np.asarray(table >= 0)

    def find_peer_keys(self, hop: PeerRule) -> NDArray[np.int32]:
        """For each key that of the microbatch at the stage that is a hop further; -1 for none."""
        there = self.program.neighbor_stages(hop)[self.stage]
        return np.where(there < 0, -1, there * np.int32(self.shape.microbatches) + self.mb)

    def make_key_site(self, op: Opcode, key: int) -> InstructionSite:
        """The `op` of a key, for an error."""
        return self.make_site(int(self.index.position_by_key[op][key]))

    def refuse_missing(self, op: Opcode, key: int, reason: str = "") -> NoReturn:
        """Refuse a program for an instruction of a (stage, mb) that is not there."""
        instr = Instr(op, int(self.stage[key]), int(self.mb[key]))
        rank = int(self.shape.rank_of_stage(*instr[1:]))
        self.refuse(f"{instr} is missing on rank {rank}{reason}")
