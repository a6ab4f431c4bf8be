"""Group opposite transfers, and post receives and gathers earlier.

Group first: an early receive has left the send that it could have gone with.  Gathers go before
receives: a host that blocks waits at a gather for its message, so that must stay where the
lowering has put the receive, or after.  All passes come after the lowering and keep its promise:
what they give is legal under the model they are told, and `check` says so again.
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
    """Post each receive up to `computes_ahead` computes earlier, so that its buffer waits, not its
    rank.

    A receive never passes an instruction of its own queue under `progress_model`, and compute has
    no say in when a transfer runs, so the dependency graph stays as it is.  Each step ahead costs a
    buffer.
    """
    graph = Graph.from_program(program, progress_model)
    joined, group_end = graph.index.joined, np.append(~graph.index.joined[1:], True)
    moves = graph.index.is_op(RECV_OPS) & ~joined & group_end
    return _move_instructions(
        program,
        moves,
        2 * _find_earliest_positions(graph.index, graph.queue_predecessor, computes_ahead) + 1,
    )


def start_gathers_early(program: Program, computes_ahead: int = 1) -> Program:
    """Begin each gather up to `computes_ahead` computes earlier, but not before its message is
    received.

    It runs beside these computes.  It stands just before the first of them: a host that blocks
    waits for the message there, and has sent before what it could.
    """
    if program.tp == 1:
        return program
    graph = Graph.from_program(program, "blocking_serial")
    floor = _find_earliest_positions(graph.index, graph.needs[0], computes_ahead)
    computes = np.append(_find_computes(graph.index), len(graph))
    first = computes[np.searchsorted(computes, floor, side="right")]
    own = np.arange(len(graph))
    return _move_instructions(
        program, graph.index.is_op(BOUNDARY_GATHER_OPS), 2 * np.minimum(first, own) - 1
    )


def _find_computes(index: InstructionIndex) -> NDArray[np.intp]:
    """Where computes stand; of those that run together the first."""
    return np.flatnonzero(index.is_op(COMPUTE_OPS) & ~index.joined)


def _find_earliest_positions(
    index: InstructionIndex, predecessor: Positions, computes_ahead: int
) -> NDArray[np.intp]:
    """The last position that each instruction stays behind when it goes `computes_ahead` computes
    ahead.

    That is one before its Stream, the end of a group, or `predecessor` it where that is not -1.
    """
    own, begin = np.arange(len(index)), index.program.offsets[index.rank]
    computes = _find_computes(index)
    over = np.searchsorted(computes, own) - 1 - computes_ahead  # the last compute to stay behind
    last = computes[np.maximum(over, 0)] if len(computes) else own
    floor = np.where((over >= 0) & (last >= begin), last, begin - 1)
    floor = np.maximum(floor, predecessor)
    ends = own[np.append(~index.joined[1:], True)]
    ends = ends[np.searchsorted(ends, np.maximum(floor, begin))]
    return np.where(floor >= begin, ends, begin - 1)


def _move_instructions(
    program: Program, is_movable: NDArray[np.bool_], sort_key: NDArray[np.intp]
) -> Program:
    """Sort what moves to its key among the others, whose keys are twice their positions."""
    order = np.argsort(np.where(is_movable, sort_key, 2 * np.arange(len(sort_key))), kind="stable")
    return _replace_words(program, program.words[order])


def _replace_words(program: Program, words: Words) -> Program:
    """A program of as long Streams, whose words are these."""
    return replace(program, streams=StreamSlices.from_words(words, program.offsets))


def group_opposite_transfers(program: Program) -> Program:
    """Issue a send and the receive that goes the other way as one, where both ranks can.

    Two messages between two ranks, one each way, that stand next to each other in both Streams
    are joined on both.  No path leads from one to the other except directly, so this makes no
    cycle that was not there, under any model.
    """
    graph = Graph.from_program(program, "blocking_serial")
    index, partner = graph.index, graph.partner
    send, receive = np.isin(index.op, SEND_OPS), np.isin(index.op, RECV_OPS)
    second = np.flatnonzero((send[1:] & receive[:-1]) | (receive[1:] & send[:-1])) + 1
    first = second - 1
    matched = (partner[first] >= 0) & (partner[second] >= 0)
    same_rank = index.rank[first] == index.rank[second]
    beside = np.abs(partner[first] - partner[second]) == 1
    same_peer = index.rank[partner[first]] == index.rank[partner[second]]
    words = program.words.copy()
    taken = index.joined | np.append(index.joined[1:], False)
    pairs = np.stack([first, second], 1)[matched & same_rank & beside & same_peer]
    for a, b in pairs.tolist():
        there = sorted((int(partner[a]), int(partner[b])))
        if not taken[[a, b, *there]].any():
            taken[[a, b, *there]] = True
            words[[b, there[1]]] |= JOINED_BIT
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
        _should_run,
        read_options=_read_options,
        order=1,
    ),
    Pass(
        "early_gathers",
        "better",
        lambda program, options: start_gathers_early(program),
        _should_run,
        order=2,
    ),
    Pass(
        "early_receives",
        "better",
        lambda program, options: post_receives_early(program, options.progress_model),
        _should_run,
        order=3,
    ),
)
