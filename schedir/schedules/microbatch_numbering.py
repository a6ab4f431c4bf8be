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
        ScheduleError: A rank does not have a local stage, uses both W and W[j], has more W than I,
            or has an R without a backward.
    """
    letters = np.concatenate(words)
    fields = letters.view(WORD_DTYPE)
    op, given_mb = fields["op"], fields["mb"]
    rank = np.repeat(np.arange(first_rank, first_rank + len(words)), [*map(len, words)])
    local = _resolve_local_stages(fields, rank, shape)
    w, i = _match_weight_grads(op, rank, local)
    local[w] = local[i]
    held = shape.stages_on_rank[first_rank : first_rank + len(words)]
    most = max(map(len, held))
    own = np.array([[*stages, *[0] * (most - len(stages))] for stages in held])
    cell = (rank - first_rank) * most + local  # Index of the local stage in the table `own`.
    whole_or_input = np.where(op == BACKWARD_INPUT, BACKWARD, op)
    # Each replica of a stage counts from the first microbatch of its row of the placement.
    before = _count_equal_before(
        cell * len(INSTRUCTIONS) + whole_or_input, own.size * len(INSTRUCTIONS)
    )
    rows = shape.replica_row_of_stage(own, np.arange(first_rank, first_rank + len(words))[:, None])
    begin = np.array(shape.microbatch_row_offsets)[rows].reshape(-1)
    mb = np.where(given_mb == AUTO_MICROBATCH, before + begin[cell], given_mb)
    _number_recomputes(op, cell, given_mb, mb, rank, local)
    free = given_mb[w] == AUTO_MICROBATCH
    mb[w[free]] = mb[i[free]]
    return pack(op, own.reshape(-1)[cell], mb) | letters & JOINED_BIT


def _number_recomputes(
    op: NDArray[np.uint8], cell: Words, specified: NDArray[np.uint32], mb: Words, rank: Words,
    local: Words,
) -> None:  # fmt: skip
    """Give each R without a microbatch the microbatch of its backward.

    Its backward is the next backward of its stage that has no R yet. Raises ScheduleError if there
    is none.
    """
    r = np.flatnonzero(op == RECOMPUTE)
    if not len(r):
        return
    b = np.flatnonzero(is_op(op, BACKWARD_OPS))
    r, b = r[np.argsort(cell[r], kind="stable")], b[np.argsort(cell[b], kind="stable")]
    span = len(op) + 1
    ahead = np.searchsorted(cell[b] * span + b, cell[r] * span + r)  # The next backward of each R.
    # An R needs a backward after that of the previous R of its stage, so `at - k` never decreases.
    k = np.arange(len(r))
    least = np.searchsorted(cell[r], cell[r])  # Index of the first R of the same stage.
    own = cell[r] * 2 * span  # With this offset, the running maximum restarts at each stage.
    at = np.maximum.accumulate(ahead - (k - least) + own) - own + (k - least)
    there = at < np.searchsorted(cell[b], cell[r], side="right")
    free = specified[r] == AUTO_MICROBATCH
    if (lone := free & ~there).any():
        one = int(r[lone.argmax()])
        raise ScheduleError(
            f"letter #{one - int((rank == rank[one]).argmax())} of rank {rank[one]} is "
            f"R[{local[one]}], but each later backward of that stage already has an R",
            hint="each R belongs to the next B or I of its stage: F + R + B",
        )
    mb[r[free]] = mb[b[at[free]]]


def _resolve_local_stages(fields: NDArray[np.void], rank: Words, shape: PipelineShape) -> Words:
    """Return the local stage of each letter, or OLDEST_STAGE for a plain W (without `[j]`).

    A plain W gets local stage 0 if its rank has only one stage. Raises ScheduleError for a stage
    that the rank does not have.
    """
    local = fields["stage"].astype(np.int64)
    number = np.array([*map(len, shape.stages_on_rank)])[rank]
    oldest = local == OLDEST_STAGE
    if oldest.any():
        local[oldest & (number == 1)] = 0
    foreign = (local >= number) & (local != OLDEST_STAGE)
    if foreign.any():
        at = int(foreign.argmax())
        wrong = int(rank[at])
        own, text = shape.stages_on_rank[wrong], INSTRUCTIONS[fields["op"][at]].text
        has = "1 stage" if len(own) == 1 else f"{len(own)} stages"
        raise ScheduleError(
            f"letter #{at - int((rank == wrong).argmax())} of rank {wrong} is "
            f"{text}[{local[at]}], but the rank has {has}: {text}[0] is stage {own[0]} of the "
            "model",
            hint=CommandHint(
                _STAGE_HINT.format(option="stages_per_rank=N"),
                _STAGE_HINT.format(option="--stages-per-rank N"),
            ),
        )
    return local


def _match_weight_grads(
    op: NDArray[np.uint8], rank: Words, local: Words
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
    stage_of_i = local[i]
    bare = local[w] == OLDEST_STAGE
    if bare.any():
        # The number of plain W of each rank.
        number = np.bincount(rank[w][bare], minlength=int(rank[-1]) + 1)
        if (mixed := ~bare & (number[rank[w]] > 0)).any():
            raise ScheduleError(
                f"rank {rank[w][mixed.argmax()]} has both W and W[j]: use W[j] everywhere"
            )
        inputs = np.bincount(rank[i], minlength=len(number))
        if (more := number > inputs).any():
            one = int(more.argmax())
            raise ScheduleError(f"rank {one} has {number[one]} W, but only {inputs[one]} I")
        stage_of_i = np.where(number[rank[i]] > 0, OLDEST_STAGE, stage_of_i)
    w_cells = rank[w] << 16 | local[w]
    of = rank[i] << 16 | stage_of_i
    w, i = w[np.argsort(w_cells, kind="stable")], i[np.argsort(of, kind="stable")]
    w_cells, of = np.sort(w_cells), np.sort(of)
    at = np.searchsorted(of, w_cells) + np.arange(len(w)) - np.searchsorted(w_cells, w_cells)
    there = at < np.searchsorted(of, w_cells, side="right")
    return w[there], i[at[there]]


def _count_equal_before(key: Words, max_key: int) -> Words:
    """Return the number of equal keys before each key: [a a b a b] gives [0 1 0 2 1].

    All keys are less than `max_key`.
    """
    if max_key <= 2**16:
        key = key.astype(np.uint16)  # Small integers sort several times as fast.
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    new = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(key)])
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - np.repeat(new, np.diff(new, append=len(key)))
    return out
