"""Stash: what a forward saved goes to the disk behind it, and comes back before the backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import COMPUTE_OPS, FORWARD_OPS, INSTRUCTIONS, Lane, Opcode, Value
from schedir.ir.program import ADDRESS_MASK, Program, Words, replace_opcode
from schedir.passes.insertion import insert_after, insert_before
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery

_USES = tuple(
    row.op for row in INSTRUCTIONS if Value.SAVED in row.needs and row.lane is Lane.COMPUTE
)


def stash(program: Program) -> Program:
    """Stash behind each forward and Take before it is used, if anything is between them."""
    made, used = _ends(program)
    work = np.cumsum(np.isin(program.op, COMPUTE_OPS))
    far = work[used] - work[made] > 1
    address = (program.words & ADDRESS_MASK)[made[far]]
    program = insert_after(program, made[far], replace_opcode(address, Opcode.Stash))
    made, used = _ends(program)
    used = used[np.isin((program.words & ADDRESS_MASK)[used], address)]
    return insert_before(program, used, replace_opcode(program.words[used], Opcode.Take))


def _ends(program: Program) -> tuple[Words, Words]:
    """Where each forward stands, and the first that uses what it saved."""
    address = program.words & ADDRESS_MASK
    made, used = (np.flatnonzero(np.isin(program.op, ops)) for ops in (FORWARD_OPS, _USES))
    if not len(used):
        return used, used
    values, first = np.unique(address[used], return_index=True)
    return made, used[first][np.searchsorted(values, address[made])]


def _both(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    for one, other, reason in (
        (Opcode.Take, Opcode.Stash, "nothing was moved to the disk"),
        (Opcode.Stash, Opcode.Take, "nothing comes back"),
    ):
        yield ExpectedInstructions(one, present(other), reason, counterpart=other)


PASSES = (
    Pass(
        "stash",
        "memory",
        lambda program, options: stash(program),
        should_run=lambda program, options: bool(options.extra_options.get("stash")),
        list_expected=_both,
        option_names=("stash",),
        opcodes=(Opcode.Stash, Opcode.Take),
    ),
)
