"""Split each stage into segments, and join them by tensor-parallel collectives.

A microbatch becomes several, its chunks, which go through each piece one after the other.

What a stage computes lies between two collectives of its tensor-parallel group.  As pieces these
are stages like any other, so all that is known of stages is known of them: they are checked,
priced, recomputed, offloaded and drawn, and their collectives stand between them as instructions,
in whose time something else can run (T3, arXiv 2401.16677, does that in hardware).  What can
always run is the next chunk: the samples of a microbatch do not see each other, so a chunk of a
product along tokens is a microbatch of fewer samples, and no other kind of address is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from operator import index
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError, ShapeError, UsageError, describe
from schedir.ir.cost.costs import STAGE_COSTS, Costs
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES, parse_integer
from schedir.ir.cost.per_stage_values import expand_by_stage, from_grid
from schedir.ir.cost.sizes import MICROBATCH_SIZES, STATIC_SIZES, Sizes
from schedir.ir.isa.instructions import (
    BACKWARD_OPS,
    BACKWARD_WEIGHT_OPS,
    FORWARD_OPS,
    INSTRUCTIONS,
    Opcode,
    Scope,
)
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES, PipelineShape
from schedir.ir.pipeline.program_attributes import CHUNK_COUNT_TYPE
from schedir.ir.pipeline.stage_segments import (
    ENTRY_COLLECTIVE,
    EXIT_COLLECTIVE,
    NO_COLLECTIVE,
    SEGMENT_LETTERS,
    STAGE_END,
    split_letters_by_stage,
)
from schedir.ir.program import (
    ADDRESS_MASK,
    JOINED_BIT,
    OP_SHIFT,
    STAGE_SHIFT,
    Program,
    Stream,
    Words,
    is_op,
)
from schedir.passes.insertion import insert_after
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, PresenceQuery

SegmentSpec = int | str | Iterable["int | str"]
_BACKWARD_ORDER_OPS: Final = (*BACKWARD_OPS, *BACKWARD_WEIGHT_OPS)  # from the last piece on

# ---------------------------------------------------------------- what is said


def parse_segment_letters(segments: SegmentSpec, shape: PipelineShape) -> tuple[str, ...]:
    """The letters between the pieces of each stage (`ir/pipeline/stage_segments.py`): of as many as
    `cut` says.

    A number of pieces is that of layers as in Megatron-LM, whose ranks enter and leave a region in
    turn: "fgfg" for 5.  Raises UsageError for what says no pieces.

    >>> parse_segment_letters(3, PipelineShape(ranks=2, microbatches=2))
    ('fg', 'fg')
    >>> parse_segment_letters([1, "g."], PipelineShape(ranks=2, microbatches=2))
    ('', 'g.')
    """
    if isinstance(segments, str):
        segments = _parse_option(segments)
    several = isinstance(segments, Iterable) and not isinstance(segments, (str, *NON_NUMBER_TYPES))
    each = [*segments] if several and isinstance(segments, Iterable) else [segments]
    if several and len(each) != shape.stages:
        raise UsageError(
            f"stage_segments has {len(each)} entries for {shape.stages} stages",
            fields=["stage_segments"],
        )
    found = [_parse_letters(one) for one in each]
    return tuple(found if several else found * shape.stages)


def _parse_letters(value: object) -> str:
    if isinstance(value, str) and value and {*value} <= {*SEGMENT_LETTERS}:
        return value
    try:
        if isinstance(value, NON_NUMBER_TYPES) or not 1 <= (number := index(value)) <= MAX_STAGES:  # type: ignore[arg-type]
            raise TypeError
    except TypeError:
        raise UsageError(
            f"stage_segments {_REQUIREMENT}, not {describe(value)}", fields=["stage_segments"]
        ) from None
    return ((ENTRY_COLLECTIVE + EXIT_COLLECTIVE) * number)[: number - 1]


def _parse_segments(text: str) -> Any:
    """`5`, `fgfg`, or one of these for each stage: `5,fgfg,1`."""
    try:
        each = [
            one if one and {*one} <= {*SEGMENT_LETTERS} else parse_integer(one)
            for one in text.split(",")
        ]
    except ValueError:
        raise ValueError(f"{_REQUIREMENT}, not {describe(text)}") from None
    return each[0] if len(each) == 1 else tuple(each)


def _parse_option(text: str) -> Any:
    try:
        return _parse_segments(text)
    except ValueError as error:
        raise UsageError(f"stage_segments {error}", fields=["stage_segments"]) from None


_REQUIREMENT: Final = (
    "is how many pieces a stage has, or the letters between them as fgfg, with . where nobody "
    "meets, or one of these per stage"
)
SEGMENTS_TYPE: Final = FieldType(
    _REQUIREMENT, _parse_segments, int | str | tuple[int | str, ...], metavar="PIECES"
)


def count_segments(segments: SegmentSpec, shape: PipelineShape) -> tuple[int, ...]:
    """How many pieces each stage of a shape has."""
    return tuple(len(letters) + 1 for letters in parse_segment_letters(segments, shape))


def divide_over_stages(segments: SegmentSpec, ranks: int, stages: int) -> tuple[str | int, ...]:
    """The cut of each of so many stages of a model that `segments` cuts for one stage on each rank:
    of several, as many as there are on a rank share the letters of one alike.

    Raises ShapeError for letters that so many stages cannot share.

    >>> divide_over_stages(9, 2, 4), divide_over_stages(5, 2, 2)
    (('fgfg', 'fgfg', 'fgfg', 'fgfg'), ('fgfg', 'fgfg'))
    """
    found, v = list[str | int](), stages // ranks
    for own in parse_segment_letters(segments, PipelineShape(ranks, 1)):
        one = own[: len(own) // v]
        if one * v != own or ranks * v != stages:
            raise ShapeError(
                f"ranks meet at {describe(own)} in what a rank has of the model, which its {v} "
                "stages "
                "cannot share alike",
                hint=f"stage_segments={2 * v + 1}, for a rank with one stage",
                fields=["stage_segments", "stages_per_rank"],
            )
        found += [one or 1] * v
    return tuple(found)


# ---------------------------------------------------------------- the draft


def split_stages(program: Program, segments: SegmentSpec = 1, chunks: int = 1) -> Program:
    """A draft whose stages are cut in pieces: forward from the first on, backward from the last.

    Two computes that ran together are woven, piece by piece.  With one tensor-parallel rank there
    are pieces, and nobody meets.  What is frozen, tied, skipped and late is so of pieces: a skip
    leads from the last piece of a stage to the first of another, and of a tied weight the first
    stage of all has it in its first piece, the last in its last.

    With `chunks` each microbatch is as many, microbatch m of a program without segments m * chunks
    and those behind it; each piece takes all of them, in turn, and then the next piece does.

    Raises UsageError for a cut of what is cut, of other stages that are tied, and where holders of
    a stage would share the microbatches in another way.
    """
    letters, chunks = (
        parse_segment_letters(segments, program.shape),
        CHUNK_COUNT_TYPE.resolve("microbatch_chunks", chunks, None),
    )
    number = np.array([len(own) + 1 for own in letters])
    if (number == 1).all() and chunks == 1:
        return program
    if program.segment_boundaries and (number > 1).any():
        raise UsageError(
            "the program is of pieces already, and says where they meet", fields=["stage_segments"]
        )
    first, alone = (
        np.concatenate([[0], np.cumsum(number)]),
        [NO_COLLECTIVE * len(own) for own in letters],
    )
    return replace(
        program,
        shape=_split_shape(program.shape, number, chunks),
        streams=tuple(
            Stream(_split_stream(own, program.shape.sequence_chunks, number, first, chunks))
            for own in program.streams
        ),
        frozen_stages=int(first[program.frozen_stages]),
        skips=tuple((int(first[s + 1]) - 1, int(first[t])) for s, t in program.skips),
        tied_weights=tuple(
            tuple(_find_tied_segment(s, number, first, stages) for s in stages)
            for stages in program.tied_weights
        ),
        segment_boundaries=program.segment_boundaries
        or STAGE_END.join(letters if program.tp > 1 else alone),
        chunks_per_microbatch=program.chunks_per_microbatch * chunks,
        message_order={},
    )


def split_like(program: Program, reference: Program) -> Program:
    """A draft of whole stages and microbatches, cut as another program's are.

    Raises ShapeError for other stages than that one has, where these are cut.
    """
    letters = split_letters_by_stage(reference.segment_boundaries, program.shape.stages)
    if len(letters) != program.shape.stages:
        raise ShapeError("of a model that is cut otherwise it is not known where ranks meet")
    given = [own or 1 for own in letters]
    return split_stages(replace(program, tp=reference.tp), given, reference.chunks_per_microbatch)


def _split_stream(
    stream: Stream, sequence_chunks: int, segment_counts: Words, first_segments: Words, chunks: int
) -> Words:
    """The words of a Stream, each as those of its pieces, and of each of these its chunks'."""
    words, stage = stream.words, stream.stage.astype(np.int64)
    times = segment_counts[stage] * chunks
    at = np.repeat(np.arange(len(words)), times)
    turn, chunk = np.divmod(np.arange(len(at)) - np.repeat(np.cumsum(times) - times, times), chunks)
    joined = words & JOINED_BIT != 0
    begin = np.arange(len(words)) - joined  # of a pair the first
    order = np.lexsort((joined[at], chunk, turn, begin[at]))
    at, turn, chunk = at[order], turn[order], chunk[order]
    down = is_op(words >> OP_SHIFT & 0xFF, _BACKWARD_ORDER_OPS)[at]
    piece = first_segments[stage[at]] + np.where(down, segment_counts[stage[at]] - 1 - turn, turn)
    sequence, segment = np.divmod(stream.mb.astype(np.int64)[at], sequence_chunks)
    mb = (sequence * chunks + chunk) * sequence_chunks + segment
    found: Words = words[at] & ~(JOINED_BIT | ADDRESS_MASK) | piece << STAGE_SHIFT | mb
    return found


def _split_shape(shape: PipelineShape, segment_counts: Words, chunks: int) -> PipelineShape:
    parts, more = shape.microbatch_row_offsets, shape.microbatches * chunks
    if (segment_counts > 1).any():
        rows = tuple(tuple(np.repeat(row, segment_counts).tolist()) for row in shape.replica_ranks)
        delay = shape.weight_delay
        if isinstance(delay, tuple):
            delay = tuple(np.repeat(delay, segment_counts).tolist())
        placement = rows if len(rows) > 1 else rows[0]
        shape = replace(shape, placement=placement, stages_per_rank=1, weight_delay=delay)
    shape = replace(shape, microbatches=more)
    if shape.microbatch_row_offsets != tuple(chunks * end for end in parts):
        raise UsageError(
            f"holders of a stage share {more // chunks} microbatches as "
            f"{describe([*parts[1:]])}, and "
            f"{more} chunks as {describe([*shape.microbatch_row_offsets[1:]])}",
            hint="as many microbatches for each holder",
            fields=["microbatch_chunks", "microbatches"],
        )
    return shape


def _find_tied_segment(
    stage: int, segment_counts: Words, first_segments: Words, stages: tuple[int, ...]
) -> int:
    """The piece of a stage that has its tied weight."""
    if stage not in (0, len(segment_counts) - 1) and segment_counts[stage] > 1:
        raise UsageError(
            f"stages {', '.join(map(str, stages))} share a weight, and it is not known which "
            f"segment of stage {stage} has it",
            hint="do not split that stage: stage_segments=(5, 1, 5); or write a schedule of "
            "segments, with segment_boundaries",
            fields=["stage_segments", "tied_weights"],
        )
    return int(first_segments[stage + 1] - 1 if stage else first_segments[0])


# ---------------------------------------------------------------- what pieces cost

# Costs and sizes of which each piece of a stage has its share; of all others as much as the stage.
SHARED_FIELDS: Final = (
    *STAGE_COSTS,
    "saved",
    "deferred_wgrad",
    "saved_and_deferred",
    "model_states",
    "version",
    *STATIC_SIZES,
)
_CostsOrSizes = TypeVar("_CostsOrSizes", Costs, Sizes)


def split_costs(
    values: _CostsOrSizes,
    segments: SegmentSpec,
    shape: PipelineShape,
    shares: Iterable[float] | None = None,
    chunks: int = 1,
) -> _CostsOrSizes:
    """Costs or Sizes of pieces, of those of the whole stages of a shape.

    `shares` says what part of its stage each piece is, as any numbers, one per piece of a stage, or
    per piece of all stages; equal parts unless told.  So shared out is what a stage computes, saves
    and holds.  What passes between stages, and its message, is as large between pieces: tell it
    anew where pieces hand over more, as a residual stream beside what is summed, or all tokens
    beside a rank's own where ranks share the sequence.  Of `chunks` each
    has an equal part of all that is of a microbatch, as if a product of fewer rows took less time
    by that much, and a message or a sum of fewer bytes, too: what a chunk costs besides is to be
    measured.

    Raises UsageError for another number of shares, or one that is negative.

    >>> from schedir import Costs, PipelineShape, split_costs
    >>> split_costs(Costs(F=8, B=16, send=1, tp_reduce=0.5), "fg", PipelineShape(2, 4),
    ...     shares=(1, 6, 1)).specified["F"]
    (1.0, 6.0, 1.0, 1.0, 6.0, 1.0)
    >>> split_costs(Costs(F=8, tp_reduce=0.5), "g", PipelineShape(2, 4), chunks=4).specified
    {'F': 1.0, 'tp_reduce': 0.125}
    """
    number, chunks = (
        count_segments(segments, shape),
        CHUNK_COUNT_TYPE.resolve("microbatch_chunks", chunks, None),
    )
    part = np.concatenate([own / own.sum() for own in _divide_shares(shares, number)])
    s = shape.sequence_chunks
    found: dict[str, Any] = {}
    for f in fields(values):
        if (value := getattr(values, f.name)) is None:
            continue
        error = CostsError if isinstance(values, Costs) else UsageError
        told = expand_by_stage(f.name, value, shape.stages, error)
        rows = np.repeat(told, number, axis=0)
        rows = rows * part[:, None] if f.name in SHARED_FIELDS else rows
        if f.name in _PER_RANK_FIELDS:  # the k-th number is rank k's
            rows = np.concatenate([told, np.repeat(told[-1:], len(part) - len(told), axis=0)])
        if f.name in PER_CHUNK_FIELDS:
            mb = np.arange(width * chunks if (width := rows.shape[1]) > 1 else 1)
            rows = rows[:, mb // (s * chunks) * s + mb % s] / chunks
        found[f.name] = from_grid(rows[:1] if (rows == rows[:1]).all() else rows)
    return replace(values, **found)


# What there is once for each microbatch, and of chunks in parts.
PER_CHUNK_FIELDS: Final = {
    *MICROBATCH_SIZES,
    "FB",
    *(row.cost for row in INSTRUCTIONS if row.scope is Scope.MICROBATCH),
}
_PER_RANK_FIELDS: Final = {row.cost for row in INSTRUCTIONS if row.scope is Scope.RANK and row.cost}


def _divide_shares(
    shares: Iterable[float] | None, segment_counts: tuple[int, ...]
) -> list[NDArray[np.float64]]:
    """The shares of each stage."""
    if shares is None:
        return [np.ones(pieces) for pieces in segment_counts]
    told = np.array([*shares], float)
    if not (told >= 0).all():
        raise UsageError(f"shares are not negative, and one is {told.min():g}", fields=["shares"])
    ends = np.cumsum(segment_counts)
    if len(told) == ends[-1]:
        found = np.split(told, ends[:-1])
    elif {*segment_counts} == {len(told)}:
        found = [told] * len(segment_counts)
    else:
        raise UsageError(
            f"there are {len(told)} shares for stages of {describe([*segment_counts])} pieces",
            fields=["shares", "stage_segments"],
        )
    if any(not own.sum() > 0 for own in found):
        raise UsageError("the shares of a stage's pieces are all 0", fields=["shares"])
    return found


# ---------------------------------------------------------------- where they meet


def insert_collectives(program: Program) -> Program:
    """The program with the sums that `meets` asks for, each just behind what gives what it sums;
    where ranks share the sequence, with gathers likewise."""
    for op, makers, shift in _list_collectives(program):
        address, given = program.words & ADDRESS_MASK, FORWARD_OPS if shift > 0 else BACKWARD_OPS
        at = np.flatnonzero(is_op(program.op, given) & makers[address >> STAGE_SHIFT])
        program = insert_after(
            program, at, address[at] + (shift << STAGE_SHIFT) | int(op) << OP_SHIFT
        )
    return program


def _list_collectives(program: Program) -> Iterator[tuple[Opcode, NDArray[np.bool_], int]]:
    """Of each kind of sum, which stages give what is summed, shape (stages,), and how many stages
    farther is the one that takes it, whose sum it is.  Where ranks share the sequence a sum leaves
    each its part of it (reduce-scatter), and so what goes the other way there is gathered."""
    stages, trained = program.shape.stages, np.arange(program.shape.stages) > program.frozen_stages
    letters = np.array([*(program.segment_boundaries or STAGE_END * (stages - 1)), STAGE_END])
    yield Opcode.TPReduceAct, letters == EXIT_COLLECTIVE, 1
    yield (
        Opcode.TPReduceGrad,
        np.roll(letters == ENTRY_COLLECTIVE, 1) & trained & program.has_backward,
        -1,
    )
    if program.sequence_parallel:
        yield Opcode.TPGatherAct, letters == ENTRY_COLLECTIVE, 1
        yield (
            Opcode.TPGatherGrad,
            np.roll(letters == EXIT_COLLECTIVE, 1) & trained & program.has_backward,
            -1,
        )


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    for op, makers, shift in _list_collectives(program):
        there = np.repeat(np.roll(makers, shift), program.shape.microbatches)
        yield ExpectedInstructions(op, there, "the program does not say that ranks meet there")


def _collect_split_options(options: Options) -> dict[str, Any]:
    """What is said of pieces and chunks."""
    told = {
        "segments": options.extra_options.get("stage_segments"),
        "chunks": options.extra_options.get("microbatch_chunks"),
    }
    return {name: value for name, value in told.items() if value is not None}


PASSES: Final = (
    Pass(
        "stage_segments",
        "draft",
        lambda program, options: split_stages(program, **_collect_split_options(options)),
        should_run=lambda program, options: bool(_collect_split_options(options)),
        option_names=("stage_segments", "microbatch_chunks"),
        option_types={"stage_segments": SEGMENTS_TYPE, "microbatch_chunks": CHUNK_COUNT_TYPE},
        option_descriptions={
            "stage_segments": "split each stage into so many segments at its tensor-parallel "
            "collectives: 5, or 5,9,5 per stage, or the collectives between segments, fgfg; where "
            "schedules are compared, the segments of a rank's part of the model",
            "microbatch_chunks": "split each microbatch into so many chunks, which pass "
            "through each "
            "segment in turn: one computes during the collective of another",
        },
        order=-2,
    ),
    Pass(
        "sums",
        "messages",
        lambda program, options: insert_collectives(program),
        should_run=lambda program, options: bool(program.segment_boundaries),
        list_expected=_list_expected,
        order=2,
    ),
)
