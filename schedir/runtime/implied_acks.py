"""Implied acks: which messages of a rank are known to have arrived, and when.

Gloo's sends cannot be asked whether they have ended, only waited for, and a wait that comes too
early could hold up what the receiver waits for.  But a message that comes back, sent by the
receiver after it had used what it got, is a proof.
"""

from __future__ import annotations

from typing import Final

from schedir.ir.ops import LOCAL_HANDOVER, ROWS, SENDS, Hop
from schedir.ir.program import Program

# Who takes in what another stage sent: which sends these are, and where their stage is.
_SENT: Final = {
    row.op: [
        (send, LOCAL_HANDOVER[token][1])
        for token in row.needs
        for send in SENDS
        if token in LOCAL_HANDOVER and LOCAL_HANDOVER[token][0] in ROWS[send].needs
    ]
    for row in ROWS
}


def implied_acks(program: Program, rank: int) -> dict[int, list[int]]:
    """For receives of a rank, the sends that have arrived when it has; both by index.

    Each send is there once, with the first receive that proves it, if there is one.
    """
    own, there = program.streams[rank], {hop: program.beside(hop).tolist() for hop in Hop}
    where: dict[tuple[int | None, ...], int] = {instr: k for k, instr in enumerate(own)}
    peers = {program.peer(i) for i in own if i.op in SENDS}
    known: dict[int, list[int]] = {}
    for peer in peers:
        used: list[int] = []  # since the peer's last send to this rank
        for op, stage, mb in program.streams[peer]:
            row = ROWS[op]
            for send, hop in _SENT[op]:
                k = where.pop((send, there[hop][stage], mb), None)
                used += [k] if k is not None else []
            if row.hop and op in SENDS and used:
                back = where.get((row.meets, there[row.hop][stage], mb))
                if back is not None:
                    known[back], used = used, []
    return known
