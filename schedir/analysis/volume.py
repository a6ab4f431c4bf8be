"""Volume: how many bytes each process sends in a step, read off a program."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.slots import message_sizes, whole_sizes
from schedir.ir.index import Index, Positions
from schedir.ir.ops import MEETINGS, ROWS, SENDS, Lane, Ring, Row, Token
from schedir.ir.program import Program
from schedir.ir.sizes import Sizes


def volume(program: Program, sizes: Sizes) -> dict[Lane, NDArray[np.float64]]:
    """Bytes that a process of each rank sends in all of a lowered program, by lane: shape (ranks,).

    An all-gather or a reduce-scatter of n bytes by a ring of g processes sends n (g-1)/g from each,
    and an all-reduce twice that (Patarasuk and Yuan 2009, section 3).  So of Psi bytes of weights,
    and as many of gradients, data parallelism sends 2 Psi, ZeRO-1 and 2 send 2 Psi, and ZeRO-3
    3 Psi where each stage has two turns, times (dp-1)/dp (arXiv 1910.02054, section 7).

    Norms, which are a few bytes, and tied weights, whose sizes nobody tells, are left out.  What
    passes beside what pieces sum or gather, as a residual stream, is taken for a part of it.

    >>> from schedir import Plan, Sizes, compile, schedules
    >>> from schedir.ir.ops import Lane
    >>> sizes = Sizes(params=4e9, grads=4e9)
    >>> for zero in range(4):
    ...     one = {"active": 1} if zero == 3 else {}  # stage whole: the last one has a single turn
    ...     program = compile(schedules.looped_bfs, Plan(1, 2, 4), dp=4, zero=zero, **one)
    ...     sent = volume(program, sizes).items()
    ...     print(zero, *(f"{lane.name} {each[0] / 1e9:g} GB" for lane, each in sent))
    0 DP 24 GB
    1 DP 12 GB PARAMS 12 GB
    2 DP 12 GB PARAMS 12 GB
    3 DP 12 GB PARAMS 21 GB
    """
    index, sent = Index.of(program), dict[Lane, NDArray[np.float64]]()

    def add(at: Positions, size: NDArray[np.float64]) -> None:
        if len(at) and size.any():
            lane = ROWS[int(index.op[at[0]])].lane
            total = sent.setdefault(lane, np.zeros(program.plan.ranks))
            np.add.at(total, index.rank[at], size)

    for op in SENDS:
        at = index.where_all((op,))
        add(at, message_sizes(program, sizes, at))
    for row in ROWS:
        if row.ring is not None:
            at = index.where_all((row.op,))
            add(at, _around(program, row, row.ring, sizes, at))
    return dict(sorted(sent.items()))


def _around(
    program: Program, row: Row, ring: Ring, sizes: Sizes, at: Positions
) -> NDArray[np.float64]:
    """Bytes that each process sends in each of some instructions of one kind."""
    plan, (token,) = program.plan, row.needs
    members = {"tp": program.tp, "dp": program.dp, "holders": plan.rows}[ring.members]
    if ring.size:
        whole = sizes.of(ring.size, plan.stages)[Index.of(program).stage[at]]
    else:
        whole = whole_sizes(program, token, sizes, at)
    if token is Token.GRAD and program.zero:  # which is in parts by then
        whole = whole / program.dp
    turns = ring.turns
    if program.sequence and row.op in MEETINGS[True]:
        # Sizes have all tokens and a rank's own, and either goes around once: a sum leaves these.
        turns, whole = 1, whole * members / (members + 1)
    return turns * whole * (members - 1) / members
