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
from schedir.ir.cost.costs import OF_A_STAGE, Costs
from schedir.ir.cost.number_parsing import NO_NUMBERS, whole
from schedir.ir.cost.per_stage_values import by_stage, from_grid
from schedir.ir.cost.sizes import AT_REST, OF_A_MICROBATCH, Sizes
from schedir.ir.isa.instructions import BACKWARDS, FORWARDS, LATE, ROWS, Opcode, Scope
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import MAX_STAGES, PipelineShape
from schedir.ir.pipeline.program_attributes import CHUNKS
from schedir.ir.pipeline.stage_segments import ENDS, ENTERS, LEAVES, LETTERS, NOBODY, letters_in
from schedir.ir.program import ADDRESS, JOINED, OP, STAGE, Program, Stream, Words, is_op
from schedir.passes.insertion import behind
from schedir.passes.pass_types import ExpectedInstructions, Options, Pass, Present

Pieces = int | str | Iterable["int | str"]
_DOWN: Final = (*BACKWARDS, *LATE)  # from the last piece on

# ---------------------------------------------------------------- what is said


def letters_of(given: Pieces, shape: PipelineShape) -> tuple[str, ...]:
    """The letters between the pieces of each stage (`ir/pipeline/stage_segments.py`): of as many as
    `cut` says.

    A number of pieces is that of layers as in Megatron-LM, whose ranks enter and leave a region in
    turn: "fgfg" for 5.  Raises UsageError for what says no pieces.

    >>> letters_of(3, PipelineShape(ranks=2, microbatches=2)), letters_of([1, "g."],
    ...     PipelineShape(2, 2))
    (('fg', 'fg'), ('', 'g.'))
    """
    if isinstance(given, str):
        given = _read_here(given)
    several = isinstance(given, Iterable) and not isinstance(given, (str, *NO_NUMBERS))
    each = [*given] if several and isinstance(given, Iterable) else [given]
    if several and len(each) != shape.stages:
        raise UsageError(
            f"stage_segments has {len(each)} entries for {shape.stages} stages",
            fields=["stage_segments"],
        )
    found = [_letters(one) for one in each]
    return tuple(found if several else found * shape.stages)


def _letters(one: object) -> str:
    if isinstance(one, str) and one and {*one} <= {*LETTERS}:
        return one
    try:
        if isinstance(one, NO_NUMBERS) or not 1 <= (number := index(one)) <= MAX_STAGES:  # type: ignore[arg-type]
            raise TypeError
    except TypeError:
        raise UsageError(
            f"stage_segments {_TAKES}, not {describe(one)}", fields=["stage_segments"]
        ) from None
    return ((ENTERS + LEAVES) * number)[: number - 1]


def _read(text: str) -> Any:
    """`5`, `fgfg`, or one of these for each stage: `5,fgfg,1`."""
    try:
        each = [one if one and {*one} <= {*LETTERS} else whole(one) for one in text.split(",")]
    except ValueError:
        raise ValueError(f"{_TAKES}, not {describe(text)}") from None
    return each[0] if len(each) == 1 else tuple(each)


def _read_here(text: str) -> Any:
    try:
        return _read(text)
    except ValueError as error:
        raise UsageError(f"stage_segments {error}", fields=["stage_segments"]) from None


_TAKES: Final = (
    "is how many pieces a stage has, or the letters between them as fgfg, with . where nobody "
    "meets, or one of these per stage"
)
PIECES: Final = FieldType(_TAKES, _read, int | str | tuple[int | str, ...], metavar="PIECES")


def pieces_of(given: Pieces, shape: PipelineShape) -> tuple[int, ...]:
    """How many pieces each stage of a shape has."""
    return tuple(len(letters) + 1 for letters in letters_of(given, shape))


def over_stages(given: Pieces, ranks: int, stages: int) -> tuple[str | int, ...]:
    """The cut of each of so many stages of a model that `given` cuts for one stage on each rank: of
    several, as many as there are on a rank share the letters of one alike.

    Raises ShapeError for letters that so many stages cannot share.

    >>> over_stages(9, 2, 4), over_stages(5, 2, 2)
    (('fgfg', 'fgfg', 'fgfg', 'fgfg'), ('fgfg', 'fgfg'))
    """
    found, v = list[str | int](), stages // ranks
    for own in letters_of(given, PipelineShape(ranks, 1)):
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


def cut(program: Program, given: Pieces = 1, chunks: int = 1) -> Program:
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
        letters_of(given, program.shape),
        CHUNKS.settle("microbatch_chunks", chunks, None),
    )
    number = np.array([len(own) + 1 for own in letters])
    if (number == 1).all() and chunks == 1:
        return program
    if program.segment_boundaries and (number > 1).any():
        raise UsageError(
            "the program is of pieces already, and says where they meet", fields=["stage_segments"]
        )
    first, alone = np.concatenate([[0], np.cumsum(number)]), [NOBODY * len(own) for own in letters]
    return replace(
        program,
        shape=_plan(program.shape, number, chunks),
        streams=tuple(
            Stream(_pieces(own, program.shape.sequence_chunks, number, first, chunks))
            for own in program.streams
        ),
        frozen_stages=int(first[program.frozen_stages]),
        skips=tuple((int(first[s + 1]) - 1, int(first[t])) for s, t in program.skips),
        tied_weights=tuple(
            tuple(_tied(s, number, first, stages) for s in stages)
            for stages in program.tied_weights
        ),
        segment_boundaries=program.segment_boundaries
        or ENDS.join(letters if program.tp > 1 else alone),
        chunks_per_microbatch=program.chunks_per_microbatch * chunks,
        order={},
    )


def cut_like(program: Program, like: Program) -> Program:
    """A draft of whole stages and microbatches, cut as another program's are.

    Raises ShapeError for other stages than that one has, where these are cut.
    """
    letters = letters_in(like.segment_boundaries, program.shape.stages)
    if len(letters) != program.shape.stages:
        raise ShapeError("of a model that is cut otherwise it is not known where ranks meet")
    given = [own or 1 for own in letters]
    return cut(replace(program, tp=like.tp), given, like.chunks_per_microbatch)


def _pieces(own: Stream, segments: int, number: Words, first: Words, chunks: int) -> Words:
    """The words of a Stream, each as those of its pieces, and of each of these its chunks'."""
    words, stage = own.words, own.stage.astype(np.int64)
    times = number[stage] * chunks
    at = np.repeat(np.arange(len(words)), times)
    turn, chunk = np.divmod(np.arange(len(at)) - np.repeat(np.cumsum(times) - times, times), chunks)
    joined = words & JOINED != 0
    begin = np.arange(len(words)) - joined  # of a pair the first
    order = np.lexsort((joined[at], chunk, turn, begin[at]))
    at, turn, chunk = at[order], turn[order], chunk[order]
    down = is_op(words >> OP & 0xFF, _DOWN)[at]
    piece = first[stage[at]] + np.where(down, number[stage[at]] - 1 - turn, turn)
    sequence, segment = np.divmod(own.mb.astype(np.int64)[at], segments)
    mb = (sequence * chunks + chunk) * segments + segment
    found: Words = words[at] & ~(JOINED | ADDRESS) | piece << STAGE | mb
    return found


def _plan(shape: PipelineShape, number: Words, chunks: int) -> PipelineShape:
    parts, more = shape.parts, shape.microbatches * chunks
    if (number > 1).any():
        rows = tuple(tuple(np.repeat(row, number).tolist()) for row in shape.holders)
        delay = shape.weight_delay
        if isinstance(delay, tuple):
            delay = tuple(np.repeat(delay, number).tolist())
        placement = rows if len(rows) > 1 else rows[0]
        shape = replace(shape, placement=placement, stages_per_rank=1, weight_delay=delay)
    shape = replace(shape, microbatches=more)
    if shape.parts != tuple(chunks * end for end in parts):
        raise UsageError(
            f"holders of a stage share {more // chunks} microbatches as "
            f"{describe([*parts[1:]])}, and "
            f"{more} chunks as {describe([*shape.parts[1:]])}",
            hint="as many microbatches for each holder",
            fields=["microbatch_chunks", "microbatches"],
        )
    return shape


def _tied(stage: int, number: Words, first: Words, stages: tuple[int, ...]) -> int:
    """The piece of a stage that has its tied weight."""
    if stage not in (0, len(number) - 1) and number[stage] > 1:
        raise UsageError(
            f"stages {', '.join(map(str, stages))} share a weight, and it is not known which "
            f"segment of stage {stage} has it",
            hint="do not split that stage: stage_segments=(5, 1, 5); or write a schedule of "
            "segments, with segment_boundaries",
            fields=["stage_segments", "tied_weights"],
        )
    return int(first[stage + 1] - 1 if stage else first[0])


# ---------------------------------------------------------------- what pieces cost

# Costs and sizes of which each piece of a stage has its share; of all others as much as the stage.
SHARED: Final = (
    *OF_A_STAGE,
    "saved",
    "deferred_wgrad",
    "saved_and_deferred",
    "model_states",
    "version",
    *AT_REST,
)
_Each = TypeVar("_Each", Costs, Sizes)


def split_costs(
    each: _Each,
    cut: Pieces,
    shape: PipelineShape,
    shares: Iterable[float] | None = None,
    chunks: int = 1,
) -> _Each:
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
    ...     shares=(1, 6, 1)).told["F"]
    (1.0, 6.0, 1.0, 1.0, 6.0, 1.0)
    >>> split_costs(Costs(F=8, tp_reduce=0.5), "g", PipelineShape(2, 4), chunks=4).told
    {'F': 1.0, 'tp_reduce': 0.125}
    """
    number, chunks = pieces_of(cut, shape), CHUNKS.settle("microbatch_chunks", chunks, None)
    part = np.concatenate([own / own.sum() for own in _shares(shares, number)])
    s = shape.sequence_chunks
    found: dict[str, Any] = {}
    for f in fields(each):
        if (value := getattr(each, f.name)) is None:
            continue
        error = CostsError if isinstance(each, Costs) else UsageError
        told = by_stage(f.name, value, shape.stages, error)
        rows = np.repeat(told, number, axis=0)
        rows = rows * part[:, None] if f.name in SHARED else rows
        if f.name in _OF_A_RANK:  # the k-th number is rank k's
            rows = np.concatenate([told, np.repeat(told[-1:], len(part) - len(told), axis=0)])
        if f.name in OF_A_CHUNK:
            mb = np.arange(width * chunks if (width := rows.shape[1]) > 1 else 1)
            rows = rows[:, mb // (s * chunks) * s + mb % s] / chunks
        found[f.name] = from_grid(rows[:1] if (rows == rows[:1]).all() else rows)
    return replace(each, **found)


# What there is once for each microbatch, and of chunks in parts.
OF_A_CHUNK: Final = {
    *OF_A_MICROBATCH,
    "FB",
    *(row.cost for row in ROWS if row.per is Scope.MICROBATCH),
}
_OF_A_RANK: Final = {row.cost for row in ROWS if row.per is Scope.RANK and row.cost}


def _shares(shares: Iterable[float] | None, number: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """The shares of each stage."""
    if shares is None:
        return [np.ones(pieces) for pieces in number]
    told = np.array([*shares], float)
    if not (told >= 0).all():
        raise UsageError(f"shares are not negative, and one is {told.min():g}", fields=["shares"])
    ends = np.cumsum(number)
    if len(told) == ends[-1]:
        found = np.split(told, ends[:-1])
    elif {*number} == {len(told)}:
        found = [told] * len(number)
    else:
        raise UsageError(
            f"there are {len(told)} shares for stages of {describe([*number])} pieces",
            fields=["shares", "stage_segments"],
        )
    if any(not own.sum() > 0 for own in found):
        raise UsageError("the shares of a stage's pieces are all 0", fields=["shares"])
    return found


# ---------------------------------------------------------------- where they meet


def sums(program: Program) -> Program:
    """The program with the sums that `meets` asks for, each just behind what gives what it sums;
    where ranks share the sequence, with gathers likewise."""
    for op, makers, shift in _sums_of(program):
        address, given = program.words & ADDRESS, FORWARDS if shift > 0 else BACKWARDS
        at = np.flatnonzero(is_op(program.op, given) & makers[address >> STAGE])
        program = behind(program, at, address[at] + (shift << STAGE) | int(op) << OP)
    return program


def _sums_of(program: Program) -> Iterator[tuple[Opcode, NDArray[np.bool_], int]]:
    """Of each kind of sum, which stages give what is summed, shape (stages,), and how many stages
    farther is the one that takes it, whose sum it is.  Where ranks share the sequence a sum leaves
    each its part of it (reduce-scatter), and so what goes the other way there is gathered."""
    stages, trained = program.shape.stages, np.arange(program.shape.stages) > program.frozen_stages
    letters = np.array([*(program.segment_boundaries or ENDS * (stages - 1)), ENDS])
    yield Opcode.TPReduceAct, letters == LEAVES, 1
    yield Opcode.TPReduceGrad, np.roll(letters == ENTERS, 1) & trained & program.trains, -1
    if program.sequence_parallel:
        yield Opcode.TPGatherAct, letters == ENTERS, 1
        yield Opcode.TPGatherGrad, np.roll(letters == LEAVES, 1) & trained & program.trains, -1


def _expected(program: Program, present: Present) -> Iterator[ExpectedInstructions]:
    for op, makers, shift in _sums_of(program):
        there = np.repeat(np.roll(makers, shift), program.shape.microbatches)
        yield ExpectedInstructions(op, there, "the program does not say that ranks meet there")


def _finer(options: Options) -> dict[str, Any]:
    """What is said of pieces and chunks."""
    told = {
        "given": options.more.get("stage_segments"),
        "chunks": options.more.get("microbatch_chunks"),
    }
    return {name: value for name, value in told.items() if value is not None}


PASSES: Final = (
    Pass(
        "stage_segments",
        "draft",
        lambda program, options: cut(program, **_finer(options)),
        wanted=lambda program, options: bool(_finer(options)),
        options=("stage_segments", "microbatch_chunks"),
        kinds={"stage_segments": PIECES, "microbatch_chunks": CHUNKS},
        abouts={
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
        lambda program, options: sums(program),
        wanted=lambda program, options: bool(program.segment_boundaries),
        expected=_expected,
        order=2,
    ),
)
