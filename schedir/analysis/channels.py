"""Assign transfers to queues and channels: which wait for each other, are issued as one, or can
match.

What the table of models means for the instructions of a program.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.progress_models import ModelRow
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    INSTRUCTIONS,
    LANES,
    RECV_OPS,
    SEND_OPS,
    TRANSFER_OPS,
    Lane,
    Scope,
)

_NON_MICROBATCH_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if row.scope is not Scope.MICROBATCH
)
# What a rank queues apart, whatever the model: each lane; and the wire, which is the last, as
# models cut it finer.
_SEPARATE_LANES: Final = [row.lane for row in LANES if not row.has_messages]
LINE_BY_LANE: Final = {
    row.lane: len(_SEPARATE_LANES) if row.has_messages else _SEPARATE_LANES.index(row.lane)
    for row in LANES
}
_LANE_BY_OPCODE: Final = np.array([row.lane for row in INSTRUCTIONS])
LINE_BY_OPCODE: Final = np.array([LINE_BY_LANE[row.lane] for row in INSTRUCTIONS])
_BATCH_OPCODE: Final = len(INSTRUCTIONS)  # in the place of an opcode: a transfer of a batch
_LINE_BY_CELL: Final = np.append(LINE_BY_OPCODE, len(_SEPARATE_LANES))


def is_batched(index: InstructionIndex) -> NDArray[np.bool_]:
    """Whether each instruction is a transfer in a group that has both sends and receives."""
    begins = np.flatnonzero(~index.joined)
    number = np.cumsum(~index.joined) - 1
    has = [
        np.bincount(number, weights=index.is_op(ops), minlength=len(begins)) > 0
        for ops in (SEND_OPS, RECV_OPS)
    ]
    return np.asarray((has[0] & has[1])[number])


def assign_queues(
    index: InstructionIndex, rules: ModelRow, *, shared_numbers: bool = False
) -> NDArray[np.unsignedinteger]:
    """The in-order queue of each instruction: equal numbers wait for each other.

    With `shared_numbers`, a queue has one number in all programs of as many ranks.
    """
    shape = index.program.shape
    if not rules.has_lane_queues:
        return index.rank.astype(np.uint16)
    # First of all that there can be: by opcode, holder and stage, whose queue of which kind.
    # A queue is a rank, a line, perhaps a peer (1 + its rank), and perhaps a kind or a way.
    lines = len(_SEPARATE_LANES) + 1
    held = shape.replica_ranks * lines + _LINE_BY_CELL[:, None, None]
    for op in TRANSFER_OPS:
        row, own = INSTRUCTIONS[op], held[op]
        if rules.has_peer_queues:
            assert row.peer is not None
            there = np.maximum(index.program.neighbor_stages(row.peer), 0)
            own += shape.ranks * lines * (1 + shape.replica_ranks[:, there])
        if rules.has_kind_queues or rules.has_direction_queues:
            way = (
                1
                + 2 * row.lane * rules.has_kind_queues
                + (row.op in RECV_OPS) * rules.has_direction_queues
            )
            own += shape.ranks * lines * (1 + shape.ranks) * way
    late = index.find_all_positions(_NON_MICROBATCH_OPS)  # any rank has them
    of_late = index.rank[late] * lines + LINE_BY_OPCODE[index.op[late]]
    if held.max() >= 2**16 and not shared_numbers:  # few enough, most often, if they are numbered
        found, numbers = np.unique(held, return_inverse=True)
        held, of_late = numbers.reshape(held.shape), np.searchsorted(found, of_late)
    number = held.reshape(-1).astype(np.uint16 if held.max() < 2**16 else np.uint32)
    cell = index.op.astype(np.int32)
    if rules.has_batch_queues and index.has_joined:
        cell[is_batched(index)] = _BATCH_OPCODE
    cell *= np.int32(held[0].size)
    cell += np.minimum(index.stage, shape.stages - 1)
    if shape.placement_rows > 1:
        cell += (shape.stages * shape.replica_row_of_microbatch(index.mb)).astype(np.int32)
    queue: NDArray[np.unsignedinteger] = number[cell]
    queue[late] = of_late
    return queue


def find_channels(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, Positions]:
    """Receives that have a partner, sorted by the channel of their message, and that channel.

    Messages of one channel match by position.  It is a pair of ranks, from whom and to whom; where
    kinds of message have a queue each, of one kind; and where batches have one, of those or others.
    """
    got = index.find_all_positions(RECV_OPS)
    got = got[partner[got] != NO_POSITION]
    ranks = np.int64(index.program.shape.ranks)
    channel = index.rank[partner[got]] * ranks + index.rank[got]
    if rules.has_kind_queues:
        channel += _LANE_BY_OPCODE[index.op[got]] * ranks**2
    elif rules.has_batch_queues and index.has_joined:
        channel += is_batched(index)[got] * ranks**2
    order = np.lexsort((got, channel))
    return got[order], channel[order]


def find_mismatched_sends(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> Positions:
    """The sends whose two ends choose different communicators, and which so never meet."""
    if not rules.has_batch_queues or not index.has_joined:
        return np.empty(0, np.int32)
    of_batch = is_batched(index)
    sent = index.find_all_positions(SEND_OPS)
    sent = sent[partner[sent] != NO_POSITION]
    return np.asarray(np.sort(sent[of_batch[sent] != of_batch[partner[sent]]]), np.int32)


def find_communicators(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, NDArray[np.int64]]:
    """Transfers that have a partner, ascending, and the communicator of each.

    Where ranks have a queue for each peer it is that of two ranks: one for both ways and kinds, or
    one for each that has a queue of its own.  Else it is that of all ranks, and below 0.
    """
    at = index.find_all_positions(TRANSFER_OPS)
    at = at[partner[at] != NO_POSITION]
    ranks = np.int64(index.program.shape.ranks)
    grad = (_LANE_BY_OPCODE[index.op[at]] == Lane.GRAD) & rules.has_kind_queues
    of_all = -1 - grad.astype(np.int64)
    if not rules.has_peer_queues:
        return at, of_all
    own, peer = index.rank[at].astype(np.int64), index.rank[partner[at]].astype(np.int64)
    turned = index.is_op(RECV_OPS)[at] if rules.has_direction_queues else own > peer
    own, peer = np.where(turned, peer, own), np.where(turned, own, peer)
    pair = (grad * ranks + own) * ranks + peer
    if rules.has_batch_queues and index.has_joined:
        pair = np.where(is_batched(index)[at], of_all, pair)
    return at, pair
