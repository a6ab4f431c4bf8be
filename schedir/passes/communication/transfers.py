"""Insert sends and receives, in one global order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.critical_path.longest_path import EarliestTimes, compute_earliest_times
from schedir.analysis.deadlock import explain_deadlock
from schedir.analysis.dependency_graph import Graph
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex, Positions
from schedir.ir.isa.instructions import INSTRUCTIONS, SEND_OPS, Opcode, Scope, find_producers
from schedir.ir.program import ADDRESS_MASK, OP_SHIFT, STAGE_SHIFT, Program, StreamSlices, Words
from schedir.passes.pass_types import Pass
from schedir.passes.update_boundaries import find_joint_ends, has_update_barriers

_PRODUCERS_BY_SEND = {send: find_producers(INSTRUCTIONS[send].needs[0]) for send in SEND_OPS}

_NO_POSITIONS = np.empty(0, np.int32)
_MAX_MERGE_SIZE = 2**16  # number of instructions that are merged in one step, to limit memory


def insert_transfers(program: Program, costs: Costs | None = None) -> Program:
    """Insert sends and receives into a draft. The result is legal under every progress model.

    The pass walks the draft in order of the times that `costs` predict. When a value is produced,
    its send is appended to the Stream of the producer, and its receive to the Stream of the
    consumer. So all Streams follow one global order. In this order, every edge of the dependency
    graph leads forward, even with blocking transfers in a single queue. So there is no cycle. If
    ranks have a collective at the end of an update, all instructions that the update needs come
    before this collective in the order.

    Args:
        program: The draft.
        costs: The costs that determine the order of messages; unit costs by default.

    Raises:
        DeadlockError: The draft itself cannot finish.
        OrderError: The draft cannot finish because of the order of a single rank.
    """
    graph = Graph.from_program(program)
    earliest_times = compute_earliest_times(
        graph, _compute_ordering_costs(costs or Costs(), program)
    )
    if not earliest_times.is_done.all():
        raise explain_deadlock(graph, earliest_times)
    index = graph.index
    positions_by_send = {
        send: index.find_all_positions(ops)
        for send, ops in _PRODUCERS_BY_SEND.items()
        if program.uses_value(INSTRUCTIONS[send].needs[0])
    }
    start_numbers, end_numbers = _number_instructions(
        graph, earliest_times, np.concatenate([_NO_POSITIONS, *positions_by_send.values()])
    )
    offsets = np.cumsum([len(positions) for positions in positions_by_send.values()])
    order: dict[Opcode, Positions] = {}
    parts = [
        _MergedInstructions(
            np.arange(len(index), dtype=np.int32),
            start_numbers,
            index.rank,
            word_mask=-1,
            word_offset=0,
        )
    ]
    for (send, positions), offset in zip(positions_by_send.items(), offsets.tolist(), strict=True):
        number = end_numbers[offset - len(positions) : offset]
        order[send] = np.full(index.key_count[Scope.MICROBATCH], NO_POSITION, np.int32)
        order[send][index.key[positions]] = number
        parts += _make_transfers(index, send, positions, number)
    del graph, earliest_times, index
    program.clear_cache()  # frees memory for the merge
    return replace(program, streams=_merge_streams(program, parts), message_order=order)


class _MergedInstructions(NamedTuple):
    """Entries that are merged to Streams: instructions, sends or receives, sorted by rank.

    Attributes:
        positions: The position of the draft instruction from which each entry is made.
        order_number: The number of each entry in the global order.
        rank: The rank of each entry.
        word_mask: The bits of the draft instruction's word that the entry keeps.
        word_offset: The number that is added to these bits to make the word of the entry.
    """

    positions: Positions
    order_number: NDArray[np.int32]
    rank: NDArray[Any]
    word_mask: int
    word_offset: int

    def select_range(self, begin: int, end: int | None) -> _MergedInstructions:
        """Return the entries from index `begin` to before `end`."""
        entries = slice(begin, end)
        return self._replace(
            positions=self.positions[entries],
            order_number=self.order_number[entries],
            rank=self.rank[entries],
        )


def _merge_streams(program: Program, parts: list[_MergedInstructions]) -> StreamSlices:
    """Return Streams with all instructions in the global order."""
    size = sum(np.bincount(part.rank, minlength=program.shape.ranks) for part in parts)
    offsets = np.append(0, np.cumsum(size))
    words = np.empty(int(offsets[-1]), np.int64)
    _merge_ranks(program.words, parts, 0, program.shape.ranks, words)
    return StreamSlices.from_words(words, offsets)


def _merge_ranks(
    words: Words, parts: list[_MergedInstructions], first_rank: int, end_rank: int, output: Words
) -> None:
    """Merge the instructions of a range of ranks into `output`.

    If there are many instructions, the first half of the ranks is merged, and then the second half.
    """
    if len(output) > _MAX_MERGE_SIZE and end_rank - first_rank > 1:
        middle_rank = (first_rank + end_rank) // 2
        splits = [int(np.searchsorted(part.rank, middle_rank)) for part in parts]
        low_parts = [part.select_range(0, k) for part, k in zip(parts, splits, strict=True)]
        high_parts = [part.select_range(k, None) for part, k in zip(parts, splits, strict=True)]
        _merge_ranks(words, low_parts, first_rank, middle_rank, output[: sum(splits)])
        _merge_ranks(words, high_parts, middle_rank, end_rank, output[sum(splits) :])
        return
    keys = [np.asarray(part.rank, np.int64) << 32 | part.order_number for part in parts]
    merged_words = [(words[part.positions] & part.word_mask) + part.word_offset for part in parts]
    order = np.argsort(np.concatenate(keys), kind="stable")  # fast, because the parts are sorted
    output[:] = np.concatenate(merged_words)[order]


def _number_instructions(
    graph: Graph, earliest_times: EarliestTimes, producer_positions: Positions
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the global order: a number for each instruction, and one for each produced value.

    Instructions are ordered by their start, and produced values by the end of their producer. At
    equal times they are ordered by `EarliestTimes.level`, and then by position.
    """
    program = graph.program
    producer_order = np.argsort(producer_positions, kind="stable")
    producer_positions = producer_positions[producer_order]
    time = np.concatenate([earliest_times.start, earliest_times.end[producer_positions]])
    level = 2 * np.concatenate([earliest_times.level, earliest_times.level[producer_positions]])
    level[len(graph) :] += 1
    # Numbers of 16 bits sort faster.
    keys = [level.astype(np.uint16) if level.max(initial=0) < 2**16 else level, time]
    if has_update_barriers(program):  # the number of ended updates has priority over the time
        ended_updates = np.zeros(len(graph), np.int64)
        for update_ends, (begin, end) in zip(
            find_joint_ends(graph).T, pairwise(program.offsets.tolist()), strict=True
        ):
            ended_updates[begin:end] = np.searchsorted(update_ends, np.arange(begin, end))
        keys.append(np.concatenate([ended_updates, ended_updates[producer_positions]]))
    order = np.lexsort(keys)
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    end_numbers = np.empty(len(producer_positions), np.int32)
    end_numbers[producer_order] = numbers[len(graph) :]
    return numbers[: len(graph)], end_numbers


def _compute_ordering_costs(costs: Costs, program: Program) -> Costs:
    """Return the costs that determine the order of messages. In a ring, no message has cost 0.

    Messages with cost 0 that can start at the same time are ordered by rank. If the ranks form a
    line, this order delays no message. In a ring, each message would have to wait for the previous
    message.
    So in a ring, each message gets a very small cost, and the order follows the times at which
    messages are needed.
    """
    shape, rows = program.shape, program.shape.replica_ranks.tolist()
    pairs = [pair for row in rows for pair in pairwise(row)]
    pairs += [(row[begin], row[end]) for row in rows for begin, end in program.skips]
    rank_pairs = {frozenset(pair) for pair in pairs if len({*pair}) == 2}
    if len(rank_pairs) < shape.ranks:  # a line or a tree of ranks
        return costs
    costs_by_op = [costs.for_opcode(op, shape) for op in Opcode]
    min_cost = min(float(cost.min(initial=1.0, where=cost > 0)) for cost in costs_by_op)
    tiny_cost = min_cost * 2.0**-30  # fewer than 2^30 messages together cost less than `min_cost`
    return replace(costs, send=from_grid(np.maximum(costs_by_op[Opcode.SendAct], tiny_cost)))


def _make_transfers(
    index: InstructionIndex, send: Opcode, positions: Positions, number: NDArray[np.int32]
) -> Iterator[_MergedInstructions]:
    """Yield the sends and the receives of the values that pass from producers to other ranks."""
    row, shape = INSTRUCTIONS[send], index.program.shape
    assert row.partner is not None and row.peer is not None
    neighbors = index.program.neighbor_stages(row.peer)
    peer_stage = neighbors[index.stage[positions]]
    rank = index.rank[positions]
    peer_rank = shape.rank_of_stage(np.maximum(peer_stage, 0), index.mb[positions])
    has_receiver = peer_stage >= index.program.first_stage(send)
    crossings = np.flatnonzero(has_receiver & (peer_rank != rank))
    yield _MergedInstructions(
        positions[crossings],
        number[crossings],
        rank[crossings],
        ADDRESS_MASK,
        int(send) << OP_SHIFT,
    )
    crossings = crossings[np.argsort(peer_rank[crossings].astype(np.uint16), kind="stable")]
    shift_of_stage = neighbors - np.arange(shape.stages)
    # There are several shifts only for skips of different lengths.
    shifts = np.unique(shift_of_stage[neighbors >= 0]).tolist()
    for shift in shifts:
        entries = crossings
        if len(shifts) > 1:
            entries = crossings[shift_of_stage[index.stage[positions[crossings]]] == shift]
        word_offset = (int(row.partner) << OP_SHIFT) + (shift << STAGE_SHIFT)
        yield _MergedInstructions(
            positions[entries], number[entries], peer_rank[entries], ADDRESS_MASK, word_offset
        )


PASSES: Final = (
    Pass(
        "transfers", "messages", lambda program, options: insert_transfers(program, options.costs)
    ),
)
