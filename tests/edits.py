"""Edits: programs as lists of words, what a hand does to them, and the list of mutations.

A mutation takes a program and a random number generator, and returns another program, or None
where it finds nothing to change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from schedir.ir.isa.instructions import INSTRUCTIONS, Opcode
from schedir.ir.program import JOINED_BIT, OP_SHIFT, STAGE_SHIFT, Program, Stream
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
    """The word of an instruction, joined or not."""
    return w & ~JOINED_BIT


def written(*ranks: str, microbatches: int = 1, header: str = "") -> Program:
    """A program from the text of its Streams; one stage per rank unless the header says more."""
    streams = "\n".join(f"rank {r}\n  {text}" for r, text in enumerate(ranks))
    return from_text(
        f"schedir 1\nprogram p\nranks {len(ranks)} microbatches {microbatches} {header}\n{streams}"
    )


@dataclass
class Edit:
    """A program that is being changed.  `rank` and `at` say where, in `lists` and in `own`."""

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
        """Another instruction in the place of this one."""
        self.own[self.at] = bare(w) | self.word & JOINED_BIT

    def places(self, *ops: Opcode) -> list[Place]:
        """Where these instructions stand, on any rank; all where none are named."""
        return [
            (r, k)
            for r, own in enumerate(self.lists)
            for k, w in enumerate(own)
            if not ops or op(w) in ops
        ]

    def here(self, *ops: Opcode) -> list[int]:
        """The same on this rank: indices."""
        return [k for r, k in self.places(*ops) if r == self.rank]

    def partner(self, w: int) -> Place | None:
        """Where the other side of a transfer stands."""
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
    """Take the word at k out of its list; what is left of its group stays one."""
    w = own.pop(k)
    if not w & JOINED_BIT and k < len(own):
        own[k] = bare(own[k])
    return bare(w)


def push(own: list[int], k: int, w: int) -> None:
    """Put a word before index k; inside a group it becomes one of it."""
    own.insert(k, bare(w) | (own[k] & JOINED_BIT if k < len(own) else 0))


def swap(own: list[int], j: int, k: int) -> None:
    """Two words change places; which places are joined stays."""
    a, b = own[j], own[k]
    own[j], own[k] = bare(b) | a & JOINED_BIT, bare(a) | b & JOINED_BIT


def move(own: list[int], k: int, to: int) -> None:
    """The word at k to before index `to`, as indices were; both ends count."""
    to = min(max(to, 0), len(own))
    w = pull(own, k)
    push(own, to - (to > k), w)


def to_another_rank(e: Edit) -> bool | None:
    """Move the instruction to anywhere on another rank; False where there is none."""
    if len(e.lists) < 2:
        return False
    other = e.rng.choice([own for rank, own in enumerate(e.lists) if rank != e.rank])
    push(other, e.rng.randint(0, len(other)), pull(e.own, e.at))
    return None


def to_another_place(e: Edit, *ops: Opcode) -> bool | None:
    """Swap the instruction with another of some kinds on its rank; False where there is none."""
    others = [k for k in e.here(*ops) if k != e.at]
    if not others:
        return False
    swap(e.own, e.at, e.rng.choice(others))
    return None


def groups(own: list[int]) -> list[range]:
    """The index ranges of groups of two and more."""
    begins = [k for k, w in enumerate(own) if not w & JOINED_BIT] + [len(own)]
    return [range(a, b) for a, b in pairwise(begins) if b - a > 1]


# ---------------------------------------------------------------- mutations

Mutation = Callable[[Program, random.Random], Program | None]
MUTATIONS: dict[str, Mutation] = {}


def whole(change: Callable[[Edit], object]) -> None:
    """A mutation of the program as a whole; one that returns False found nothing to change."""

    def mutate(program: Program, rng: random.Random) -> Program | None:
        edit = Edit.of(program, rng)
        return None if change(edit) is False else edit.result()

    MUTATIONS[change.__name__] = mutate


def at(*ops: Opcode) -> Callable[[Callable[[Edit], object]], None]:
    """A mutation at an instruction with one of these opcodes; at any, where none are named."""

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
