"""Assign transfers to queues and channels: which wait for each other, are issued as one, or can
match.

What the table of models means for the instructions of a program.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.progress_models import ModelRow
from schedir.ir.instruction_index import NONE, InstructionIndex, Positions
from schedir.ir.isa.instructions import LANES, RECEIVES, ROWS, SENDS, TRANSFERS, Lane, Scope

_LATE: Final = tuple(row.op for row in ROWS if row.per is not Scope.MICROBATCH)
# What a rank queues apart, whatever the model: each lane; and the wire, which is the last, as
# models cut it finer.
_APART: Final = [row.lane for row in LANES if not row.wire]
LINES: Final = {row.lane: len(_APART) if row.wire else _APART.index(row.lane) for row in LANES}
_LANE: Final = np.array([row.lane for row in ROWS])
LINE_OF: Final = np.array([LINES[row.lane] for row in ROWS])
_BATCH: Final = len(ROWS)  # in the place of an opcode: a transfer of a batch
_OF_ALL: Final = np.append(LINE_OF, len(_APART))


def batched(index: InstructionIndex) -> NDArray[np.bool_]:
    """Whether each instruction is a transfer in a group that has both sends and receives."""
    begins = np.flatnonzero(~index.joined)
    number = np.cumsum(~index.joined) - 1
    has = [
        np.bincount(number, weights=index.is_op(ops), minlength=len(begins)) > 0
        for ops in (SENDS, RECEIVES)
    ]
    return np.asarray((has[0] & has[1])[number])


def queues(
    index: InstructionIndex, rules: ModelRow, *, shared: bool = False
) -> NDArray[np.unsignedinteger]:
    """The in-order queue of each instruction: equal numbers wait for each other.

    With `shared`, a queue has one number in all programs of as many ranks.
    """
    shape = index.program.shape
    if not rules.lanes:
        return index.rank.astype(np.uint16)
    # First of all that there can be: by opcode, holder and stage, whose queue of which kind.
    # A queue is a rank, a line, perhaps a peer (1 + its rank), and perhaps a kind or a way.
    lines = len(_APART) + 1
    held = shape.holders * lines + _OF_ALL[:, None, None]
    for op in TRANSFERS:
        row, own = ROWS[op], held[op]
        if rules.peers:
            assert row.peer is not None
            there = np.maximum(index.program.beside(row.peer), 0)
            own += shape.ranks * lines * (1 + shape.holders[:, there])
        if rules.kinds or rules.ways:
            way = 1 + 2 * row.lane * rules.kinds + (row.op in RECEIVES) * rules.ways
            own += shape.ranks * lines * (1 + shape.ranks) * way
    late = index.where_all(_LATE)  # any rank has them
    of_late = index.rank[late] * lines + LINE_OF[index.op[late]]
    if held.max() >= 2**16 and not shared:  # few enough, most often, if they are numbered
        found, numbers = np.unique(held, return_inverse=True)
        held, of_late = numbers.reshape(held.shape), np.searchsorted(found, of_late)
    number = held.reshape(-1).astype(np.uint16 if held.max() < 2**16 else np.uint32)
    cell = index.op.astype(np.int32)
    if rules.batches and index.any_joined:
        cell[batched(index)] = _BATCH
    cell *= np.int32(held[0].size)
    cell += np.minimum(index.stage, shape.stages - 1)
    if shape.rows > 1:
        cell += (shape.stages * shape.row_at(index.mb)).astype(np.int32)
    queue: NDArray[np.unsignedinteger] = number[cell]
    queue[late] = of_late
    return queue


def channels(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, Positions]:
    """Receives that have a partner, sorted by the channel of their message, and that channel.

    Messages of one channel match by position.  It is a pair of ranks, from whom and to whom; where
    kinds of message have a queue each, of one kind; and where batches have one, of those or others.
    """
    got = index.where_all(RECEIVES)
    got = got[partner[got] != NONE]
    ranks = np.int64(index.program.shape.ranks)
    channel = index.rank[partner[got]] * ranks + index.rank[got]
    if rules.kinds:
        channel += _LANE[index.op[got]] * ranks**2
    elif rules.batches and index.any_joined:
        channel += batched(index)[got] * ranks**2
    order = np.lexsort((got, channel))
    return got[order], channel[order]


def apart(index: InstructionIndex, partner: Positions, rules: ModelRow) -> Positions:
    """The sends whose two ends choose different communicators, and which so never meet."""
    if not rules.batches or not index.any_joined:
        return np.empty(0, np.int32)
    of_batch = batched(index)
    sent = index.where_all(SENDS)
    sent = sent[partner[sent] != NONE]
    return np.asarray(np.sort(sent[of_batch[sent] != of_batch[partner[sent]]]), np.int32)


def communicators(
    index: InstructionIndex, partner: Positions, rules: ModelRow
) -> tuple[Positions, NDArray[np.int64]]:
    """Transfers that have a partner, ascending, and the communicator of each.

    Where ranks have a queue for each peer it is that of two ranks: one for both ways and kinds, or
    one for each that has a queue of its own.  Else it is that of all ranks, and below 0.
    """
    at = index.where_all(TRANSFERS)
    at = at[partner[at] != NONE]
    ranks = np.int64(index.program.shape.ranks)
    grad = (_LANE[index.op[at]] == Lane.GRAD) & rules.kinds
    of_all = -1 - grad.astype(np.int64)
    if not rules.peers:
        return at, of_all
    own, peer = index.rank[at].astype(np.int64), index.rank[partner[at]].astype(np.int64)
    turned = index.is_op(RECEIVES)[at] if rules.ways else own > peer
    own, peer = np.where(turned, peer, own), np.where(turned, own, peer)
    pair = (grad * ranks + own) * ranks + peer
    if rules.batches and index.any_joined:
        pair = np.where(batched(index)[at], of_all, pair)
    return at, pair
