"""Convert letters of a schedule to instructions, with numbers of stages and microbatches.

A letter has a local stage, which becomes a stage of the model. A letter without a microbatch gets
the next microbatch in order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CommandHint, ScheduleError
from schedir.ir.isa.instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_OPS,
    BACKWARD_WEIGHT,
    INSTRUCTIONS,
    RECOMPUTE,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import JOINED_BIT, WORD_DTYPE, Words, is_op, pack
from schedir.schedules.schedule_algebra import AUTO_MICROBATCH, OLDEST_STAGE

_STAGE_HINT = (
    "F[j] is local stage j of the rank, from 0; microbatches are numbered automatically, or with "
    "F.at(mb); {option} gives each rank N stages"
)

LetterIndices = NDArray[np.intp]


def number_letters(words: list[Words], first_rank: int, shape: PipelineShape) -> Words:
    """Convert the letters of consecutive ranks to instructions, and number their microbatches.

    The k-th forward of a local stage gets the k-th microbatch of the stage, and so does the k-th
    backward. B and I are counted together. A W gets the microbatch of the I that it completes.

    Args:
        words: The letters of each rank.
        first_rank: The rank of the first entry of `words`.
        shape: Shape of the pipeline.

    Returns:
        The words of all these ranks, one rank after the other.

    Raises:
        ScheduleError: A rank does not have a local stage, uses both W and W[j], has more W
            without `[j]` than I, or has an R without a backward.
    """
    letters = np.concatenate(words)
    fields = letters.view(WORD_DTYPE)
    op, given_mb = fields["op"], fields["mb"]
    rank = np.repeat(np.arange(first_rank, first_rank + len(words)), [*map(len, words)])
    local_stage = _resolve_local_stages(fields, rank, shape)
    w, i = _match_weight_grads(op, rank, local_stage)
    local_stage[w] = local_stage[i]
    rank_stages = shape.stages_on_rank[first_rank : first_rank + len(words)]
    max_stages = max(map(len, rank_stages))
    stage_table = np.array([[*stages, *[0] * (max_stages - len(stages))] for stages in rank_stages])
    # Index of the local stage in `stage_table`.
    cell = (rank - first_rank) * max_stages + local_stage
    counted_op = np.where(op == BACKWARD_INPUT, BACKWARD, op)
    # Each replica of a stage counts from the first microbatch of its row of the placement.
    count_before = _count_equal_before(
        cell * len(INSTRUCTIONS) + counted_op, stage_table.size * len(INSTRUCTIONS)
    )
    rows = shape.replica_row_of_stage(
        stage_table, np.arange(first_rank, first_rank + len(words))[:, None]
    )
    first_mb = np.array(shape.microbatch_row_offsets)[rows].reshape(-1)
    mb = np.where(given_mb == AUTO_MICROBATCH, count_before + first_mb[cell], given_mb)
    _number_recomputes(op, cell, given_mb, mb, rank, local_stage)
    is_unnumbered = given_mb[w] == AUTO_MICROBATCH
    mb[w[is_unnumbered]] = mb[i[is_unnumbered]]
    return pack(op, stage_table.reshape(-1)[cell], mb) | letters & JOINED_BIT


def _number_recomputes(
    op: NDArray[np.uint8], cell: Words, specified: NDArray[np.uint32], mb: Words, rank: Words,
    local_stage: Words,
) -> None:  # fmt: skip
    """Give each R without a microbatch the microbatch of its backward.

    Its backward is the next backward of its stage that has no R yet. Raises ScheduleError if there
    is no such backward.
    """
    r = np.flatnonzero(op == RECOMPUTE)
    if not len(r):
        return
    b = np.flatnonzero(is_op(op, BACKWARD_OPS))
    r, b = r[np.argsort(cell[r], kind="stable")], b[np.argsort(cell[b], kind="stable")]
    span = len(op) + 1
    # The next backward of each R.
    next_backward = np.searchsorted(cell[b] * span + b, cell[r] * span + r)
    # The backward of an R comes after the backward of the previous R of its stage, so
    # `backward_index - k` never decreases.
    k = np.arange(len(r))
    first_of_stage = np.searchsorted(cell[r], cell[r])  # Index of the first R of the same stage.
    offset = cell[r] * 2 * span  # With this offset, the running maximum restarts at each stage.
    index_in_stage = k - first_of_stage
    running_max = np.maximum.accumulate(next_backward - index_in_stage + offset)
    backward_index = running_max - offset + index_in_stage
    has_backward = backward_index < np.searchsorted(cell[b], cell[r], side="right")
    is_unnumbered = specified[r] == AUTO_MICROBATCH
    if (is_unmatched := is_unnumbered & ~has_backward).any():
        letter = int(r[is_unmatched.argmax()])
        raise ScheduleError(
            f"letter #{letter - int((rank == rank[letter]).argmax())} of rank {rank[letter]} is "
            f"R[{local_stage[letter]}], but each later backward of that stage already has an R",
            hint="each R belongs to the next B or I of its stage: F + R + B",
        )
    mb[r[is_unnumbered]] = mb[b[backward_index[is_unnumbered]]]


def _resolve_local_stages(fields: NDArray[np.void], rank: Words, shape: PipelineShape) -> Words:
    """Return the local stage of each letter, or OLDEST_STAGE for a plain W (without `[j]`).

    A plain W gets local stage 0 if its rank has only one stage. Raises ScheduleError for a stage
    that the rank does not have.
    """
    local_stage = fields["stage"].astype(np.int64)
    stage_count = np.array([*map(len, shape.stages_on_rank)])[rank]
    is_plain = local_stage == OLDEST_STAGE
    if is_plain.any():
        local_stage[is_plain & (stage_count == 1)] = 0
    is_foreign = (local_stage >= stage_count) & (local_stage != OLDEST_STAGE)
    if is_foreign.any():
        letter = int(is_foreign.argmax())
        wrong_rank = int(rank[letter])
        stages = shape.stages_on_rank[wrong_rank]
        text = INSTRUCTIONS[fields["op"][letter]].text
        count_text = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
        raise ScheduleError(
            f"letter #{letter - int((rank == wrong_rank).argmax())} of rank {wrong_rank} is "
            f"{text}[{local_stage[letter]}], but the rank has {count_text}: {text}[0] is stage "
            f"{stages[0]} of the model",
            hint=CommandHint(
                _STAGE_HINT.format(option="stages_per_rank=N"),
                _STAGE_HINT.format(option="--stages-per-rank N"),
            ),
        )
    return local_stage


def _match_weight_grads(
    op: NDArray[np.uint8], rank: Words, local_stage: Words
) -> tuple[LetterIndices, LetterIndices]:
    """Return the indices of the W that complete an I, and the indices of these I.

    The k-th W[j] completes the k-th I of local stage j. The k-th plain W (without `[j]`) completes
    the k-th I of the rank. Raises ScheduleError if a rank uses both forms, or has more plain W than
    I.
    """
    w = np.flatnonzero(op == BACKWARD_WEIGHT)
    i = np.flatnonzero(op == BACKWARD_INPUT)
    if not len(w):
        return w, w
    stage_of_i = local_stage[i]
    is_plain = local_stage[w] == OLDEST_STAGE
    if is_plain.any():
        # The number of plain W of each rank.
        plain_counts = np.bincount(rank[w][is_plain], minlength=int(rank[-1]) + 1)
        if (is_mixed := ~is_plain & (plain_counts[rank[w]] > 0)).any():
            raise ScheduleError(
                f"rank {rank[w][is_mixed.argmax()]} has both W and W[j]: use W[j] everywhere"
            )
        input_counts = np.bincount(rank[i], minlength=len(plain_counts))
        if (has_excess := plain_counts > input_counts).any():
            wrong_rank = int(has_excess.argmax())
            raise ScheduleError(
                f"rank {wrong_rank} has {plain_counts[wrong_rank]} W, but only "
                f"{input_counts[wrong_rank]} I"
            )
        stage_of_i = np.where(plain_counts[rank[i]] > 0, OLDEST_STAGE, stage_of_i)
    w_cells = rank[w] << 16 | local_stage[w]
    i_cells = rank[i] << 16 | stage_of_i
    w, i = w[np.argsort(w_cells, kind="stable")], i[np.argsort(i_cells, kind="stable")]
    w_cells, i_cells = np.sort(w_cells), np.sort(i_cells)
    match_index = (
        np.searchsorted(i_cells, w_cells) + np.arange(len(w)) - np.searchsorted(w_cells, w_cells)
    )
    has_match = match_index < np.searchsorted(i_cells, w_cells, side="right")
    return w[has_match], i[match_index[has_match]]


def _count_equal_before(key: Words, max_key: int) -> Words:
    """Return the number of equal keys before each key: [a a b a b] gives [0 1 0 2 1].

    All keys are less than `max_key`.
    """
    if max_key <= 2**16:
        key = key.astype(np.uint16)  # Small integers sort several times as fast.
    order = np.argsort(key, kind="stable")
    sorted_keys = key[order]
    group_starts = np.flatnonzero(np.append(True, sorted_keys[1:] != sorted_keys[:-1])[: len(key)])
    counts = np.empty(len(key), np.int64)
    group_sizes = np.diff(group_starts, append=len(key))
    counts[order] = np.arange(len(key)) - np.repeat(group_starts, group_sizes)
    return counts
