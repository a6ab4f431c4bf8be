"""Find the stages of a program that are segments of one stage of the model.

A stage can be divided at its tensor-parallel collectives (Megatron-LM, arXiv 1909.08053, section
3), and at the all-to-alls of its experts (GShard, arXiv 2006.16668). The parts are called segments.
In the program, each segment is a separate stage. All segments of a model's stage are on one rank.
`Program.segment_boundaries` has one letter for each boundary between two stages of the program:

- `f`: a tensor-parallel region begins. An all-reduce sums the gradient of the boundary.
- `g`: a tensor-parallel region ends. An all-reduce sums the activation of the boundary.
- `d`: a region of experts begins. An all-to-all dispatches tokens in the forward. In the backward,
  another all-to-all returns the gradients of the tokens.
- `c`: a region of experts ends. An all-to-all returns (combines) the outputs in the forward. In the
  backward, another all-to-all sends the gradients of the outputs to the experts.
- `.`: a boundary between two segments without a collective.
- `-`: the end of a stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from schedir.errors import ShapeError, describe
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import PipelineShape

STAGE_END: Final = "-"
ENTRY_COLLECTIVE, EXIT_COLLECTIVE, NO_COLLECTIVE = "f", "g", "."
DISPATCH, COMBINE = "d", "c"
TP_LETTERS: Final = ENTRY_COLLECTIVE + EXIT_COLLECTIVE
EP_LETTERS: Final = DISPATCH + COMBINE
COLLECTIVE_LETTERS: Final = TP_LETTERS + EP_LETTERS
SEGMENT_LETTERS: Final = COLLECTIVE_LETTERS + NO_COLLECTIVE
_ALL_LETTERS: Final = {*SEGMENT_LETTERS, STAGE_END}


def split_letters_by_stage(segment_boundaries: str, stages: int) -> tuple[str, ...]:
    """Return the letters between the segments of each stage.

    Args:
        segment_boundaries: A letter for each boundary, or "" if no stage has segments.
        stages: Number of stages of the program. `stages` is used only if `segment_boundaries` is
            "".

    Returns:
        One text for each stage of the model, with the letters between its segments.

    Example:
        >>> split_letters_by_stage("fg-.", 5), split_letters_by_stage("", 2)
        (('fg', '.'), ('', ''))
    """
    return tuple(segment_boundaries.split(STAGE_END)) if segment_boundaries else ("",) * stages


def has_collectives(segment_boundaries: str, letters: str = COLLECTIVE_LETTERS) -> bool:
    """Return whether any boundary has a collective.

    Args:
        segment_boundaries: A letter for each boundary, or "".
        letters: The letters of the collectives to find. The default is all collectives.

    Example:
        >>> has_collectives("..-.."), has_collectives("dc-dc"), has_collectives("dc", TP_LETTERS)
        (False, True, False)
    """
    return not {*letters}.isdisjoint(segment_boundaries)


def count_segments(segment_boundaries: str, stages: int) -> tuple[int, ...]:
    """Return the number of segments of each stage.

    Args:
        segment_boundaries: A letter for each boundary, or "" if no stage has segments.
        stages: Number of stages of the program. `stages` is used only if `segment_boundaries` is
            "".

    Returns:
        The number of segments of each stage of the model.

    Example:
        >>> count_segments("fg-.", 5), count_segments("", 2)
        ((3, 2), (1, 1))
    """
    return tuple(len(letters) + 1 for letters in split_letters_by_stage(segment_boundaries, stages))


class UnsegmentedShape(NamedTuple):
    """The shape of a pipeline before its stages and microbatches are split.

    Args:
        shape: Shape before stages are split into segments, and microbatches into chunks.
        segments_per_stage: The number of segments of each stage of this shape.
        chunks_per_microbatch: The number of chunks of each microbatch of this shape.
    """

    shape: PipelineShape
    segments_per_stage: tuple[int, ...]
    chunks_per_microbatch: int


def merge_segments(
    shape: PipelineShape, segment_boundaries: str, chunks_per_microbatch: int
) -> UnsegmentedShape:
    """Merge segments to stages and chunks to microbatches in the shape of a program.

    Args:
        shape: Shape of the program. Its stages are segments, and its microbatches are chunks.
        segment_boundaries: A letter for each boundary, or "" if no stage has segments.
        chunks_per_microbatch: Number of chunks of each microbatch.

    Returns:
        The merged shape and the numbers of segments and chunks. If `segment_boundaries` is not "",
        the placement is a list of ranks, and each stage has the weight delay of its first segment.

    Example:
        >>> found = merge_segments(PipelineShape(2, 8, placement=(0, 0, 1)), "g-", 4)
        >>> found.shape, found.segments_per_stage, found.chunks_per_microbatch
        (PipelineShape(ranks=2, microbatches=2, placement=(0, 1)), (2, 1), 4)
    """
    segments = count_segments(segment_boundaries, shape.stages)
    shape = replace(shape, microbatches=shape.microbatches // chunks_per_microbatch)
    if not segment_boundaries:
        return UnsegmentedShape(shape, segments, chunks_per_microbatch)
    first_segments = np.cumsum((0, *segments[:-1]))
    rows = tuple(tuple(row) for row in shape.replica_ranks[:, first_segments].tolist())
    delay = shape.weight_delay
    if isinstance(delay, tuple):
        delay = tuple(delay[stage] for stage in first_segments)
    placement = rows if len(rows) > 1 else rows[0]
    shape = shape.with_stage_ranks(placement, weight_delay=delay)
    return UnsegmentedShape(shape, segments, chunks_per_microbatch)


def _validate_boundaries(name: str, value: object, shape: PipelineShape) -> str:
    """Verify the letters of the boundaries, and return them, or "" if no stage has segments."""
    if not isinstance(value, str) or not {*value} <= _ALL_LETTERS:
        raise ShapeError(f"{name} {_REQUIREMENT}, not {describe(value)}", fields=[name])
    if not value.strip(STAGE_END):
        return ""
    if len(value) != shape.stages - 1:
        raise ShapeError(
            f"{name} has {len(value)} letters, but {shape.stages} stages have {shape.stages - 1} "
            "boundaries",
            hint="compile(..., stage_segments=5) splits stages, and sets segment_boundaries",
            fields=[name],
        )
    for stage_letters in value.split(STAGE_END):
        experts = "".join(letter for letter in stage_letters if letter in EP_LETTERS)
        if experts != (DISPATCH + COMBINE) * (len(experts) // 2):
            raise ShapeError(
                f"{name} has the all-to-alls {experts} in a stage, but they must be pairs dc: a "
                "dispatch d, and then its combine c",
                hint="write dc for each mixture-of-experts layer, as in dc or fgdc",
                fields=[name],
            )
    for s, letter in enumerate(value):
        if (
            letter != STAGE_END
            and (shape.replica_ranks[:, s] != shape.replica_ranks[:, s + 1]).any()
        ):
            raise ShapeError(
                f"{name} has the letter {letter} between stages {s} and {s + 1}, which are on "
                "different ranks: all segments of a stage must be on one rank",
                hint=f"use {STAGE_END} at the end of a stage",
                fields=[name],
            )
    return value


def _parse_boundaries(text: str) -> str:
    if text == "no":
        return ""
    if not text or not {*text} <= _ALL_LETTERS:
        raise ValueError(f"{_REQUIREMENT}, not {describe(text)}")
    return text


_REQUIREMENT: Final = (
    "must have a letter for each boundary, such as fgfg-fgfg: f or g (tensor-parallel "
    "collective), d or c (dispatch or combine), . (no collective) or - (end of a stage)"
)
SEGMENT_BOUNDARIES_TYPE: Final = FieldType(
    _REQUIREMENT,
    _parse_boundaries,
    str,
    lambda value, _: value or "no",
    _validate_boundaries,
    metavar="LETTERS",
)
