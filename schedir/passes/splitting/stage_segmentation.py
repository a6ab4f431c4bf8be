"""Split stages into segments between collectives, and microbatches into chunks.

A segment is the compute of a stage between two collectives of the tensor-parallel or the
expert-parallel group. Segments are stages of the program. So checks, costs, recomputation, offload
and charts work for segments as for stages. The collectives between segments are instructions, and
other compute can run during a collective. T3 (arXiv 2401.16677) overlaps such collectives with
compute in hardware.

The chunks of a microbatch pass through each segment one after the other. The samples of a
microbatch are independent, so the next chunk can run during the collective of the previous chunk. A
chunk is a microbatch of the program with fewer samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from operator import index
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CostsError, ShapeError, UsageError, describe
from schedir.ir.cost.costs import PER_RANK_COSTS, STAGE_COSTS, Costs, select_ranks
from schedir.ir.cost.number_parsing import NON_NUMBER_TYPES, parse_integer
from schedir.ir.cost.per_stage_values import expand_by_stage, from_grid, redistribute_stages
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
    COMBINE,
    DISPATCH,
    ENTRY_COLLECTIVE,
    EP_LETTERS,
    EXIT_COLLECTIVE,
    NO_COLLECTIVE,
    SEGMENT_LETTERS,
    STAGE_END,
    TP_LETTERS,
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
_BACKWARD_ORDER_OPS: Final = (*BACKWARD_OPS, *BACKWARD_WEIGHT_OPS)  # run the last segment first

# ---------------------------------------------------------------- the option


def parse_segment_letters(segments: SegmentSpec, shape: PipelineShape) -> tuple[str, ...]:
    """Return the letters between the segments of each stage (`ir/pipeline/stage_segments.py`).

    Args:
        segments: The number of segments of each stage, or the letters between these segments.
            `segments` can also be a list with a number or letters for each stage, or the text of
            the option. For a number, the letters f and g alternate, as in the layers of
            Megatron-LM: 5 gives "fgfg".
        shape: The pipeline shape.

    Returns:
        The letters of each stage; empty for a stage with one segment.

    Raises:
        UsageError: `segments` has a wrong form, or not one entry per stage.

    Example:
        >>> parse_segment_letters(3, PipelineShape(ranks=2, microbatches=2))
        ('fg', 'fg')
        >>> parse_segment_letters([1, "g."], PipelineShape(ranks=2, microbatches=2))
        ('', 'g.')
    """
    if isinstance(segments, str):
        segments = _parse_option(segments)
    is_list = isinstance(segments, Iterable) and not isinstance(segments, (str, *NON_NUMBER_TYPES))
    entries = [*segments] if is_list and isinstance(segments, Iterable) else [segments]
    if is_list and len(entries) != shape.stages:
        raise UsageError(
            f"stage_segments has {len(entries)} entries, but the program has {shape.stages} stages",
            fields=["stage_segments"],
        )
    letters = [_parse_letters(entry) for entry in entries]
    return tuple(letters if is_list else letters * shape.stages)


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
    """Parse `5`, `fgfg`, or a list with one of these per stage: `5,fgfg,1`."""
    try:
        entries = [
            entry if entry and {*entry} <= {*SEGMENT_LETTERS} else parse_integer(entry)
            for entry in text.split(",")
        ]
    except ValueError:
        raise ValueError(f"{_REQUIREMENT}, not {describe(text)}") from None
    return entries[0] if len(entries) == 1 else tuple(entries)


def _parse_option(text: str) -> Any:
    try:
        return _parse_segments(text)
    except ValueError as error:
        raise UsageError(f"stage_segments {error}", fields=["stage_segments"]) from None


_REQUIREMENT: Final = (
    "must be a number of segments, the collectives between them like fgfg or fgdc (. for none), or "
    "one of these per stage"
)
SEGMENTS_TYPE: Final = FieldType(
    _REQUIREMENT, _parse_segments, int | str | tuple[int | str, ...], metavar="SEGMENTS",
    argument_type="SegmentSpec",
)  # fmt: skip


def count_segments(segments: SegmentSpec, shape: PipelineShape) -> tuple[int, ...]:
    """Return the number of segments of each stage.

    Args:
        segments: See `parse_segment_letters`.
        shape: The pipeline shape.

    Raises:
        UsageError: See `parse_segment_letters`.
    """
    return tuple(len(letters) + 1 for letters in parse_segment_letters(segments, shape))


def divide_over_stages(segments: SegmentSpec, ranks: int, stages: int) -> tuple[str | int, ...]:
    """Divide the segments of each rank equally over its stages.

    Args:
        segments: The segments of each rank, in the form for a model with one stage per rank. See
            `parse_segment_letters`.
        ranks: Number of ranks.
        stages: Number of stages of the model.

    Returns:
        For each stage, the letters between its segments, or 1 if it has one segment.

    Raises:
        UsageError: See `parse_segment_letters`.
        ShapeError: The stages of a rank cannot share its letters equally.

    Example:
        >>> divide_over_stages(9, 2, 4), divide_over_stages(5, 2, 2)
        (('fgfg', 'fgfg', 'fgfg', 'fgfg'), ('fgfg', 'fgfg'))
    """
    stage_segments, v = list[str | int](), stages // ranks
    for rank_letters in parse_segment_letters(segments, PipelineShape(ranks, 1)):
        stage_letters = rank_letters[: len(rank_letters) // v]
        if stage_letters * v != rank_letters or ranks * v != stages:
            raise ShapeError(
                f"stage_segments gives each rank the collectives {describe(rank_letters)}, which "
                f"do not divide equally over its {v} stages",
                hint=f"stage_segments={2 * v + 1} gives each of the {v} stages 3 segments",
                fields=["stage_segments", "stages_per_rank"],
            )
        stage_segments += [stage_letters or 1] * v
    return tuple(stage_segments)


# ---------------------------------------------------------------- the draft


def split_stages(program: Program, segments: SegmentSpec = 1, chunks: int = 1) -> Program:
    """Split each stage of a draft into segments, and each microbatch into chunks.

    Forwards run the first segment first, and backwards the last segment first. The segments
    of two joined computes alternate. With tp=1, there are no tensor-parallel collectives between
    segments. With ep=1, there are no expert-parallel collectives.

    Attributes of stages become attributes of segments: frozen stages, tied weights, skips and the
    weight delay. A skip leads from the last segment of its source stage to the first segment of its
    target stage. A tied weight of the first stage is in its first segment, and a tied weight of the
    last stage is in its last segment.

    With chunks, microbatch m becomes the microbatches m * `chunks` to (m + 1) * `chunks` - 1, if
    `sequence_chunks` is 1. A segment runs all chunks in order before the next segment runs.

    Args:
        program: The draft.
        segments: See `parse_segment_letters`. The default is one segment per stage.
        chunks: Number of chunks of each microbatch.

    Raises:
        UsageError: The stages are split already. Or a stage that is split has a tied weight, and is
            not the first or the last stage. Or the chunks cannot be divided over stage replicas in
            the same shares as the microbatches.
    """
    letters = parse_segment_letters(segments, program.shape)
    chunks = CHUNK_COUNT_TYPE.resolve("microbatch_chunks", chunks, None)
    segment_counts = np.array([len(stage_letters) + 1 for stage_letters in letters])
    if (segment_counts == 1).all() and chunks == 1:
        return program
    if program.segment_boundaries and (segment_counts > 1).any():
        raise UsageError(
            "stage_segments cannot be applied: the program has segments already",
            fields=["stage_segments"],
        )
    first_segments = np.concatenate([[0], np.cumsum(segment_counts)])
    unused_letters = TP_LETTERS if program.tp == 1 else ""
    unused_letters += EP_LETTERS if program.ep == 1 else ""
    unused_to_none = str.maketrans(unused_letters, NO_COLLECTIVE * len(unused_letters))
    boundaries = STAGE_END.join(letters).translate(unused_to_none)
    sequence_chunks = program.shape.sequence_chunks
    return replace(
        program,
        shape=split_shape(program.shape, segment_counts, chunks),
        streams=tuple(
            Stream(_split_stream(stream, sequence_chunks, segment_counts, first_segments, chunks))
            for stream in program.streams
        ),
        frozen_stages=int(first_segments[program.frozen_stages]),
        skips=tuple(
            (int(first_segments[s + 1]) - 1, int(first_segments[t])) for s, t in program.skips
        ),
        tied_weights=tuple(
            tuple(_find_tied_segment(s, segment_counts, first_segments, stages) for s in stages)
            for stages in program.tied_weights
        ),
        segment_boundaries=program.segment_boundaries or boundaries,
        chunks_per_microbatch=program.chunks_per_microbatch * chunks,
        message_order={},
    )


def split_like(program: Program, reference: Program) -> Program:
    """Split a draft into the same segments and chunks as another program.

    Args:
        program: The draft, without segments and chunks.
        reference: The program with the segments and chunks.

    Raises:
        ShapeError: `reference` has segments, and its number of stages before the split differs from
            the number of stages of `program`.
    """
    letters = split_letters_by_stage(reference.segment_boundaries, program.shape.stages)
    if len(letters) != program.shape.stages:
        raise ShapeError(
            f"stage segments of {len(letters)} stages cannot be converted to "
            f"{program.shape.stages} stages"
        )
    segments = [stage_letters or 1 for stage_letters in letters]
    draft = replace(program, tp=reference.tp, dp=reference.dp, ep=reference.ep)
    return split_stages(draft, segments, reference.chunks_per_microbatch)


def _split_stream(
    stream: Stream, sequence_chunks: int, segment_counts: Words, first_segments: Words, chunks: int
) -> Words:
    """Replace each word of a Stream by the words of its segments and chunks."""
    words, stage = stream.words, stream.stage.astype(np.int64)
    copies = segment_counts[stage] * chunks
    source = np.repeat(np.arange(len(words)), copies)
    copy = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    segment_index, chunk = np.divmod(copy, chunks)
    is_joined = words & JOINED_BIT != 0
    pair_start = np.arange(len(words)) - is_joined  # index of the first instruction of a pair
    order = np.lexsort((is_joined[source], chunk, segment_index, pair_start[source]))
    source, segment_index, chunk = source[order], segment_index[order], chunk[order]
    is_backward = is_op(words >> OP_SHIFT & 0xFF, _BACKWARD_ORDER_OPS)[source]
    last_index = segment_counts[stage[source]] - 1
    segment_index = np.where(is_backward, last_index - segment_index, segment_index)
    segment = first_segments[stage[source]] + segment_index
    sequence, sequence_chunk = np.divmod(stream.mb.astype(np.int64)[source], sequence_chunks)
    mb = (sequence * chunks + chunk) * sequence_chunks + sequence_chunk
    new_words: Words = words[source] & ~(JOINED_BIT | ADDRESS_MASK) | segment << STAGE_SHIFT | mb
    return new_words


def split_shape(shape: PipelineShape, segment_counts: Words, chunks: int = 1) -> PipelineShape:
    """Return the shape of a program whose stages and microbatches are split.

    Args:
        shape: The shape before the split.
        segment_counts: The number of segments of each stage.
        chunks: Number of chunks of each microbatch.

    Raises:
        UsageError: The chunks cannot be divided over stage replicas in the same shares as the
            microbatches.
    """
    row_offsets, microbatches = shape.microbatch_row_offsets, shape.microbatches * chunks
    if (segment_counts > 1).any():
        rows = tuple(tuple(np.repeat(row, segment_counts).tolist()) for row in shape.replica_ranks)
        weight_delay = shape.weight_delay
        if isinstance(weight_delay, tuple):
            weight_delay = tuple(np.repeat(weight_delay, segment_counts).tolist())
        placement = rows if len(rows) > 1 else rows[0]
        shape = shape.with_stage_ranks(placement, weight_delay=weight_delay)
    shape = replace(shape, microbatches=microbatches)
    if shape.microbatch_row_offsets != tuple(chunks * end for end in row_offsets):
        raise UsageError(
            "the replicas of a stage have different numbers of microbatches: the shares of "
            f"{microbatches // chunks} microbatches end at {describe([*row_offsets[1:]])}, but the "
            f"shares of {microbatches} chunks at {describe([*shape.microbatch_row_offsets[1:]])}",
            hint="use the same number of microbatches for each replica",
            fields=["microbatch_chunks", "microbatches"],
        )
    return shape


def _find_tied_segment(
    stage: int, segment_counts: Words, first_segments: Words, stages: tuple[int, ...]
) -> int:
    """Return the segment that has the tied weight of a stage."""
    if stage not in (0, len(segment_counts) - 1) and segment_counts[stage] > 1:
        raise UsageError(
            f"stages {', '.join(map(str, stages))} share a weight, but it is unknown which "
            f"segment of stage {stage} has it",
            hint="do not split that stage: stage_segments=(5, 1, 5); or write a schedule of "
            "segments, with segment_boundaries",
            fields=["stage_segments", "tied_weights"],
        )
    return int(first_segments[stage + 1] - 1 if stage else first_segments[0])


# ---------------------------------------------------------------- costs of segments

# Costs and sizes of a stage that are divided among its segments.  For all other costs and sizes,
# each segment has the value of the stage.
SHARED_FIELDS: Final = (
    *STAGE_COSTS,
    "saved",
    "deferred_wgrad",
    "saved_and_deferred",
    "model_states",
    "version",
    *STATIC_SIZES,
)
CostsOrSizes = TypeVar("CostsOrSizes", Costs, Sizes)


def redistribute_values(values: CostsOrSizes, old_stages: int, new_stages: int) -> CostsOrSizes:
    """Convert the costs or sizes of a model's stages to another number of stages.

    Args:
        values: The costs or sizes of the stages.
        old_stages: The number of these stages.
        new_stages: The new number of stages.

    Example:
        >>> sizes = redistribute_values(Sizes(saved=8, activation=2), 4, 8)
        >>> sizes.saved, sizes.activation
        (4.0, 2.0)
    """
    shared = {k: v for k in SHARED_FIELDS if (v := getattr(values, k, None)) is not None}
    return replace(
        values, **{k: redistribute_stages(v, old_stages, new_stages) for k, v in shared.items()}
    )


def split_costs(
    values: CostsOrSizes,
    segments: SegmentSpec,
    shape: PipelineShape,
    shares: Iterable[float] | None = None,
    chunks: int = 1,
) -> CostsOrSizes:
    """Convert costs or sizes of stages to those of segments and microbatch chunks.

    A segment has its share of the compute, the saved activations and the parameters of its stage.
    Values and messages between segments are as large as between stages. Replace their sizes and
    costs if segments pass more data. Examples are a residual stream in addition to the reduced
    value, and all tokens instead of one rank's tokens with sequence parallelism.

    A chunk has an equal part of all times and bytes of a microbatch. So the result assumes that the
    time of products, messages and collectives is proportional to the number of rows of their
    tensors. The result does not include the overhead of chunks.

    Args:
        values: The costs or sizes of the stages.
        segments: See `parse_segment_letters`.
        shape: The pipeline shape of the stages.
        shares: The relative shares of the segments, at least 0. Give one number for each segment of
            a stage, for all stages alike, or one number for each segment of the model. The default
            is equal shares.
        chunks: Number of chunks of each microbatch.

    Raises:
        CostsError: `values` are costs of a different number of stages than `shape` has.
        UsageError: `values` are sizes of a different number of stages than `shape` has. Or the
            number of shares is wrong, a share is negative, or the shares of a stage are all 0.

    Example:
        >>> from schedir import Costs, PipelineShape, split_costs
        >>> split_costs(Costs(F=8, B=16, send=1, tp_reduce=0.5), "fg", PipelineShape(2, 4),
        ...     shares=(1, 6, 1)).specified["F"]
        (1.0, 6.0, 1.0, 1.0, 6.0, 1.0)
        >>> split_costs(Costs(F=8, tp_reduce=0.5), "g", PipelineShape(2, 4), chunks=4).specified
        {'F': 1.0, 'tp_reduce': 0.125}
    """
    segment_counts = count_segments(segments, shape)
    chunks = CHUNK_COUNT_TYPE.resolve("microbatch_chunks", chunks, None)
    shares_by_stage = _divide_shares(shares, segment_counts)
    segment_shares = np.concatenate([part / part.sum() for part in shares_by_stage])
    s = shape.sequence_chunks
    split_values: dict[str, Any] = {}
    for f in fields(values):
        if (value := getattr(values, f.name)) is None:
            continue
        if f.name in PER_RANK_COSTS:
            split_values[f.name] = select_ranks(f.name, value, shape)
            continue
        error = CostsError if isinstance(values, Costs) else UsageError
        stage_values = expand_by_stage(f.name, value, shape.stages, error)
        rows = np.repeat(stage_values, segment_counts, axis=0)
        rows = rows * segment_shares[:, None] if f.name in SHARED_FIELDS else rows
        if f.name in PER_CHUNK_FIELDS:
            mb = np.arange(width * chunks if (width := rows.shape[1]) > 1 else 1)
            rows = rows[:, mb // (s * chunks) * s + mb % s] / chunks
        split_values[f.name] = from_grid(rows[:1] if (rows == rows[:1]).all() else rows)
    return replace(values, **split_values)


# Costs and sizes per microbatch.  A chunk has the value of its microbatch, divided by the number of
# chunks.
PER_CHUNK_FIELDS: Final = {
    *MICROBATCH_SIZES,
    "FB",
    *(row.cost for row in INSTRUCTIONS if row.scope is Scope.MICROBATCH),
}


def _divide_shares(
    shares: Iterable[float] | None, segment_counts: tuple[int, ...]
) -> list[NDArray[np.float64]]:
    """Return an array for each stage with the shares of its segments."""
    if shares is None:
        return [np.ones(count) for count in segment_counts]
    share_values = np.array([*shares], float)
    if not (share_values >= 0).all():
        raise UsageError(
            f"shares must not be negative, not {share_values.min():g}", fields=["shares"]
        )
    ends = np.cumsum(segment_counts)
    if len(share_values) == ends[-1]:
        shares_by_stage = np.split(share_values, ends[:-1])
    elif {*segment_counts} == {len(share_values)}:
        shares_by_stage = [share_values] * len(segment_counts)
    else:
        raise UsageError(
            f"shares has {len(share_values)} numbers, but the stages have "
            f"{describe([*segment_counts])} segments",
            fields=["shares", "stage_segments"],
        )
    if any(not stage_shares.sum() > 0 for stage_shares in shares_by_stage):
        raise UsageError("the shares of a stage's segments must not all be 0", fields=["shares"])
    return shares_by_stage


# ---------------------------------------------------------------- collectives between segments

# Pairs of a collective in forwards and a collective in backwards, each with the letter of its
# boundaries.
_COLLECTIVES: Final = (
    ((Opcode.TPReduceAct, EXIT_COLLECTIVE), (Opcode.TPReduceGrad, ENTRY_COLLECTIVE)),
    ((Opcode.Dispatch, DISPATCH), (Opcode.DispatchGrad, DISPATCH)),
    ((Opcode.Combine, COMBINE), (Opcode.CombineGrad, COMBINE)),
)
_SEQUENCE_PARALLEL_GATHERS: Final = (
    ((Opcode.TPGatherAct, ENTRY_COLLECTIVE), (Opcode.TPGatherGrad, EXIT_COLLECTIVE)),
)


def insert_collectives(program: Program) -> Program:
    """Insert the collectives between segments, each after the compute that makes its input.

    The collectives of the tensor-parallel group are reduce-scatters and all-gathers with sequence
    parallelism, and all-reduces without it. The collectives of the expert-parallel group are
    all-to-alls.

    Args:
        program: A program with segments (`segment_boundaries`).
    """
    for op, is_producer, shift in _list_collectives(program):
        address = program.words & ADDRESS_MASK
        compute_ops = FORWARD_OPS if shift > 0 else BACKWARD_OPS
        makes_input = is_op(program.op, compute_ops) & is_producer[address >> STAGE_SHIFT]
        positions = np.flatnonzero(makes_input)
        words = address[positions] + (shift << STAGE_SHIFT) | int(op) << OP_SHIFT
        program = insert_after(program, positions, words)
    return program


def _list_collectives(program: Program) -> Iterator[tuple[Opcode, NDArray[np.bool_], int]]:
    """Yield the opcode, the mask of producers, and the stage offset of each collective.

    The mask has the shape (stages,). A collective belongs to the stage that uses its result. The
    number of this stage is the stage of the producer plus the offset. With sequence parallelism,
    each rank has only its part of the sequence after a reduction at a boundary. So the values that
    cross this boundary in the other direction are gathered.
    """
    stages = program.shape.stages
    # The first trained stage computes no gradient of its input.
    has_input_grad = np.arange(stages) > program.frozen_stages
    letters = np.array([*(program.segment_boundaries or STAGE_END * (stages - 1)), STAGE_END])
    pairs = _COLLECTIVES + (_SEQUENCE_PARALLEL_GATHERS if program.sequence_parallel else ())
    for (forward_op, forward_letter), (backward_op, backward_letter) in pairs:
        yield forward_op, letters == forward_letter, 1
        is_producer = np.roll(letters == backward_letter, 1)
        yield backward_op, is_producer & has_input_grad & program.has_backward, -1


def _list_expected(program: Program, present: PresenceQuery) -> Iterator[ExpectedInstructions]:
    for op, is_producer, shift in _list_collectives(program):
        required = np.repeat(np.roll(is_producer, shift), program.shape.microbatches)
        yield ExpectedInstructions(op, required, "segment_boundaries has no such collective there")


def _collect_split_options(options: Options) -> dict[str, Any]:
    """Return the options for segments and chunks that are set, as arguments of `split_stages`."""
    segment_options = {
        "segments": options.extra_options.get("stage_segments"),
        "chunks": options.extra_options.get("microbatch_chunks"),
    }
    return {name: value for name, value in segment_options.items() if value is not None}


PASSES: Final = (
    Pass(
        "stage_segments",
        "draft",
        lambda program, options: split_stages(program, **_collect_split_options(options)),
        should_run=lambda program, options: bool(_collect_split_options(options)),
        option_names=("stage_segments", "microbatch_chunks"),
        option_types={"stage_segments": SEGMENTS_TYPE, "microbatch_chunks": CHUNK_COUNT_TYPE},
        option_descriptions={
            "stage_segments": "split each stage into segments at its tensor-parallel collectives: "
            "a number of segments (5), a number per stage (5,9,5), or the letters of the "
            "collectives (fgfg, with experts fgdc). For compare and recommend, give the segments "
            "of a rank instead of a stage",
            "microbatch_chunks": "split each microbatch into this number of chunks; one chunk "
            "computes during the collective of another",
        },
        order=-2,
    ),
    Pass(
        "segment_collectives",
        "messages",
        lambda program, options: insert_collectives(program),
        should_run=lambda program, options: bool(program.segment_boundaries),
        list_expected=_list_expected,
        order=2,
    ),
)
