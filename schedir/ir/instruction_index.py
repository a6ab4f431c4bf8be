"""Tables with the positions of all instructions of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Opcode, PeerRule, Row, Scope
from schedir.ir.program import WORD_DTYPE, Program, is_op, unpack

Positions = NDArray[np.int32]

NO_POSITION: Final = -1
_IS_PER_MICROBATCH: Final = np.array([row.scope is Scope.MICROBATCH for row in INSTRUCTIONS])
_IS_PER_OCCURRENCE: Final = np.array([row.scope is Scope.OCCURRENCE for row in INSTRUCTIONS])
_EMPTY: Final = np.empty(0, np.int32)


class InstructionIndex:
    """Tables with the positions of all instructions of a program.

    The position of an instruction is its index in the Streams of all ranks, one rank after the
    other.  The key of an instruction is a number that differs between the instructions of one
    opcode:

    - per microbatch: `stage * microbatches + mb`;
    - per stage: `row * stages + stage`, where `row` is the stage's row in the placement;
    - per rank: the rank.

    For instructions per stage or per rank, the keys of update 0 come first, then those of update 1,
    and so on.  For instructions per occurrence, the keys of occurrence 0 come first, then those of
    occurrence 1, and so on.

    Programs that differ only in their slots share one index.  So `program` may have other slots
    than the program that uses the index.  Do not read the slots of `program`.

    Args:
        program: The program.

    Attributes:
        program: The program.
        op: Opcode of each instruction, shape (instructions,).
        stage: Stage of each instruction, shape (instructions,).
        mb: Microbatch, update or occurrence of each instruction, shape (instructions,).
        joined: True for an instruction that is issued together with the previous one.
        valid: False for an instruction with a stage, microbatch, update or occurrence out of range.
        key: Key of each instruction, shape (instructions,).
        key_count: Scope -> number of possible keys.
        occurrences: Number of occurrences of each stage for which keys exist, at least 1.
        positions: Opcode -> positions of the valid instructions, ascending.
        position_by_key: Opcode -> position of the instruction with each key; -1 if there is none.
        is_all_valid: True if all instructions are valid.
        has_no_duplicates: True if no valid instruction exists twice.
    """

    def __init__(self, program: Program) -> None:
        self.program: Program = program
        shape = program.shape
        self._rank: Positions | None = None
        fields = program.words.view(WORD_DTYPE)  # no copy
        self.op: NDArray[np.uint8] = fields["op"].copy()
        self.stage: NDArray[np.uint16] = fields["stage"]
        self.mb: NDArray[np.uint32] = fields["mb"]
        self.joined: NDArray[np.bool_] = fields["joined"].astype(bool)
        self.valid: NDArray[np.bool_] = (self.stage < shape.stages) & (self.mb < shape.microbatches)
        self.key: Positions = np.multiply(self.stage, shape.microbatches, dtype=np.int32)
        np.add(self.key, self.mb, out=self.key, casting="unsafe")
        self.key[~self.valid] = 0
        order = np.argsort(self.op, kind="stable").astype(np.int32)
        ends = np.cumsum(np.bincount(self.op, minlength=len(INSTRUCTIONS))).tolist()
        row_positions = [
            (row, order[begin:end])
            for row, begin, end in zip(INSTRUCTIONS, [0, *ends], ends, strict=False)
            if begin < end
        ]
        occurrence_numbers = [
            self.mb[positions] for row, positions in row_positions if row.scope is Scope.OCCURRENCE
        ]
        # A wrong program may contain a very large occurrence number.  So the tables have at most as
        # many occurrences as the program has instructions with the scope OCCURRENCE.
        max_occurrences = max((int(mb.max()) + 1 for mb in occurrence_numbers), default=0)
        self.occurrences: int = max(1, min(sum(map(len, occurrence_numbers)), max_occurrences))
        self.key_count: dict[Scope, int] = {
            Scope.MICROBATCH: shape.stages * shape.microbatches,
            Scope.STAGE: shape.replica_ranks.size * shape.optimizer_steps,
            Scope.RANK: shape.ranks * shape.optimizer_steps,
            Scope.OCCURRENCE: shape.replica_ranks.size * self.occurrences,
        }
        for row, indices in row_positions:
            if row.scope is not Scope.MICROBATCH:
                number_limit = (
                    self.occurrences if row.scope is Scope.OCCURRENCE else shape.optimizer_steps
                )
                self.valid[indices] = (self.stage[indices] < shape.stages) & (
                    self.mb[indices] < number_limit
                )
                indices = indices[self.valid[indices]]
                self.key[indices] = self.compute_keys(row.scope, indices, self.mb[indices])
        self.is_all_valid: bool = bool(self.valid.all())
        if not self.is_all_valid:
            row_positions = [
                (row, positions[self.valid[positions]]) for row, positions in row_positions
            ]
        self.positions: dict[Opcode, Positions] = {
            row.op: positions for row, positions in row_positions if len(positions)
        }
        # One array contains the tables of all opcodes.  An entry NO_POSITION comes before and after
        # each table, so that `find_positions` can clip keys that are out of range.
        begins, total = np.zeros(256, np.int64), 1
        for op in self.positions:
            begins[op] = total
            total += self.key_count[INSTRUCTIONS[op].scope] + 1
        table = np.full(total, NO_POSITION, np.int32)
        cell = begins[self.op]
        cell += self.key
        position = np.arange(len(self), dtype=np.int32)
        if not self.is_all_valid:
            cell, position = cell[self.valid], position[self.valid]
        table[cell] = position
        self.has_no_duplicates: bool = bool((table[cell] == position).all())
        self._tables = {
            op: table[begins[op] - 1 : begins[op] + self.key_count[INSTRUCTIONS[op].scope] + 1]
            for op in self.positions
        }
        self.position_by_key: dict[Opcode, Positions] = {
            op: table[1:-1] for op, table in self._tables.items()
        }

    def __len__(self) -> int:
        return len(self.op)

    @classmethod
    def from_program(cls, program: Program) -> InstructionIndex:
        """Return the index of a program, which the program caches.

        Args:
            program: The program.
        """
        return program.cached("index", cls)

    def iterate_rows(self) -> Iterator[tuple[Row, Positions]]:
        """Yield each row of the table with valid instructions, and their positions, ascending."""
        return ((INSTRUCTIONS[op], positions) for op, positions in self.positions.items())

    def find_all_positions(self, ops: Iterable[Opcode]) -> Positions:
        """Return the positions of all valid instructions with one of the opcodes, ascending.

        Args:
            ops: The opcodes.
        """
        arrays = [self.positions[op] for op in ops if op in self.positions]
        return arrays[0] if len(arrays) == 1 else np.sort(np.concatenate([_EMPTY, *arrays]))

    def compute_keys(
        self, scope: Scope, positions: NDArray[Any], number: NDArray[Any] | None = None
    ) -> NDArray[np.int64]:
        """Return the keys that instructions would have if they were per stage or per rank.

        Args:
            scope: `Scope.RANK` for keys of ranks, any other scope for keys of stages.
            positions: Positions of the instructions.
            number: The update or the occurrence of each key, in the shape of `positions`.  The
                default is the update of each instruction.

        Returns:
            The keys, in the shape of `positions`.
        """
        shape = self.program.shape
        key: NDArray[np.int64]
        if scope is Scope.RANK:
            key, stride = self.rank[positions].astype(np.int64), shape.ranks
        else:
            key, stride = self.stage[positions].astype(np.int64), shape.replica_ranks.size
            if shape.placement_rows > 1:
                key += shape.stages * shape.replica_row_of_stage(key, self.rank[positions])
        if number is not None:
            key += np.asarray(number, np.int64) * stride
        elif shape.optimizer_steps > 1:
            key += self.find_updates(positions) * stride
        return key

    def find_updates(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the number of the update, from 0, to which each instruction belongs.

        Args:
            positions: Positions of the instructions.
        """
        mb = self.mb[positions].astype(np.int64)
        op = self.op[positions]
        microbatches_per_update = self.program.shape.microbatches_per_update
        # A program with occurrences has one update.
        update: NDArray[np.int64] = np.where(
            _IS_PER_MICROBATCH[op],
            mb // microbatches_per_update,
            np.where(_IS_PER_OCCURRENCE[op], 0, mb),
        )
        return update

    def find_neighbor_keys(self, peer_rule: PeerRule, positions: NDArray[Any]) -> Positions:
        """Return the keys of the same microbatches at the stages to which a peer rule leads.

        Args:
            peer_rule: The rule that leads from the stage of an instruction to the other stage.
            positions: Positions of instructions per microbatch.

        Returns:
            The keys, in the shape of `positions`; less than 0 if there is no such stage.
        """
        peer_stages = self.program.neighbor_stages(peer_rule)
        shift = (peer_stages - np.arange(len(peer_stages))) * self.program.shape.microbatches
        shift[peer_stages < 0] = -(2**30)  # makes every key negative
        return np.asarray(self.key[positions] + shift.astype(np.int32)[self.stage[positions]])

    def is_op(self, ops: Iterable[Opcode]) -> NDArray[np.bool_]:
        """Return a mask of the instructions that have one of the opcodes.

        Args:
            ops: The opcodes.

        Returns:
            The mask, shape (instructions,).
        """
        return is_op(self.op, tuple(ops))

    @cached_property
    def has_joined(self) -> bool:
        """Return whether any instruction is issued together with the previous one."""
        return bool(self.joined.any())

    @property
    def rank(self) -> Positions:
        """Return the rank of each instruction, shape (instructions,).

        For a program of more than 65536 instructions, each access computes the array again, to save
        memory.
        """
        if self._rank is not None:
            return self._rank
        ranks = np.arange(self.program.shape.ranks, dtype=np.int32)
        rank = np.repeat(ranks, np.diff(self.program.offsets))
        if len(rank) <= 2**16:
            self._rank = rank
        return rank

    def find_positions(self, op: Opcode, key: NDArray[np.int32]) -> Positions:
        """Return the positions of an opcode's instructions with the given keys.

        Args:
            op: The opcode.
            key: The keys, which may be out of range.

        Returns:
            The positions, in the shape of `key`; -1 if there is no such instruction or key.
        """
        table = self._tables.get(op)
        if table is None:
            return np.full(len(key), NO_POSITION, np.int32)
        return table.take(key + 1, mode="clip")

    def find_message_numbers(self) -> Positions:
        """Return the number that each transfer's message has in `Program.message_order`.

        Returns:
            The numbers, shape (instructions,); -1 for an instruction that is not a transfer, or
            whose message has no number.
        """
        number = np.full(len(self), NO_POSITION, np.int32)
        for send, numbers in self.program.message_order.items():
            for row in (INSTRUCTIONS[send], INSTRUCTIONS[INSTRUCTIONS[send].partner or send]):
                positions = np.flatnonzero(self.op == row.op)
                assert row.peer is not None
                number[positions] = numbers[
                    self.key[positions]
                    if row.op is send
                    else self.find_neighbor_keys(row.peer, positions)
                ]
        return number

    def locate(self, position: int) -> tuple[int, int, Instr]:
        """Return the rank of a position, the index in the rank's Stream, and the instruction.

        Args:
            position: The position in the Streams of all ranks.
        """
        rank = int(np.searchsorted(self.program.offsets, position, side="right")) - 1
        instr = unpack(int(self.program.words[position]))
        return rank, position - int(self.program.offsets[rank]), instr
