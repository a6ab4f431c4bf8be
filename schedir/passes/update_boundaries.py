"""Find where each rank ends each update but the last.

Where all ranks meet there, the ends cut the whole program in two: nothing ahead of them may wait
for what stands behind one, on whatever rank, or the ranks would wait for each other.
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

UpdateEnds = NDArray[np.int64]  # positions that the ends come behind, shape (updates - 1, ranks)
_NON_MICROBATCH_OPS: Final = tuple(
    row.op for row in INSTRUCTIONS if row.scope is not Scope.MICROBATCH
)


def has_update_barriers(program: Program) -> bool:
    """Whether ranks meet at the ends of updates before the last."""
    return (
        program.shape.optimizer_steps > 1
        and program.has_backward
        and bool(program.trained_ties or program.clip_grad_norm)
    )


def find_update_ends(program: Program) -> UpdateEnds:
    """Where in its Stream each rank ends each update, the last one too: the positions that the
    ends come before, shape (updates, ranks)."""
    final = program.offsets[1:]
    if program.shape.optimizer_steps == 1:
        return final[None]
    ends = (
        find_joint_ends(Graph.from_program(program))
        if has_update_barriers(program)
        else find_separate_ends(program)
    )
    if (joined := program.joined).any():
        last = np.flatnonzero(np.append(~joined[1:], True))
        ends = last[np.searchsorted(last, ends)]
    return np.concatenate([ends + 1, final[None]])


def find_separate_ends(program: Program) -> UpdateEnds:
    """Where a rank ends its updates alone: ahead of the first compute after its last of the update.

    What it made is sent first, for others may need it to come to their own end.  A rank that only
    runs forwards may be through with an update before it is with an earlier one, and with all of
    them long before the last: it ends them in turn, and in its own Stream.
    """
    index = InstructionIndex.from_program(program)
    computes = np.append(np.flatnonzero(index.is_op(COMPUTE_OPS)), len(index))
    ahead = computes[np.searchsorted(computes, _find_last_work(index), side="right")]
    ends = np.minimum(ahead, program.offsets[1:]) - 1
    return np.asarray(np.maximum.accumulate(ends, axis=0), np.int64)


def find_joint_ends(graph: Graph) -> UpdateEnds:
    """Where ranks that meet end their updates: as soon as nothing that is needed stands behind.

    Of a draft it is values that are needed, and else also the other side of each message.
    """
    values, rank = graph.needs if graph.program.is_draft else graph.partner[None], graph.index.rank
    needer, which = np.nonzero(((values != NO_POSITION) & (rank[values] != rank)).T)
    giver, last = values[which, needer], np.append(~graph.index.joined[1:], True)
    whole = np.flatnonzero(last)[number_groups(graph.index) - 1]  # the last of what runs together
    ends, done = whole[_find_last_work(graph.index)], graph.program.offsets[:-1] - 1
    for end in ends:
        np.maximum(end, done, out=end)
        while (end > done).any():
            begins, stops = np.searchsorted(needer, [done, end], side="right").tolist()
            done = end.copy()
            needed = np.concatenate([giver[a:b] for a, b in zip(begins, stops, strict=True)])
            np.maximum.at(end, rank[needed], whole[needed])
    return ends


def _find_last_work(index: InstructionIndex) -> UpdateEnds:
    """Where each rank last works on each update before the last: a rank that trains adds to it, or
    does what ends it, and one with frozen stages only runs forwards."""
    shape = index.program.shape
    at = np.flatnonzero(index.is_op(COMPUTE_OPS + _NON_MICROBATCH_OPS))
    last = np.zeros((shape.optimizer_steps, shape.ranks), np.int64)
    np.maximum.at(last, (index.find_updates(at), index.rank[at]), at)
    return last[:-1]
