"""Programs that offload saved activations at places that a test draws."""

from __future__ import annotations

import random

import numpy as np

from schedir.ir.instruction_index import InstructionIndex
from schedir.ir.isa.instructions import INSTRUCTIONS, Lane, Opcode, Value
from schedir.ir.program import ADDRESS_MASK, OP_SHIFT, Program
from schedir.passes.insertion import insert_at_positions

USES = tuple(
    row.op for row in INSTRUCTIONS if Value.SAVED in row.needs and row.lane is Lane.COMPUTE
)


def offload_randomly(
    program: Program, seed: int, *, share: float = 1.0, spilled: float = 0.0, late: float = 0.5
) -> Program:
    """Return a program that offloads a share of its saved activations to the host.

    A share `spilled` of these goes on to the disk. The instructions are at random places between
    the forward and the use, or, for a share `late`, directly after the forward and before the use.
    """
    rng, joined = random.Random(seed), [*program.joined.tolist(), False]
    index = InstructionIndex.from_program(program)
    address, ops = program.words & ADDRESS_MASK, program.op.tolist()
    rank = np.repeat(range(program.shape.ranks), np.diff(program.offsets)).tolist()
    placed: list[tuple[int, int, int]] = []
    for made in np.flatnonzero(program.op == Opcode.Forward).tolist():
        if index.stage[made] < program.frozen_stages or rng.random() >= share:
            continue
        same = np.flatnonzero(address == address[made]).tolist()
        first = made + 1
        last = next(n for n in same if n > made and ops[n] in USES)
        while joined[first]:
            first += 1
        while joined[last]:
            last -= 1
        free = [n for n in range(first, last + 1) if not joined[n]]
        new = [Opcode.Offload, Opcode.Reload]
        if rng.random() < spilled:
            new[1:1] = [Opcode.OffloadToDisk, Opcode.ReloadFromDisk]
        at = sorted(rng.choices(free, k=len(new)))
        if rng.random() < late:
            at[0], at[-1] = first, last
        word = int(address[made])
        placed += [
            (n, rank[made], word | int(op) << OP_SHIFT) for n, op in zip(at, new, strict=True)
        ]
    if not placed:
        return program
    places, ranks, words = zip(*placed, strict=True)
    return insert_at_positions(
        program, np.array(places), np.array(ranks), np.array(words, program.words.dtype)
    )
