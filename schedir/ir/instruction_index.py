"""Position tables of all instructions of a program."""

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
    """All instructions of a program, one rank behind the other, by position.

    `op`, `stage`, `mb` and `joined` (issued with the one before it) have one entry per
    instruction.  `key` is what an instruction is once for: stage*microbatches + mb, or the stage
    (for its holder in row k of them k*stages + the stage), or the rank (`Row.per`); the latter for
    update or turn 0, then all of them for update 1, and so on.  `positions[op]` has where an opcode
    stands, ascending, and `at[op]` the position of each key, -1 where there is none.  What is out
    of range is not `valid`, and in neither.  `is_all_valid` says that nothing is out of range, and
    `has_no_duplicates` that nothing in range is there twice.  Of `program` only what is no matter
    of slots may be asked: programs that differ in these have one Index.
    """

    def __init__(self, program: Program) -> None:
        self.program, shape = program, program.shape
        self._rank: Positions | None = None
        fields = program.words.view(WORD_DTYPE)  # no copy
        self.op: NDArray[np.uint8] = fields["op"].copy()
        self.stage: NDArray[np.uint16] = fields["stage"]
        self.mb: NDArray[np.uint32] = fields["mb"]
        self.joined = fields["joined"].astype(bool)
        self.valid = (self.stage < shape.stages) & (self.mb < shape.microbatches)
        self.key: Positions = np.multiply(self.stage, shape.microbatches, dtype=np.int32)
        np.add(self.key, self.mb, out=self.key, casting="unsafe")
        self.key[~self.valid] = 0
        order = np.argsort(self.op, kind="stable").astype(np.int32)
        ends = np.cumsum(np.bincount(self.op, minlength=len(INSTRUCTIONS))).tolist()
        found = [
            (row, order[begin:end])
            for row, begin, end in zip(INSTRUCTIONS, [0, *ends], ends, strict=False)
            if begin < end
        ]
        turns = [self.mb[at] for row, at in found if row.scope is Scope.OCCURRENCE]
        # Of a stage: no more than there are instructions for them, and the first in any case.
        most = max((int(mb.max()) + 1 for mb in turns), default=0)
        self.occurrences = max(1, min(sum(map(len, turns)), most))
        self.key_count = {
            Scope.MICROBATCH: shape.stages * shape.microbatches,
            Scope.STAGE: shape.replica_ranks.size * shape.optimizer_steps,
            Scope.RANK: shape.ranks * shape.optimizer_steps,
            Scope.OCCURRENCE: shape.replica_ranks.size * self.occurrences,
        }
        for row, here in found:
            if row.scope is not Scope.MICROBATCH:
                times = self.occurrences if row.scope is Scope.OCCURRENCE else shape.optimizer_steps
                self.valid[here] = (self.stage[here] < shape.stages) & (self.mb[here] < times)
                here = here[self.valid[here]]
                self.key[here] = self.compute_keys(row.scope, here, self.mb[here])
        self.is_all_valid = bool(self.valid.all())
        if not self.is_all_valid:
            found = [(row, at[self.valid[at]]) for row, at in found]
        self.positions: dict[Opcode, Positions] = {row.op: at for row, at in found if len(at)}
        # All tables lie in one, each with an entry before and behind it that says NONE.
        begins, total = np.zeros(256, np.int64), 1
        for op in self.positions:
            begins[op] = total
            total += self.key_count[INSTRUCTIONS[op].scope] + 1
        table = np.full(total, NO_POSITION, np.int32)
        cell = begins[self.op]
        cell += self.key
        own = np.arange(len(self), dtype=np.int32)
        if not self.is_all_valid:
            cell, own = cell[self.valid], own[self.valid]
        table[cell] = own
        self.has_no_duplicates = bool((table[cell] == own).all())
        self._tables = {
            op: table[begins[op] - 1 : begins[op] + self.key_count[INSTRUCTIONS[op].scope] + 1]
            for op in self.positions
        }
        self.position_by_key = {op: table[1:-1] for op, table in self._tables.items()}

    def __len__(self) -> int:
        return len(self.op)

    @classmethod
    def from_program(cls, program: Program) -> InstructionIndex:
        """The index of a program, which is made once."""
        return program.cached("index", cls)

    def iterate_rows(self) -> Iterator[tuple[Row, Positions]]:
        """The rows of which there are instructions in range, and where these stand."""
        return ((INSTRUCTIONS[op], at) for op, at in self.positions.items())

    def find_all_positions(self, ops: Iterable[Opcode]) -> Positions:
        """Where any of some opcodes stands, ascending."""
        found = [self.positions[op] for op in ops if op in self.positions]
        return found[0] if len(found) == 1 else np.sort(np.concatenate([_EMPTY, *found]))

    def compute_keys(
        self, scope: Scope, positions: NDArray[Any], number: NDArray[Any] | None = None
    ) -> NDArray[np.int64]:
        """The key of what some instructions' stage, or rank (`scope`), has the given times.

        `number` is the update or the turn; without it, it is the update of each instruction.
        """
        shape = self.program.shape
        key: NDArray[np.int64]
        if scope is Scope.RANK:
            key, each = self.rank[positions].astype(np.int64), shape.ranks
        else:
            key, each = self.stage[positions].astype(np.int64), shape.replica_ranks.size
            if shape.placement_rows > 1:
                key += shape.stages * shape.replica_row_of_stage(key, self.rank[positions])
        if number is not None:
            key += np.asarray(number, np.int64) * each
        elif shape.optimizer_steps > 1:
            key += self.find_updates(positions) * each
        return key

    def find_updates(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """The update that each of some instructions is for."""
        mb = self.mb[positions].astype(np.int64)
        op, each = self.op[positions], self.program.shape.microbatches_per_update
        # Turns are of the only update.
        update: NDArray[np.int64] = np.where(
            _IS_PER_MICROBATCH[op], mb // each, np.where(_IS_PER_OCCURRENCE[op], 0, mb)
        )
        return update

    def find_neighbor_keys(self, peer_rule: PeerRule, positions: NDArray[Any]) -> Positions:
        """The keys of some instructions' microbatches, of which they are, at the stage that is a
        hop from theirs; less than 0 where there is none.
        """
        there = self.program.neighbor_stages(peer_rule)
        shift = (there - np.arange(len(there))) * self.program.shape.microbatches
        shift[there < 0] = -(2**30)  # more than any key
        return np.asarray(self.key[positions] + shift.astype(np.int32)[self.stage[positions]])

    def is_op(self, ops: Iterable[Opcode]) -> NDArray[np.bool_]:
        """Whether each instruction is one of `ops`."""
        return is_op(self.op, tuple(ops))

    @cached_property
    def has_joined(self) -> bool:
        """Whether any instruction is issued together with the one before it."""
        return bool(self.joined.any())

    @property
    def rank(self) -> Positions:
        """The rank of each instruction; made anew each time where it would take much room."""
        if self._rank is not None:
            return self._rank
        ranks = np.arange(self.program.shape.ranks, dtype=np.int32)
        rank = np.repeat(ranks, np.diff(self.program.offsets))
        if len(rank) <= 2**16:
            self._rank = rank
        return rank

    def find_positions(self, op: Opcode, key: NDArray[np.int32]) -> Positions:
        """Positions of `op` at the given keys; -1 where there is none, or no such key."""
        table = self._tables.get(op)
        if table is None:
            return np.full(len(key), NO_POSITION, np.int32)
        return table.take(key + 1, mode="clip")

    def find_message_numbers(self) -> Positions:
        """The number of each transfer's message in `Program.order`; -1 where there is none."""
        number = np.full(len(self), NO_POSITION, np.int32)
        for send, numbers in self.program.message_order.items():
            for row in (INSTRUCTIONS[send], INSTRUCTIONS[INSTRUCTIONS[send].partner or send]):
                at = np.flatnonzero(self.op == row.op)
                assert row.peer is not None
                number[at] = numbers[
                    self.key[at] if row.op is send else self.find_neighbor_keys(row.peer, at)
                ]
        return number

    def locate(self, position: int) -> tuple[int, int, Instr]:
        """Rank, index in its Stream and instruction at a position."""
        rank = int(np.searchsorted(self.program.offsets, position, side="right")) - 1
        instr = unpack(int(self.program.words[position]))
        return rank, position - int(self.program.offsets[rank]), instr
