"""Offload: what a forward saved goes to the host behind it, and comes back before the backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.ir.ops import COMPUTE, FORWARDS, ROWS, Lane, Opcode, Token
from schedir.ir.program import ADDRESS, OP, Program, Words
from schedir.passes.insert import before, behind
from schedir.passes.record import Expected, Pass, Present

_USES = tuple(row.op for row in ROWS if Token.SAVED in row.needs and row.lane is Lane.COMPUTE)


def offload(program: Program) -> Program:
    """Offload behind each forward and Reload before it is used, if anything is between them."""
    made, used = _ends(program)
    work = np.cumsum(np.isin(program.op, COMPUTE))
    far = work[used] - work[made] > 1
    address = (program.words & ADDRESS)[made[far]]
    program = behind(program, made[far], address | int(Opcode.Offload) << OP)
    made, used = _ends(program)
    used = used[np.isin((program.words & ADDRESS)[used], address)]
    address = (program.words & ADDRESS)[used]
    return before(program, used, address | int(Opcode.Reload) << OP)


def _ends(program: Program) -> tuple[Words, Words]:
    """Where each forward stands, and the first that uses what it saved."""
    address = program.words & ADDRESS
    made, used = (np.flatnonzero(np.isin(program.op, ops)) for ops in (FORWARDS, _USES))
    if not len(used):
        return used, used
    values, first = np.unique(address[used], return_index=True)
    return made, used[first][np.searchsorted(values, address[made])]


def _both(program: Program, present: Present) -> Iterator[Expected]:
    yield Expected(Opcode.Reload, present(Opcode.Offload), "nothing was moved to the host")
    yield Expected(Opcode.Offload, present(Opcode.Reload), "nothing comes back")


PASSES = (
    Pass(
        "offload",
        "memory",
        lambda program, options: offload(program),
        wanted=lambda program, options: bool(options.more.get("offload")),
        expected=_both,
        options=("offload",),
    ),
)
