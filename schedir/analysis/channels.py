"""Assign instructions to queues, channels and communicators under a progress model.

This module applies a row of the table of progress models to the instructions of a program.
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
# In a model with lane queues, each lane without messages has a separate queue. All lanes with
# messages have the last number of `LINE_BY_LANE`, and `assign_queues` divides them into queues.
_SEPARATE_LANES: Final = [row.lane for row in LANES if not row.has_messages]
LINE_BY_LANE: Final = {
    row.lane: len(_SEPARATE_LANES) if row.has_messages else _SEPARATE_LANES.index(row.lane)
    for row in LANES
}
_LANE_BY_OPCODE: Final = np.array([row.lane for row in INSTRUCTIONS])
LINE_BY_OPCODE: Final = np.array([LINE_BY_LANE[row.lane] for row in INSTRUCTIONS])
# The opcode that `assign_queues` uses for all transfers in groups with both sends and receives.
_BATCH_OPCODE: Final = len(INSTRUCTIONS)
_LINE_BY_CELL: Final = np.append(LINE_BY_OPCODE, len(_SEPARATE_LANES))


def is_batched(index: InstructionIndex) -> NDArray[np.bool_]:
    """Return a mask of the transfers in a group that has both sends and receives.

    Args:
        index: The index of the program.

    Returns:
        A mask over all instructions, shape (n,).
    """
    group_starts = np.flatnonzero(~index.joined)
    group_number = np.cumsum(~index.joined) - 1
    has_send, has_receive = (
        np.bincount(group_number, weights=index.is_op(ops), minlength=len(group_starts)) > 0
        for ops in (SEND_OPS, RECV_OPS)
    )
    return np.asarray((has_send & has_receive)[group_number])


def assign_queues(
    index: InstructionIndex, rules: ModelRow, *, shared_numbers: bool = False
) -> NDArray[np.unsignedinteger]:
    """Return the in-order queue of each instruction.

    Args:
        index: The index of the program.
        rules: The row of the progress model.
        shared_numbers: True to number queues in the same way in all programs that have equally many
            ranks. If False, consecutive numbers may replace large numbers.

    Returns:
        Queue numbers of shape (n,). Instructions with equal numbers run in the order of the Stream.
    """
    shape = index.program.shape
    if not rules.has_lane_queues:
        return index.rank.astype(np.uint16)
    # The table has the queue of every possible instruction, by opcode, replica row and stage. A
    # queue number encodes the rank, the lane (`LINE_BY_LANE`), the peer (1 + its rank), the kind
    # and the direction.
    line_count = len(_SEPARATE_LANES) + 1
    queue_table = shape.replica_ranks * line_count + _LINE_BY_CELL[:, None, None]
    for op in TRANSFER_OPS:
        row, op_queues = INSTRUCTIONS[op], queue_table[op]
        if rules.has_peer_queues:
            assert row.peer is not None
            peer_stage = np.maximum(index.program.neighbor_stages(row.peer), 0)
            op_queues += shape.ranks * line_count * (1 + shape.replica_ranks[:, peer_stage])
        if rules.has_kind_queues or rules.has_direction_queues:
            kind_code = (
                1
                + 2 * row.lane * rules.has_kind_queues
                + (row.op in RECV_OPS) * rules.has_direction_queues
            )
            op_queues += shape.ranks * line_count * (1 + shape.ranks) * kind_code
    # Any rank can have the instructions that are not per microbatch, so the table does not contain
    # them.
    other_positions = index.find_all_positions(_NON_MICROBATCH_OPS)
    other_queues = (
        index.rank[other_positions] * line_count + LINE_BY_OPCODE[index.op[other_positions]]
    )
    # Consecutive numbers usually fit in 16 bits.
    if queue_table.max() >= 2**16 and not shared_numbers:
        unique_numbers, compact_numbers = np.unique(queue_table, return_inverse=True)
        queue_table = compact_numbers.reshape(queue_table.shape)
        other_queues = np.searchsorted(unique_numbers, other_queues)
    queue_by_cell = queue_table.reshape(-1).astype(
        np.uint16 if queue_table.max() < 2**16 else np.uint32
    )
    cell = index.op.astype(np.int32)
    if rules.has_batch_queues and index.has_joined:
        cell[is_batched(index)] = _BATCH_OPCODE
    cell *= np.int32(queue_table[0].size)
    cell += np.minimum(index.stage, shape.stages - 1)
    if shape.placement_rows > 1:
        cell += (shape.stages * shape.replica_row_of_microbatch(index.mb)).astype(np.int32)
    queue: NDArray[np.unsignedinteger] = queue_by_cell[cell]
    queue[other_positions] = other_queues
    return queue


def find_channels(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, Positions]:
    """Return the receives that have a send, sorted by channel, and the channel of each.

    In a channel, the k-th send matches the k-th receive. There is a channel for each ordered pair
    of ranks. A model with a queue for each kind of message has a channel for each kind, too. A
    model with batch queues has a separate channel for batched receives.

    Args:
        index: The index of the program.
        partner: For each transfer, the position of its other end, or -1; shape (n,).
        rules: The row of the progress model.

    Returns:
        The positions of the receives that have a partner, ascending within a channel; and the
        number of the channel of each.
    """
    receives = index.find_all_positions(RECV_OPS)
    receives = receives[partner[receives] != NO_POSITION]
    ranks = np.int64(index.program.shape.ranks)
    channel = index.rank[partner[receives]] * ranks + index.rank[receives]
    if rules.has_kind_queues:
        channel += _LANE_BY_OPCODE[index.op[receives]] * ranks**2
    elif rules.has_batch_queues and index.has_joined:
        channel += is_batched(index)[receives] * ranks**2
    order = np.lexsort((receives, channel))
    return receives[order], channel[order]


def find_mismatched_sends(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> Positions:
    """Return the sends that never match, because the receive uses another communicator.

    This can happen only in models with batch queues, if one end of the message is in a batched
    group and the other end is not.

    Args:
        index: The index of the program.
        partner: For each transfer, the position of its other end, or -1; shape (n,).
        rules: The row of the progress model.

    Returns:
        The positions of these sends, ascending.
    """
    if not rules.has_batch_queues or not index.has_joined:
        return np.empty(0, np.int32)
    is_in_batch = is_batched(index)
    sends = index.find_all_positions(SEND_OPS)
    sends = sends[partner[sends] != NO_POSITION]
    return np.asarray(np.sort(sends[is_in_batch[sends] != is_in_batch[partner[sends]]]), np.int32)


def find_communicators(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, NDArray[np.int64]]:
    """Return the transfers that have a partner, and the communicator of each.

    If a rank has a queue for each peer, a communicator has two ranks, except for batched transfers.
    Otherwise a communicator has all ranks, and a negative number. If kinds of messages or
    directions have separate queues, they also have separate communicators.

    Args:
        index: The index of the program.
        partner: For each transfer, the position of its other end, or -1; shape (n,).
        rules: The row of the progress model.

    Returns:
        The positions of the transfers that have a partner, ascending; and the number of the
        communicator of each.
    """
    positions = index.find_all_positions(TRANSFER_OPS)
    positions = positions[partner[positions] != NO_POSITION]
    ranks = np.int64(index.program.shape.ranks)
    is_grad = (_LANE_BY_OPCODE[index.op[positions]] == Lane.GRAD) & rules.has_kind_queues
    all_ranks = -1 - is_grad.astype(np.int64)
    if not rules.has_peer_queues:
        return positions, all_ranks
    rank = index.rank[positions].astype(np.int64)
    peer_rank = index.rank[partner[positions]].astype(np.int64)
    is_swapped = (
        index.is_op(RECV_OPS)[positions] if rules.has_direction_queues else rank > peer_rank
    )
    first = np.where(is_swapped, peer_rank, rank)
    second = np.where(is_swapped, rank, peer_rank)
    pair = (is_grad * ranks + first) * ranks + second
    if rules.has_batch_queues and index.has_joined:
        pair = np.where(is_batched(index)[positions], all_ranks, pair)
    return positions, pair
