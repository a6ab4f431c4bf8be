"""Check that every message has both sides, and that all members take part in collectives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UnmatchedTransferError
from schedir.ir.isa.instructions import (
    COLLECTIVES,
    COMPUTE,
    OF_GRADIENTS,
    RECEIVES,
    ROWS,
    SENDS,
    SPLIT_CHANGES,
    Instr,
    Opcode,
    PeerRule,
    form_changes,
)
from schedir.verify.inspector import Inspector

_MOVE_GRADIENTS = tuple(op for op in OF_GRADIENTS if op not in COMPUTE)
_BEFORE = tuple(send for send in SENDS if send not in OF_GRADIENTS)  # of any backward
# The instruction that gives a sent value a form, the send, and the one that takes the form.
_FORMED = tuple(
    (gives, send, takes)
    for send, receive in zip(SENDS, RECEIVES, strict=True)
    for gives in form_changes(ROWS[send].needs[0])
    for takes in form_changes(ROWS[receive].gives[0])
    if ROWS[gives].form is ROWS[takes].form
)
_SPLITS_SENT = tuple(op for op in SPLIT_CHANGES if op in {gives for gives, _, _ in _FORMED})


def transfers(look: Inspector) -> None:
    """Each value that crosses ranks is sent and received, and nothing else is."""
    shape, m = look.shape, look.shape.microbatches
    if not look.program.trains:
        look.refuse_first(
            look.index.is_op(_MOVE_GRADIENTS),
            lambda at: "a program without a backward has no gradient to move",
        )
    for send in SENDS if look.program.trains else _BEFORE:
        row = ROWS[send]
        receive = row.partner
        assert receive is not None and row.peer is not None
        if not look.program.has(row.needs[0]) and {send, receive}.isdisjoint(look.index.at):
            continue
        stage, mb = np.arange(shape.stages)[:, None], np.arange(m)
        other = look.program.beside(row.peer)[:, None]
        inside = other >= look.program.first_of(send)
        there = np.maximum(other, 0)
        here, away = shape.rank_at(stage, mb), shape.rank_at(there, mb)
        crosses, arrives = np.zeros((2, shape.stages, m), bool)
        crosses[:] = inside & (here != away)
        arrives[there[inside]] = crosses[inside[:, 0]]  # receives that some edge accounts for
        sent, arrived = look.present(send), look.present(receive)
        crosses, arrives = crosses.reshape(-1), arrives.reshape(-1)
        if not ((sent != crosses) | (arrived != arrives)).any():
            continue
        key = np.where(inside, there * m + mb, 0).reshape(-1)
        got = arrived[key] & np.repeat(inside, m)
        here, away = (np.broadcast_to(k, (shape.stages, m)).reshape(-1) for k in (here, away))
        other = np.repeat(other, m)
        _stray(look, send, sent & ~crosses)
        _stray(look, receive, arrived & ~arrives)
        for one, two, side, gone, k in (
            (sent, got, send, receive, np.arange(len(sent))),
            (got, sent, receive, send, key),
        ):
            if (one & ~two & crosses).any():
                at = int((one & ~two & crosses).argmax())
                site = look.site_of(side, int(k[at]))
                partner = Instr(gone, int(other[at] if gone is receive else look.stage[at]),
                                int(look.mb[at]))  # fmt: skip
                rank = int(shape.rank_at(partner.stage, partner.mb))
                look.refuse(
                    f"{site.instr} has no {partner} on rank {rank}",
                    site,
                    kind=UnmatchedTransferError,
                )
        lost = crosses & ~sent
        if lost.any():
            at = int(lost.argmax())
            instr = Instr(send, int(look.stage[at]), int(look.mb[at]))
            look.refuse(
                f"{instr} and its receive are missing: rank {here[at]} has what rank "
                f"{away[at]} needs",
                kind=UnmatchedTransferError,
            )


def _stray(look: Inspector, op: Opcode, stray: NDArray[np.bool_]) -> None:
    if not stray.any():
        return
    site, hop = look.site_of(op, int(stray.argmax())), ROWS[op].peer
    assert hop is not None
    stage = int(look.stage[int(stray.argmax())])
    other = int(look.program.beside(hop)[stage])
    if other >= look.program.first_of(op):
        why = f"stage {other} is on the same rank"
    elif other >= 0:
        why = f"stage {other} is frozen"
    elif hop in (PeerRule.NEXT, PeerRule.PREVIOUS):
        why = f"there is no stage {stage + (1 if hop is PeerRule.NEXT else -1)}"
    else:
        why = f"no skip leads {'from' if hop is PeerRule.SKIP_TO else 'to'} stage {stage}"
    look.refuse(f"{site.instr} has nobody to go to: {why}", site, kind=UnmatchedTransferError)


def meetings(look: Inspector) -> None:
    """Where one rank of a group meets the others, all of them are there."""
    shape = look.shape
    for op in COLLECTIVES:
        if op not in look.index.at:
            continue
        present, group = look.present(op), ROWS[op].group
        each: NDArray[np.bool_]
        if group == "model":
            each = present.reshape(-1, shape.ranks)
        elif group == "holders":
            each = present.reshape(-1, len(shape.holders), shape.stages).swapaxes(1, 2)
        else:  # those that share tied weights: the passes know whose are summed
            continue
        alone = (each.any(-1, keepdims=True) & ~each).reshape(-1, each.shape[-1])
        if alone.any():
            meeting, absent = map(int, np.argwhere(alone)[0])
            here = each.reshape(alone.shape)[meeting]
            if group == "model":
                key, rank = meeting * shape.ranks + int(here.argmax()), absent
            else:
                time, stage = divmod(meeting, shape.stages)
                key = (time * len(here) + int(here.argmax())) * shape.stages + stage
                rank = int(shape.holders[absent, stage])
            site = look.site_of(op, key)
            look.refuse(
                f"{site.instr} meets no other on rank {rank}", site, kind=UnmatchedTransferError
            )


def forms(look: Inspector) -> None:
    """Each value that is sent in a form loses it behind the receive, and no other does."""
    if look.program.sequence_parallel:
        # Gathers are there between segments. The passes that cut stages know where.
        look.refuse_first(
            look.index.is_op(_SPLITS_SENT),
            lambda at: "with 'sequence_parallel yes' what passes between stages is a part already",
        )
    elif look.program.tp == 1:
        look.refuse_first(
            look.index.is_op(SPLIT_CHANGES), lambda at: "nothing is sharded where tp is 1"
        )
    for gives, send, takes in _FORMED:
        if look.program.sequence_parallel and gives in _SPLITS_SENT:
            continue
        hop = ROWS[send].peer
        assert hop is not None
        given, taken, sent = look.present(gives), look.present(takes), look.present(send)
        moved = np.zeros_like(given)  # given forms, by where the value arrives
        moved[look.beside(hop)[given & sent]] = True
        if (given & ~sent).any():
            site = look.site_of(gives, int((given & ~sent).argmax()))
            look.refuse(f"{site.instr} is never sent", site, kind=UnmatchedTransferError)
        for lost, op, gone, back in (
            (moved & ~taken, takes, gives, look.beside(hop.back)),
            (taken & ~moved, gives, takes, None),
        ):
            if lost.any():
                key = int(lost.argmax())
                site = look.site_of(gone, key if back is None else int(back[key]))
                look.refuse(
                    f"{site.instr} has no {ROWS[op].text} on the other side",
                    site,
                    kind=UnmatchedTransferError,
                    hint="sequence_parallel yes, if it gathers tokens between pieces of a stage"
                    if back is None and look.program.segment_boundaries
                    else "",
                )
