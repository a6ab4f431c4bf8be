"""Check that each message has a send and a receive, and each collective has all its members."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UnmatchedTransferError
from schedir.ir.isa.instructions import (
    BOUNDARY_GRAD_OPS,
    COLLECTIVE_OPS,
    COMPUTE_OPS,
    INSTRUCTIONS,
    RECV_OPS,
    SEND_OPS,
    TP_SPLIT_OPS,
    Instr,
    Opcode,
    PeerRule,
    find_form_changes,
)
from schedir.verify.inspector import Inspector

_GRADIENT_MOVE_OPS = tuple(op for op in BOUNDARY_GRAD_OPS if op not in COMPUTE_OPS)
_FORWARD_SENDS = tuple(
    send for send in SEND_OPS if send not in BOUNDARY_GRAD_OPS
)  # sends that a program without a backward can have
# Triples: the opcode that converts a value to a form, the send, and the opcode that converts it
# back after the receive.
_SENDS_WITH_FORM = tuple(
    (gives, send, takes)
    for send, receive in zip(SEND_OPS, RECV_OPS, strict=True)
    for gives in find_form_changes(INSTRUCTIONS[send].needs[0])
    for takes in find_form_changes(INSTRUCTIONS[receive].gives[0])
    if INSTRUCTIONS[gives].form is INSTRUCTIONS[takes].form
)
_SPLITS_BEFORE_SEND = tuple(
    op for op in TP_SPLIT_OPS if op in {gives for gives, _, _ in _SENDS_WITH_FORM}
)


def require_transfers(inspector: Inspector) -> None:
    """Check that exactly the values that pass between ranks have a send and a receive.

    Args:
        inspector: The inspector of the program.

    Raises:
        UnmatchedTransferError: A send or a receive is missing, or has no value to move.
        CompletenessError: A program without a backward moves gradients.
    """
    shape, m = inspector.shape, inspector.shape.microbatches
    if not inspector.program.has_backward:
        inspector.refuse_first(
            inspector.index.is_op(_GRADIENT_MOVE_OPS),
            lambda at: "a program without a backward must not move gradients",
        )
    for send in SEND_OPS if inspector.program.has_backward else _FORWARD_SENDS:
        row = INSTRUCTIONS[send]
        receive = row.partner
        assert receive is not None and row.peer is not None
        if not inspector.program.uses_value(row.needs[0]) and {send, receive}.isdisjoint(
            inspector.index.position_by_key
        ):
            continue
        stage, mb = np.arange(shape.stages)[:, None], np.arange(m)
        other = inspector.program.neighbor_stages(row.peer)[:, None]
        inside = other >= inspector.program.first_stage(send)
        there = np.maximum(other, 0)
        here, away = shape.rank_of_stage(stage, mb), shape.rank_of_stage(there, mb)
        crosses, arrives = np.zeros((2, shape.stages, m), bool)
        crosses[:] = inside & (here != away)
        arrives[there[inside]] = crosses[inside[:, 0]]  # keys that must have a receive
        sent, arrived = inspector.is_present(send), inspector.is_present(receive)
        crosses, arrives = crosses.reshape(-1), arrives.reshape(-1)
        if not ((sent != crosses) | (arrived != arrives)).any():
            continue
        key = np.where(inside, there * m + mb, 0).reshape(-1)
        got = arrived[key] & np.repeat(inside, m)
        here, away = (np.broadcast_to(k, (shape.stages, m)).reshape(-1) for k in (here, away))
        other = np.repeat(other, m)
        _refuse_stray(inspector, send, sent & ~crosses)
        _refuse_stray(inspector, receive, arrived & ~arrives)
        for one, two, side, gone, k in (
            (sent, got, send, receive, np.arange(len(sent))),
            (got, sent, receive, send, key),
        ):
            if (one & ~two & crosses).any():
                at = int((one & ~two & crosses).argmax())
                site = inspector.make_key_site(side, int(k[at]))
                partner = Instr(gone, int(other[at] if gone is receive else inspector.stage[at]),
                                int(inspector.mb[at]))  # fmt: skip
                rank = int(shape.rank_of_stage(partner.stage, partner.mb))
                inspector.refuse(
                    f"{site.instr} has no {partner} on rank {rank}",
                    site,
                    kind=UnmatchedTransferError,
                )
        lost = crosses & ~sent
        if lost.any():
            at = int(lost.argmax())
            instr = Instr(send, int(inspector.stage[at]), int(inspector.mb[at]))
            inspector.refuse(
                f"{instr} and its receive are missing: rank {away[at]} needs a value from rank "
                f"{here[at]}",
                kind=UnmatchedTransferError,
            )


def _refuse_stray(inspector: Inspector, op: Opcode, stray: NDArray[np.bool_]) -> None:
    """Refuse a transfer whose value does not pass between ranks, and explain why."""
    if not stray.any():
        return
    site, hop = inspector.make_key_site(op, int(stray.argmax())), INSTRUCTIONS[op].peer
    assert hop is not None
    stage = int(inspector.stage[int(stray.argmax())])
    other = int(inspector.program.neighbor_stages(hop)[stage])
    if other >= inspector.program.first_stage(op):
        why = f"stage {other} is on the same rank"
    elif other >= 0:
        why = f"stage {other} is frozen"
    elif hop in (PeerRule.NEXT, PeerRule.PREVIOUS):
        why = f"there is no stage {stage + (1 if hop is PeerRule.NEXT else -1)}"
    else:
        why = f"no skip leads {'from' if hop is PeerRule.SKIP_TO else 'to'} stage {stage}"
    inspector.refuse(f"{site.instr} is not needed: {why}", site, kind=UnmatchedTransferError)


def require_group_members(inspector: Inspector) -> None:
    """Check that each collective of a group has an instruction on every rank of the group.

    Collectives of tied weights are not checked here. `gradient_reduction.py` lists those that are
    expected.

    Args:
        inspector: The inspector of the program.

    Raises:
        UnmatchedTransferError: A rank of the group has no instruction for the collective.
    """
    shape = inspector.shape
    for op in COLLECTIVE_OPS:
        if op not in inspector.index.position_by_key:
            continue
        present, group = inspector.is_present(op), INSTRUCTIONS[op].group
        each: NDArray[np.bool_]
        if group == "model":
            each = present.reshape(-1, shape.ranks)
        elif group == "stage_replicas":
            each = present.reshape(-1, len(shape.replica_ranks), shape.stages).swapaxes(1, 2)
        else:  # groups of tied weights
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
                rank = int(shape.replica_ranks[absent, stage])
            site = inspector.make_key_site(op, key)
            inspector.refuse(
                f"{site.instr} has no counterpart on rank {rank}", site, kind=UnmatchedTransferError
            )


def require_form_pairs(inspector: Inspector) -> None:
    """Check that each value that is sent in a form is converted back after its receive.

    No other value may be converted back. With sequence parallelism, values between stages are
    shards already, so no instruction may shard them before a send.

    Args:
        inspector: The inspector of the program.

    Raises:
        UnmatchedTransferError: A conversion has no send, or no counterpart on the other rank.
        CompletenessError: An instruction shards a value although `tp` is 1 or the program has
            sequence parallelism.
    """
    if inspector.program.sequence_parallel:
        # Between segments there are gathers, too. `stage_segmentation` lists those that are
        # expected.
        inspector.refuse_first(
            inspector.index.is_op(_SPLITS_BEFORE_SEND),
            lambda at: "with 'sequence_parallel yes', values between stages are shards already",
        )
    elif inspector.program.tp == 1:
        inspector.refuse_first(
            inspector.index.is_op(TP_SPLIT_OPS), lambda at: "tp is 1, so no value is sharded"
        )
    for gives, send, takes in _SENDS_WITH_FORM:
        if inspector.program.sequence_parallel and gives in _SPLITS_BEFORE_SEND:
            continue
        hop = INSTRUCTIONS[send].peer
        assert hop is not None
        given, taken, sent = (
            inspector.is_present(gives),
            inspector.is_present(takes),
            inspector.is_present(send),
        )
        moved = np.zeros_like(given)  # values sent in the form, by their key at the receiver
        moved[inspector.find_peer_keys(hop)[given & sent]] = True
        if (given & ~sent).any():
            site = inspector.make_key_site(gives, int((given & ~sent).argmax()))
            inspector.refuse(f"{site.instr} is never sent", site, kind=UnmatchedTransferError)
        for lost, op, gone, back in (
            (moved & ~taken, takes, gives, inspector.find_peer_keys(hop.opposite)),
            (taken & ~moved, gives, takes, None),
        ):
            if lost.any():
                key = int(lost.argmax())
                site = inspector.make_key_site(gone, key if back is None else int(back[key]))
                inspector.refuse(
                    f"{site.instr} has no {INSTRUCTIONS[op].text} at the other end",
                    site,
                    kind=UnmatchedTransferError,
                    hint="set 'sequence_parallel yes' to gather tokens between segments"
                    if back is None and inspector.program.segment_boundaries
                    else "",
                )
