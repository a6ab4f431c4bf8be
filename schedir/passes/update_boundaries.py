"""Find the end of each update on each rank.

If ranks have a collective at the end of an update, the ends on all ranks divide the program in two
parts. An instruction of the first part must not wait for an instruction of the second part.
Otherwise the ranks would wait for each other.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schedir.analysis.dependency_graph import Graph
from schedir.analysis.memory.buffer_slots import number_groups
from schedir.ir.instruction_index import NO_POSITION, InstructionIndex
from schedir.ir.isa.instructions import COMPUTE_OPS, INSTRUCTIONS, Scope
from schedir.ir.program import Program

# Position of the last instruction of each update except the last, shape (updates - 1, ranks).
UpdateEnds = NDArray[np.int64]
_NON_MICROBATCH_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if row.scope is not Scope.MICROBATCH
)


def has_update_barriers(program: Program) -> bool:
    """Return whether updates before the last one end with a collective over pipeline ranks.

    Args:
        program: The program.
    """
    return (
        program.shape.optimizer_steps > 1
        and program.has_backward
        and bool(program.trained_ties or program.clip_grad_norm)
    )


def find_update_ends(program: Program) -> UpdateEnds:
    """Return the positions at which to insert the instructions that end each update.

    Args:
        program: The program.

    Returns:
        Positions, shape (updates, ranks). The last instruction of an update comes before the
        position of the update.
    """
    final = program.offsets[1:]
    if program.shape.optimizer_steps == 1:
        return final[None]
    ends = (
        find_joint_ends(Graph.from_program(program))
        if has_update_barriers(program)
        else find_separate_ends(program)
    )
    if (joined := program.joined).any():
        group_ends = np.flatnonzero(np.append(~joined[1:], True))
        ends = group_ends[np.searchsorted(group_ends, ends)]
    return np.concatenate([ends + 1, final[None]])


def find_separate_ends(program: Program) -> UpdateEnds:
    """Return the last position of each update except the last, if updates end without collectives.

    A rank ends an update right before the first compute after its last work on the update. So sends
    between this work and this compute come before the end: other ranks may need the sent values to
    end the update. A rank that has only frozen stages may finish a later update before an earlier
    update. Such a rank still ends its updates in order, and not after the end of its Stream.

    Args:
        program: The program.
    """
    index = InstructionIndex.from_program(program)
    computes = np.append(np.flatnonzero(index.is_op(COMPUTE_OPS)), len(index))
    next_compute = computes[np.searchsorted(computes, _find_last_work(index), side="right")]
    ends = np.minimum(next_compute, program.offsets[1:]) - 1
    return np.asarray(np.maximum.accumulate(ends, axis=0), np.int64)


def find_joint_ends(graph: Graph) -> UpdateEnds:
    """Return the last position of each update except the last, if updates end with collectives.

    The ends are as early as possible, but no instruction before an end may need an instruction
    after an end. In a draft, an instruction needs the producers of its values on other ranks. In a
    lowered program, a send or receive needs the other side of its message.

    Args:
        graph: The dependency graph of a program or a draft.
    """
    producers = graph.needs if graph.program.is_draft else graph.partner[None]
    rank = graph.index.rank
    consumer, value_index = np.nonzero(((producers != NO_POSITION) & (rank[producers] != rank)).T)
    producer = producers[value_index, consumer]
    is_group_end = np.append(~graph.index.joined[1:], True)
    group_end = np.flatnonzero(is_group_end)[number_groups(graph.index) - 1]
    ends, previous_end = group_end[_find_last_work(graph.index)], graph.program.offsets[:-1] - 1
    for end in ends:
        np.maximum(end, previous_end, out=end)
        while (end > previous_end).any():
            starts, stops = np.searchsorted(consumer, [previous_end, end], side="right").tolist()
            previous_end = end.copy()
            producers_by_rank = [
                producer[start:stop] for start, stop in zip(starts, stops, strict=True)
            ]
            needed_positions = np.concatenate(producers_by_rank)
            np.maximum.at(end, rank[needed_positions], group_end[needed_positions])
    return ends


def _find_last_work(index: InstructionIndex) -> UpdateEnds:
    """Return the position of each rank's last work on each update except the last.

    Work is a compute, or an instruction that is not per microbatch.
    """
    shape = index.program.shape
    positions = np.flatnonzero(index.is_op(COMPUTE_OPS + _NON_MICROBATCH_OPS))
    last_work = np.zeros((shape.optimizer_steps, shape.ranks), np.int64)
    np.maximum.at(last_work, (index.find_updates(positions), index.rank[positions]), positions)
    return last_work[:-1]
