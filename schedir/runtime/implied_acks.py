"""Implied acks: which messages of a rank are known to have arrived, and when.

Gloo's sends cannot be asked whether they have ended, only waited for, and a wait that comes too
early could hold up what the receiver waits for.  But a message that comes back, sent by the
receiver after it had used what it got, is a proof.
"""

from __future__ import annotations

from typing import Final

from schedir.ir.ops import LOCAL_HANDOVER, ROWS, SENDS
from schedir.ir.program import Program

# Who takes in what a neighbouring stage sent: which send that is, and how far away its stage.
_SENT: Final = {
    row.op: (send, LOCAL_HANDOVER[token][1])
    for row in ROWS
    for token in row.needs
    for send in SENDS
    if token in LOCAL_HANDOVER and LOCAL_HANDOVER[token][0] in ROWS[send].needs
}


def implied_acks(program: Program, rank: int) -> dict[int, list[int]]:
    """For receives of a rank, the sends that have arrived when it has; both by index.

    Each send is there once, with the first receive that proves it, if there is one.
    """
    plan, own = program.plan, program.streams[rank]
    where: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(own)}
    peers = {int(plan.rank_at(i.stage + ROWS[i.op].hop, i.mb)) for i in own if i.op in SENDS}
    known: dict[int, list[int]] = {}
    for peer in peers:
        used: list[int] = []  # since the peer's last send to this rank
        for op, stage, mb in program.streams[peer]:
            row = ROWS[op]
            if op in _SENT:
                send, hop = _SENT[op]
                k = where.pop((send, stage + hop, mb), None)
                used += [k] if k is not None else []
            elif op in SENDS and used:
                back = where.get((row.meets, stage + row.hop, mb))
                if back is not None:
                    known[back], used = used, []
    return known
