"""The segments of the stages of a run, and the chunks of its microbatches. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from schedir.errors import UsageError, describe
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.program_attributes import CHUNK_COUNT_TYPE
from schedir.ir.pipeline.stage_segments import split_letters_by_stage
from schedir.models.partitioning import split_layers
from schedir.passes.splitting.stage_segmentation import parse_segment_letters

# This value of `stage_segments` splits each stage at each collective of its layers.
LAYER_SEGMENTATION: Final = "layers"


@dataclass(frozen=True)
class StageSegmentation:
    """The layers and the segments of the stages of a run.

    A stage here is an unsegmented stage. Each segment of such a stage is a stage of the program.

    Args:
        layers_per_stage: The number of layers of each stage.
        segments_per_stage: The number of segments of each stage.
        microbatch_size: The number of samples in a microbatch of the program. If microbatches are
            split, a microbatch of the program is a chunk.
    """

    layers_per_stage: tuple[int, ...]
    segments_per_stage: tuple[int, ...]
    microbatch_size: int

    @property
    def first_segments(self) -> list[int]:
        """Return the index of the first segment of each stage, and then the number of all segments.

        Example:
            >>> StageSegmentation((1, 2), (5, 9), 1).first_segments
            [0, 5, 14]
        """
        return [0, *accumulate(self.segments_per_stage)]


def make_segmentation(
    layers: int,
    shape: PipelineShape,
    layers_per_stage: Sequence[int] | None,
    *,
    microbatch_size: int,
    layer_boundaries: str = "",
    model_kind: str = "",
    stage_segments: Any = None,
    microbatch_chunks: int | None = None,
    segment_boundaries: str = "",
    frozen_stages: int = 0,
    tied_weights: bool = False,
) -> StageSegmentation:
    """Return how the stages and microbatches of a run are split.

    Args:
        layers: The number of layers of the model.
        shape: The pipeline shape. If `segment_boundaries` is set, the stages of the shape are
            segments. Otherwise the stages of the shape are unsegmented.
        layers_per_stage: The number of layers of each stage. None means the division that
            `segment_boundaries` implies. Without `segment_boundaries`, None means an even division.
        microbatch_size: The number of samples in a microbatch before it is split into chunks.
        layer_boundaries: The collectives between the segments of a layer, as letters. "" if stages
            of this kind cannot be segmented.
        model_kind: The name of the kind of model, for errors.
        stage_segments: The setting `pipeline.stage_segments`. None means that stages are not split.
        microbatch_chunks: The setting `pipeline.microbatch_chunks`. None means that microbatches
            are not split.
        segment_boundaries: The segment boundaries of a program that is segmented already. "" for
            other programs.
        frozen_stages: The number of frozen stages. In a program that is segmented already, the
            number of frozen segments.
        tied_weights: If true, the head uses the weight of the embedding.

    Raises:
        UsageError: The segments do not fit the layers, the chunks do not divide the microbatch, or
            another setting contradicts the segments or chunks.

    Example:
        >>> make_segmentation(4, PipelineShape(2, 8), None, microbatch_size=4, microbatch_chunks=2,
        ...                   layer_boundaries="fgfg", stage_segments="layers")
        StageSegmentation(layers_per_stage=(2, 2), segments_per_stage=(9, 9), microbatch_size=2)
    """
    microbatch_size = _split_microbatch(microbatch_size, microbatch_chunks)
    if stage_segments is None and not segment_boundaries:
        return StageSegmentation(
            split_layers(layers, shape.stages, layers_per_stage),
            (1,) * shape.stages,
            microbatch_size,
        )
    option = "schedule" if segment_boundaries else "stage_segments"
    if segment_boundaries and stage_segments is not None:
        raise UsageError(
            "stage_segments does not apply to a program that has segments already",
            hint="leave out stage_segments",
            fields=["stage_segments", "schedule"],
        )
    _require_segments(layer_boundaries, model_kind, option)
    letters = split_letters_by_stage(segment_boundaries, shape.stages)
    hint = (
        f'stage_segments = "{LAYER_SEGMENTATION}"'
        if stage_segments is not None
        else "layers_per_stage = [...], as in the program"
    )
    if segment_boundaries and layers_per_stage is None:
        layers_of_program = tuple(
            len(boundaries) // len(layer_boundaries) for boundaries in letters
        )
        layers_per_stage = layers_of_program if sum(layers_of_program) == layers else None
        if all(layers_of_program) and layers_per_stage is None:
            hint = f"layers = {sum(layers_of_program)}, as in the program"
    stage_layers = split_layers(layers, len(letters), layers_per_stage)
    if stage_segments == LAYER_SEGMENTATION:
        letters = tuple(layer_boundaries * number for number in stage_layers)
    elif stage_segments is not None:
        try:
            letters = parse_segment_letters(stage_segments, shape)
        except UsageError as error:
            raise UsageError(error.fact, hint=hint, fields=error.fields) from error
    _require_complete_layers(letters, stage_layers, layer_boundaries, hint, option)
    segmentation = StageSegmentation(
        stage_layers, tuple(len(boundaries) + 1 for boundaries in letters), microbatch_size
    )
    if tied_weights:
        _require_separate_ends(segmentation, option)
    if segment_boundaries:
        _require_complete_frozen_stages(segmentation, frozen_stages)
    return segmentation


def _split_microbatch(microbatch_size: int, microbatch_chunks: int | None) -> int:
    """Return the samples of a chunk. If `microbatch_chunks` is None, a chunk is a microbatch."""
    chunks = (
        1
        if microbatch_chunks is None
        else CHUNK_COUNT_TYPE.resolve("microbatch_chunks", microbatch_chunks, None)
    )
    if microbatch_size % chunks:
        raise UsageError(
            f"microbatch_chunks = {chunks} does not divide microbatch_size = {microbatch_size}",
            hint=f"microbatch_size = {chunks * -(-microbatch_size // chunks)}",
            fields=["microbatch_chunks", "microbatch_size"],
        )
    return microbatch_size // chunks


def _require_segments(layer_boundaries: str, model_kind: str, option: str) -> None:
    """Raise UsageError if stages of this kind of model cannot be segmented."""
    if not layer_boundaries:
        raise UsageError(
            f"a model of kind {model_kind!r} has no segments",
            hint='use kind = "gpt", or stages without segments',
            fields=[option, "kind"],
        )


def _require_complete_layers(
    letters: Sequence[str],
    layers_per_stage: Sequence[int],
    layer_boundaries: str,
    hint: str,
    option: str,
) -> None:
    """Raise UsageError if the boundaries of a stage's segments do not match its layers."""
    for stage, (boundaries, number) in enumerate(zip(letters, layers_per_stage, strict=True)):
        if boundaries not in ("", layer_boundaries * number):
            raise UsageError(
                f"stage {stage} has {number} layer{'s' * (number != 1)}, and needs the segment "
                f"boundaries {describe(layer_boundaries * number)}, not {describe(boundaries)}",
                hint=hint,
                fields=[option, "layers_per_stage"],
            )


def _require_separate_ends(segmentation: StageSegmentation, option: str) -> None:
    """Raise UsageError if the embedding and the head are in two segments of one stage."""
    segments = segmentation.segments_per_stage
    if segments != (1,) and len(segments) == 1:
        raise UsageError(
            "the embedding and the head share a weight, so they cannot be in two segments of one "
            "stage",
            hint="use two or more stages, or tied = false",
            fields=[option, "tied_weights"],
        )


def _require_complete_frozen_stages(segmentation: StageSegmentation, frozen_stages: int) -> None:
    """Raise UsageError if only some segments of a stage are frozen."""
    if frozen_stages not in segmentation.first_segments:
        raise UsageError(
            f"frozen_stages is {frozen_stages} and counts segments, but the first {frozen_stages} "
            "segments are not complete stages",
            hint=f"frozen_stages = {' or '.join(map(str, segmentation.first_segments[1:-1])) or 0}",
            fields=["frozen_stages", "schedule"],
        )
