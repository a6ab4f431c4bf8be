"""Edit programs as lists of words, and register mutations.

A mutation takes a program and a random number generator. It returns another program, or None if it
finds nothing to change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode
from schedir.ir.program import JOINED_BIT, OP_SHIFT, STAGE_SHIFT, Program, SlotCounts, Stream
from schedir.ir.text_format import from_text

Place = tuple[int, int]  # rank, index


def op(word: int) -> Opcode:
    return Opcode(word >> OP_SHIFT & 0xFF)


def stage(word: int) -> int:
    return word >> STAGE_SHIFT & 0xFFFF


def mb(word: int) -> int:
    return word & 0xFFFFFFFF


def word(o: Opcode, s: int = 0, m: int = 0) -> int:
    return int(o) << OP_SHIFT | s << STAGE_SHIFT | m


def with_op(w: int, o: Opcode) -> int:
    return w & ~(0xFF << OP_SHIFT) | int(o) << OP_SHIFT


def bare(w: int) -> int:
    """Return the word of an instruction without the bit that joins it to a group."""
    return w & ~JOINED_BIT


def written(*ranks: str, microbatches: int = 1, header: str = "") -> Program:
    """Return a program from the texts of its Streams and of further header lines."""
    streams = "\n".join(f"rank {r}\n  {text}" for r, text in enumerate(ranks))
    return from_text(
        f"schedir 1\nprogram p\nranks {len(ranks)} microbatches {microbatches} {header}\n{streams}"
    )


def set_slot_counts(program: Program, kind: str, counts: list[int]) -> Program:
    """Return a program with a number of slots of a kind for each rank."""
    slots = program.slots or [SlotCounts.unspecified()] * program.shape.ranks
    both = zip(slots, counts, strict=True)
    return program.with_slots([one._replace(**{kind: count}) for one, count in both])


@dataclass
class Edit:
    """A program that is being edited.

    `lists` has the words of each rank.  `rank` and the index `at` select the current instruction.
    """

    program: Program
    rng: random.Random
    lists: list[list[int]]
    rank: int = 0
    at: int = 0

    @classmethod
    def of(cls, program: Program, rng: random.Random) -> Edit:
        return cls(program, rng, [s.words.tolist() for s in program.streams])

    def result(self) -> Program:
        words = (np.array(own, np.int64) for own in self.lists)
        return replace(self.program, streams=tuple(map(Stream, words)))

    @property
    def own(self) -> list[int]:
        return self.lists[self.rank]

    @property
    def word(self) -> int:
        return self.own[self.at]

    def put(self, w: int) -> None:
        """Replace the current instruction. It stays in its group."""
        self.own[self.at] = bare(w) | self.word & JOINED_BIT

    def places(self, *ops: Opcode) -> list[Place]:
        """Return the places of all instructions with some opcodes, or of all instructions."""
        return [
            (r, k)
            for r, own in enumerate(self.lists)
            for k, w in enumerate(own)
            if not ops or op(w) in ops
        ]

    def here(self, *ops: Opcode) -> list[int]:
        """Return the indices of such instructions on the current rank."""
        return [k for r, k in self.places(*ops) if r == self.rank]

    def partner(self, w: int) -> Place | None:
        """Return the place of the other side of a transfer, or None."""
        row = INSTRUCTIONS[op(w)]
        if row.partner is None or row.peer is None:
            return None
        other = int(self.program.neighbor_stages(row.peer)[stage(w)])
        if other < 0:
            return None
        wanted, rank = (
            word(row.partner, other, mb(w)),
            int(self.program.shape.rank_of_stage(other, mb(w))),
        )
        return next(((rank, k) for k, x in enumerate(self.lists[rank]) if bare(x) == wanted), None)


def pull(own: list[int], k: int) -> int:
    """Remove the word at index k and return it. The rest of its group stays a group."""
    w = own.pop(k)
    if not w & JOINED_BIT and k < len(own):
        own[k] = bare(own[k])
    return bare(w)


def push(own: list[int], k: int, w: int) -> None:
    """Insert a word before index k. Within a group, it joins the group."""
    own.insert(k, bare(w) | (own[k] & JOINED_BIT if k < len(own) else 0))


def swap(own: list[int], j: int, k: int) -> None:
    """Swap two words. The groups keep their indices."""
    a, b = own[j], own[k]
    own[j], own[k] = bare(b) | a & JOINED_BIT, bare(a) | b & JOINED_BIT


def move(own: list[int], k: int, to: int) -> None:
    """Move the word at index k before index `to`, counted before the move."""
    to = min(max(to, 0), len(own))
    w = pull(own, k)
    push(own, to - (to > k), w)


def move_to_other_rank(e: Edit) -> bool | None:
    """Move the current instruction to a random place on another rank.

    Return False if there is no other rank.
    """
    if len(e.lists) < 2:
        return False
    other = e.rng.choice([own for rank, own in enumerate(e.lists) if rank != e.rank])
    push(other, e.rng.randint(0, len(other)), pull(e.own, e.at))
    return None


def swap_with_other(e: Edit, *ops: Opcode) -> bool | None:
    """Swap the current instruction with another one on its rank that has one of some opcodes.

    Return False if there is none.
    """
    others = [k for k in e.here(*ops) if k != e.at]
    if not others:
        return False
    swap(e.own, e.at, e.rng.choice(others))
    return None


def groups(own: list[int]) -> list[range]:
    """Return the index ranges of the groups of two or more instructions."""
    begins = [k for k, w in enumerate(own) if not w & JOINED_BIT] + [len(own)]
    return [range(a, b) for a, b in pairwise(begins) if b - a > 1]


# ---------------------------------------------------------------- mutations

Mutation = Callable[[Program, random.Random], Program | None]
MUTATIONS: dict[str, Mutation] = {}


def whole(change: Callable[[Edit], object]) -> None:
    """Register a mutation of a program. It returns False if it finds nothing to change."""

    def mutate(program: Program, rng: random.Random) -> Program | None:
        edit = Edit.of(program, rng)
        return None if change(edit) is False else edit.result()

    MUTATIONS[change.__name__] = mutate


def at(*ops: Opcode) -> Callable[[Callable[[Edit], object]], None]:
    """Register a mutation at a random instruction with one of some opcodes, or with any opcode."""

    def one(change: Callable[[Edit], object]) -> None:
        def somewhere(edit: Edit) -> object:
            places = edit.places(*ops)
            if not places:
                return False
            edit.rank, edit.at = edit.rng.choice(places)
            return change(edit)

        somewhere.__name__ = change.__name__
        whole(somewhere)

    return one
