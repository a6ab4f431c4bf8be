"""Group opposite transfers, and post receives and gathers earlier.

The grouping runs first, because it needs sends and receives that are neighbours. Posting receives
early separates these neighbours. Then gathers move, and receives move last. A blocking host waits
at a gather for its message, so the gather must stay after the position where the lowering put the
receive. The passes keep the program legal under the given progress model. `check` verifies that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.progress_models import ProgressModel
from schedir.ir.instruction_index import InstructionIndex, Positions
from schedir.ir.isa.instructions import (
    BOUNDARY_GATHER_OPS,
    COMPUTE_OPS,
    RECV_OPS,
    SEND_OPS,
    TRANSFER_OPS,
)
from schedir.ir.program import JOINED_BIT, Program, StreamSlices, Words
from schedir.passes.pass_types import Options, Pass


def post_receives_early(
    program: Program, progress_model: ProgressModel = "per_device", computes_ahead: int = 1
) -> Program:
    """Post each receive up to `computes_ahead` computes earlier.

    So the message can arrive in its buffer before the rank needs it. A receive never passes an
    instruction of the same queue under `progress_model`. Receives do not depend on compute of their
    rank, so the dependency graph does not change. A receive needs one more buffer for each compute
    that it passes.

    Args:
        program: A lowered program.
        progress_model: The progress model of the transport.
        computes_ahead: Number of computes that a receive may pass.
    """
    graph = Graph.from_program(program, progress_model)
    joined, is_group_end = graph.index.joined, np.append(~graph.index.joined[1:], True)
    is_movable = graph.index.is_op(RECV_OPS) & ~joined & is_group_end
    return _move_instructions(
        program,
        is_movable,
        2 * _find_earliest_positions(graph.index, graph.queue_predecessor, computes_ahead) + 1,
    )


def start_gathers_early(program: Program, computes_ahead: int = 1) -> Program:
    """Start each gather up to `computes_ahead` computes earlier, but not before its receive.

    The gather then runs during these computes. The gather is inserted just before the first of
    these computes. When a blocking host waits there for the message, it has already issued all
    earlier sends.

    Args:
        program: A lowered program.
        computes_ahead: Number of computes that a gather may pass.
    """
    if program.tp == 1:
        return program
    graph = Graph.from_program(program, "blocking_serial")
    floor = _find_earliest_positions(graph.index, graph.needs[0], computes_ahead)
    computes = np.append(_find_computes(graph.index), len(graph))
    next_compute = computes[np.searchsorted(computes, floor, side="right")]
    positions = np.arange(len(graph))
    return _move_instructions(
        program, graph.index.is_op(BOUNDARY_GATHER_OPS), 2 * np.minimum(next_compute, positions) - 1
    )


def _find_computes(index: InstructionIndex) -> NDArray[np.intp]:
    """Return the positions of computes. A joined pair is included once, by its first compute."""
    return np.flatnonzero(index.is_op(COMPUTE_OPS) & ~index.joined)


def _find_earliest_positions(
    index: InstructionIndex, predecessor: Positions, computes_ahead: int
) -> NDArray[np.intp]:
    """Return the position that each instruction must follow when it moves earlier.

    The position is the end of a group, at or after `predecessor`. If nothing must precede the
    instruction, the result is the position before the first instruction of the Stream.
    """
    positions, stream_start = np.arange(len(index)), index.program.offsets[index.rank]
    computes = _find_computes(index)
    # The index of the last compute that the instruction must not pass.
    last_index = np.searchsorted(computes, positions) - 1 - computes_ahead
    last_compute = computes[np.maximum(last_index, 0)] if len(computes) else positions
    is_limited = (last_index >= 0) & (last_compute >= stream_start)
    floor = np.where(is_limited, last_compute, stream_start - 1)
    floor = np.maximum(floor, predecessor)
    group_ends = positions[np.append(~index.joined[1:], True)]
    group_end = group_ends[np.searchsorted(group_ends, np.maximum(floor, stream_start))]
    return np.where(floor >= stream_start, group_end, stream_start - 1)


def _move_instructions(
    program: Program, is_movable: NDArray[np.bool_], sort_key: NDArray[np.intp]
) -> Program:
    """Sort the instructions by a key.

    The key of a movable instruction is its `sort_key`. For other instructions, the key is twice the
    position.
    """
    order = np.argsort(np.where(is_movable, sort_key, 2 * np.arange(len(sort_key))), kind="stable")
    return _replace_words(program, program.words[order])


def _replace_words(program: Program, words: Words) -> Program:
    """Return the program with new words. The lengths of the Streams stay the same."""
    return replace(program, streams=StreamSlices.from_words(words, program.offsets))


def group_opposite_transfers(program: Program) -> Program:
    """Join a send and the receive of the opposite direction, if this is legal on both ranks.

    Two messages between two ranks, one each way, are joined on both ranks if they are adjacent in
    both Streams. Then no path of the dependency graph leads from one message to the other through a
    third instruction. So the pass adds no cycle under any progress model.

    Args:
        program: A lowered program.
    """
    graph = Graph.from_program(program, "blocking_serial")
    index, partner = graph.index, graph.partner
    is_send = np.isin(index.op, SEND_OPS)
    is_receive = np.isin(index.op, RECV_OPS)
    second = np.flatnonzero((is_send[1:] & is_receive[:-1]) | (is_receive[1:] & is_send[:-1])) + 1
    first = second - 1
    is_matched = (partner[first] >= 0) & (partner[second] >= 0)
    is_same_rank = index.rank[first] == index.rank[second]
    is_adjacent = np.abs(partner[first] - partner[second]) == 1
    is_same_peer = index.rank[partner[first]] == index.rank[partner[second]]
    words = program.words.copy()
    is_grouped = index.joined | np.append(index.joined[1:], False)
    pairs = np.stack([first, second], 1)[is_matched & is_same_rank & is_adjacent & is_same_peer]
    for a, b in pairs.tolist():
        partner_pair = sorted((int(partner[a]), int(partner[b])))
        if not is_grouped[[a, b, *partner_pair]].any():
            is_grouped[[a, b, *partner_pair]] = True
            words[[b, partner_pair[1]]] |= JOINED_BIT
    return _replace_words(program, words)


def _read_options(program: Program, progress_model: ProgressModel) -> dict[str, Any]:
    return {"overlap": bool((program.joined & np.isin(program.op, TRANSFER_OPS)).any())}


def _should_run(program: Program, options: Options) -> bool:
    return options.overlap


PASSES: Final = (
    Pass(
        "group_opposites",
        "better",
        lambda program, options: group_opposite_transfers(program),
        should_run=_should_run,
        read_options=_read_options,
        order=1,
    ),
    Pass(
        "early_gathers",
        "better",
        lambda program, options: start_gathers_early(program),
        should_run=_should_run,
        order=2,
    ),
    Pass(
        "early_receives",
        "better",
        lambda program, options: post_receives_early(program, options.progress_model),
        should_run=_should_run,
        order=3,
    ),
)
