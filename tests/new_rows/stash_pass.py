"""Stash: move saved activations to the disk after their forward, and back before their backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.isa.instructions import COMPUTE_OPS, FORWARD_OPS, INSTRUCTIONS, Lane, Opcode, Value
from schedir.ir.program import ADDRESS_MASK, Program, Words, replace_opcode
from schedir.passes.insertion import insert_after, insert_before
from schedir.passes.pass_types import ExpectedInstructions, Pass, PresenceQuery

_USERS = tuple(
    row.op for row in INSTRUCTIONS if Value.SAVED in row.needs and row.lane is Lane.COMPUTE
)


def stash(program: Program) -> Program:
    """Insert the moves of each microbatch that has other computes before its backward.

    Args:
        program: A program with its backwards.
    """
    forwards, first_users = _find_lifetimes(program)
    compute_count = np.cumsum(np.isin(program.op, COMPUTE_OPS))
    forwards = forwards[compute_count[first_users] - compute_count[forwards] > 1]
    words = program.words[forwards]
    program = insert_after(program, forwards, replace_opcode(words, Opcode.Stash))
    _, first_users = _find_lifetimes(program)
    addresses = program.words[first_users] & ADDRESS_MASK
    first_users = first_users[np.isin(addresses, words & ADDRESS_MASK)]
    words = program.words[first_users]
    return insert_before(program, first_users, replace_opcode(words, Opcode.Unstash))


def _find_lifetimes(program: Program) -> tuple[Words, Words]:
    """Return the positions of all forwards, and of the first user of what each one saved."""
    address = program.words & ADDRESS_MASK
    forwards, users = (np.flatnonzero(np.isin(program.op, ops)) for ops in (FORWARD_OPS, _USERS))
    if not len(users):
        return users, users
    used_addresses, first = np.unique(address[users], return_index=True)
    return forwards, users[first][np.searchsorted(used_addresses, address[forwards])]


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    for op, other, reason in (
        (Opcode.Unstash, Opcode.Stash, "its activations are not moved to the disk"),
        (Opcode.Stash, Opcode.Unstash, "its activations are not moved back"),
    ):
        yield ExpectedInstructions(op, present(other), reason, counterpart=other)


PASSES = (
    Pass(
        "stash",
        "memory",
        lambda program, options: stash(program),
        should_run=lambda program, options: bool(options.extra_options.get("stash")),
        list_expected=_list_expected,
        option_names=("stash",),
        opcodes=(Opcode.Stash, Opcode.Unstash),
    ),
)
