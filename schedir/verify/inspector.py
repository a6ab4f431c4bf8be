"""The class `Inspector`: tables of a program for the checks, and methods that raise errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CompletenessError, InstructionSite, SchedirError
from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Opcode, PeerRule
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program


class Inspector:
    """Has the tables of one program that the checks use, and raises the errors of the checks.

    Args:
        program: The program to check.
        index: The index of the program.

    Attributes:
        program: The program.
        index: The index of the program.
        shape: The pipeline shape of the program.
        stage: The stage of each key `stage * microbatches + mb`, shape (stages * microbatches,).
        mb: The microbatch of each key, of the same shape.
    """

    def __init__(self, program: Program, index: InstructionIndex) -> None:
        self.program: Program = program
        self.index: InstructionIndex = index
        self.shape: PipelineShape = program.shape
        shape = self.shape.stages, self.shape.microbatches
        self.stage, self.mb = np.indices(shape, np.int32).reshape(2, -1)

    def make_site(self, position: int, note: str = "") -> InstructionSite:
        """Return the instruction at a position as a site of an error.

        Args:
            position: The position of the instruction.
            note: A remark that the error shows after the instruction.
        """
        return InstructionSite(*self.index.locate(position), note)

    def refuse(
        self,
        fact: str,
        *sites: InstructionSite,
        error_type: type[SchedirError] = CompletenessError,
        hint: str = "",
    ) -> NoReturn:
        """Raise an error about the program.

        Args:
            fact: The message of the error.
            sites: The instructions that the error shows.
            error_type: The type of the error.
            hint: The remedy that the error suggests.

        Raises:
            SchedirError: Always, of type `error_type`.
        """
        raise error_type(fact, program=self.program.name, sites=sites, hint=hint)

    def refuse_first(self, wrong: NDArray[np.bool_], fact: Callable[[int], str]) -> None:
        """Raise an error for the first instruction that a mask marks, if there is one.

        Args:
            wrong: A mask over all instructions, shape (instructions,).
            fact: A function from the position of the instruction to the message of the error.

        Raises:
            CompletenessError: The mask marks an instruction.
        """
        if wrong.any():
            position = int(wrong.argmax())
            self.refuse(fact(position), self.make_site(position))

    def is_present(self, op: Opcode) -> NDArray[np.bool_]:
        """Return, for each key of an opcode, whether the program has the instruction with this key.

        Args:
            op: The opcode.

        Returns:
            A mask with one entry per key of the opcode. `InstructionIndex` defines the keys of
            opcodes per microbatch, stage, rank and occurrence.
        """
        table = self.index.position_by_key.get(op)
        if table is None:
            return np.zeros(self.index.key_count[INSTRUCTIONS[op].scope], bool)
        return np.asarray(table >= 0)

    def find_peer_keys(self, hop: PeerRule) -> NDArray[np.int32]:
        """Return, for each key, the key of the same microbatch at the peer stage.

        Args:
            hop: The rule that gives the peer stage.

        Returns:
            Keys of shape (stages * microbatches,), -1 where there is no peer stage.
        """
        peer_stage = self.program.neighbor_stages(hop)[self.stage]
        return np.where(
            peer_stage < 0, -1, peer_stage * np.int32(self.shape.microbatches) + self.mb
        )

    def make_key_site(self, op: Opcode, key: int) -> InstructionSite:
        """Return the instruction with an opcode and a key as a site of an error.

        Args:
            op: An opcode that has an instruction for the key.
            key: The key.
        """
        return self.make_site(int(self.index.position_by_key[op][key]))

    def refuse_missing(
        self, op: Opcode, key: int, reason: str = "", *sites: InstructionSite, hint: str = ""
    ) -> NoReturn:
        """Refuse the program because a stage lacks an instruction for a microbatch.

        Args:
            op: The opcode of the missing instruction.
            key: Its key, `stage * microbatches + mb`.
            reason: Text at the end of the message, with its punctuation.
            *sites: Other instructions that the error shows.
            hint: The remedy that the error suggests.

        Raises:
            CompletenessError: Always.
        """
        instr = Instr(op, int(self.stage[key]), int(self.mb[key]))
        rank = int(self.shape.rank_of_stage(*instr[1:]))
        self.refuse(f"{instr} is missing on rank {rank}{reason}", *sites, hint=hint)
