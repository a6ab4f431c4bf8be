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
# Triples: the opcode that converts a value to a form, the send, and the opcode that converts the
# value back after the receive (the reverter).
_SENDS_WITH_FORM = tuple(
    (converter, send, reverter)
    for send, receive in zip(SEND_OPS, RECV_OPS, strict=True)
    for converter in find_form_changes(INSTRUCTIONS[send].needs[0])
    for reverter in find_form_changes(INSTRUCTIONS[receive].gives[0])
    if INSTRUCTIONS[converter].form is INSTRUCTIONS[reverter].form
)
_SPLITS_BEFORE_SEND = tuple(
    op for op in TP_SPLIT_OPS if op in {converter for converter, _, _ in _SENDS_WITH_FORM}
)


def require_transfers(inspector: Inspector) -> None:
    """Check that exactly the values that pass between ranks have a send and a receive.

    Args:
        inspector: The inspector of the program.

    Raises:
        UnmatchedTransferError: A send or a receive is missing, or exists although its value does
            not pass between ranks.
        CompletenessError: A program without a backward moves gradients.
    """
    shape, m = inspector.shape, inspector.shape.microbatches
    if not inspector.program.has_backward:
        inspector.refuse_first(
            inspector.index.is_op(_GRADIENT_MOVE_OPS),
            lambda position: "a program without a backward must not move gradients",
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
        peer_stage = inspector.program.neighbor_stages(row.peer)[:, None]
        has_peer = peer_stage >= inspector.program.first_stage(send)
        peer_or_zero = np.maximum(peer_stage, 0)
        send_rank = shape.rank_of_stage(stage, mb)
        peer_rank = shape.rank_of_stage(peer_or_zero, mb)
        needs_send, needs_receive = np.zeros((2, shape.stages, m), bool)
        needs_send[:] = has_peer & (send_rank != peer_rank)
        needs_receive[peer_or_zero[has_peer]] = needs_send[has_peer[:, 0]]
        has_send = inspector.is_present(send)
        has_receive = inspector.is_present(receive)
        needs_send = needs_send.reshape(-1)
        needs_receive = needs_receive.reshape(-1)
        if not ((has_send != needs_send) | (has_receive != needs_receive)).any():
            continue
        receive_key = np.where(has_peer, peer_or_zero * m + mb, 0).reshape(-1)
        is_received = has_receive[receive_key] & np.repeat(has_peer, m)
        send_rank, peer_rank = (
            np.broadcast_to(ranks, (shape.stages, m)).reshape(-1)
            for ranks in (send_rank, peer_rank)
        )
        peer_stage = np.repeat(peer_stage, m)
        _refuse_stray(inspector, send, has_send & ~needs_send)
        _refuse_stray(inspector, receive, has_receive & ~needs_receive)
        for is_present, is_matched, present_op, missing_op, present_key in (
            (has_send, is_received, send, receive, np.arange(len(has_send))),
            (is_received, has_send, receive, send, receive_key),
        ):
            is_unmatched = is_present & ~is_matched & needs_send
            if is_unmatched.any():
                key = int(is_unmatched.argmax())
                site = inspector.make_key_site(present_op, int(present_key[key]))
                partner_stage = (peer_stage if missing_op is receive else inspector.stage)[key]
                partner = Instr(missing_op, int(partner_stage), int(inspector.mb[key]))
                rank = int(shape.rank_of_stage(partner.stage, partner.mb))
                inspector.refuse(
                    f"{site.instr} has no {partner} on rank {rank}",
                    site,
                    error_type=UnmatchedTransferError,
                )
        is_lost = needs_send & ~has_send
        if is_lost.any():
            key = int(is_lost.argmax())
            instr = Instr(send, int(inspector.stage[key]), int(inspector.mb[key]))
            inspector.refuse(
                f"{instr} and its receive are missing: rank {peer_rank[key]} needs a value from "
                f"rank {send_rank[key]}",
                error_type=UnmatchedTransferError,
            )


def _refuse_stray(inspector: Inspector, op: Opcode, is_stray: NDArray[np.bool_]) -> None:
    """Refuse a transfer whose value does not pass between ranks, and explain why."""
    if not is_stray.any():
        return
    site, hop = inspector.make_key_site(op, int(is_stray.argmax())), INSTRUCTIONS[op].peer
    assert hop is not None
    stage = int(inspector.stage[int(is_stray.argmax())])
    peer_stage = int(inspector.program.neighbor_stages(hop)[stage])
    if peer_stage >= inspector.program.first_stage(op):
        reason = f"stage {peer_stage} is on the same rank"
    elif peer_stage >= 0:
        reason = f"stage {peer_stage} is frozen"
    elif hop in (PeerRule.NEXT, PeerRule.PREVIOUS):
        reason = f"there is no stage {stage + (1 if hop is PeerRule.NEXT else -1)}"
    else:
        reason = f"no skip leads {'from' if hop is PeerRule.SKIP_TO else 'to'} stage {stage}"
    inspector.refuse(
        f"{site.instr} is not needed: {reason}", site, error_type=UnmatchedTransferError
    )


def require_group_members(inspector: Inspector) -> None:
    """Check that each collective of a group has an instruction on every rank of the group.

    Collectives of tied weights are not checked here. `gradient_reduction.py` lists the expected
    collectives of tied weights.

    Args:
        inspector: The inspector of the program.

    Raises:
        UnmatchedTransferError: A rank of the group has no instruction for the collective.
    """
    shape = inspector.shape
    for op in COLLECTIVE_OPS:
        if op not in inspector.index.position_by_key:
            continue
        is_present, group = inspector.is_present(op), INSTRUCTIONS[op].group
        is_member: NDArray[np.bool_]
        if group == "model":
            is_member = is_present.reshape(-1, shape.ranks)
        elif group == "stage_replicas":
            is_member = is_present.reshape(-1, len(shape.replica_ranks), shape.stages).swapaxes(
                1, 2
            )
        else:  # groups of tied weights
            continue
        is_absent = (is_member.any(-1, keepdims=True) & ~is_member).reshape(-1, is_member.shape[-1])
        if is_absent.any():
            collective, absent = map(int, np.argwhere(is_absent)[0])
            is_member_here = is_member.reshape(is_absent.shape)[collective]
            if group == "model":
                key, rank = collective * shape.ranks + int(is_member_here.argmax()), absent
            else:
                occurrence, stage = divmod(collective, shape.stages)
                key = (
                    occurrence * len(is_member_here) + int(is_member_here.argmax())
                ) * shape.stages + stage
                rank = int(shape.replica_ranks[absent, stage])
            site = inspector.make_key_site(op, key)
            inspector.refuse(
                f"{site.instr} has no counterpart on rank {rank}",
                site,
                error_type=UnmatchedTransferError,
            )


def require_form_pairs(inspector: Inspector) -> None:
    """Check that each value that is converted before its send is converted back after its receive.

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
        # Between segments there are gathers, too. `stage_segmentation` lists the expected gathers.
        inspector.refuse_first(
            inspector.index.is_op(_SPLITS_BEFORE_SEND),
            lambda position: (
                "with 'sequence_parallel yes', values between stages are shards already"
            ),
        )
    elif inspector.program.tp == 1:
        inspector.refuse_first(
            inspector.index.is_op(TP_SPLIT_OPS), lambda position: "tp is 1, so no value is sharded"
        )
    for converter, send, reverter in _SENDS_WITH_FORM:
        if inspector.program.sequence_parallel and converter in _SPLITS_BEFORE_SEND:
            continue
        hop = INSTRUCTIONS[send].peer
        assert hop is not None
        is_converted = inspector.is_present(converter)
        is_reverted = inspector.is_present(reverter)
        is_sent = inspector.is_present(send)
        # A mask over the keys at the receiver: True if the value is sent in this form.
        is_received = np.zeros_like(is_converted)
        is_received[inspector.find_peer_keys(hop)[is_converted & is_sent]] = True
        if (is_converted & ~is_sent).any():
            site = inspector.make_key_site(converter, int((is_converted & ~is_sent).argmax()))
            inspector.refuse(
                f"the result of {site.instr} is never sent",
                site,
                error_type=UnmatchedTransferError,
            )
        for is_lost, missing_op, present_op, peer_keys in (
            (
                is_received & ~is_reverted,
                reverter,
                converter,
                inspector.find_peer_keys(hop.opposite),
            ),
            (is_reverted & ~is_received, converter, reverter, None),
        ):
            if is_lost.any():
                key = int(is_lost.argmax())
                site = inspector.make_key_site(
                    present_op, key if peer_keys is None else int(peer_keys[key])
                )
                inspector.refuse(
                    f"{site.instr} has no {INSTRUCTIONS[missing_op].text} at the other end",
                    site,
                    error_type=UnmatchedTransferError,
                    hint="set 'sequence_parallel yes' to gather tokens between segments"
                    if peer_keys is None and inspector.program.segment_boundaries
                    else "",
                )
