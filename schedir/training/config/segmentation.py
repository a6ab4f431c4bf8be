"""How many segments a run splits its stages into, and its microbatches into how many chunks.

Needs no torch.
"""

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

LAYER_SEGMENTATION: Final = "layers"  # each stage where the ranks of its layers meet


@dataclass(frozen=True)
class StageSegmentation:
    """The whole stages of a run: of how many layers each is, and in how many `segments_per_stage`
    the program has it; and of how many samples the program's microbatches are."""

    layers_per_stage: tuple[int, ...]
    segments_per_stage: tuple[int, ...]
    microbatch_size: int

    @property
    def first_segments(self) -> list[int]:
        """Of each whole stage its first piece, as a stage of the program; and how many there are.

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
    """How a model is cut: `layers` on the whole stages of a shape, or on those of a program that is
    of pieces and says so (`segment_boundaries`).

    `layer_boundaries` has the letters in a layer of its `model_kind`, "" where nobody cuts it;
    `stage_segments`, `microbatch_chunks`,
    `frozen_stages` and `tied_weights` are as a configuration has them, and `microbatch_size` is
    that of whole microbatches.

    Raises UsageError for pieces that are not those of the layers, and what else cannot be.

    >>> make_segmentation(4, PipelineShape(2, 8), None, microbatch_size=4, layer_boundaries="fgfg",
    ...                   stage_segments="layers", microbatch_chunks=2)
    StageSegmentation(layers_per_stage=(2, 2), segments_per_stage=(9, 9), microbatch_size=2)
    """
    microbatch_chunks = (
        1
        if microbatch_chunks is None
        else CHUNK_COUNT_TYPE.resolve("microbatch_chunks", microbatch_chunks, None)
    )
    if microbatch_size % microbatch_chunks:
        raise UsageError(
            f"microbatches of {microbatch_size} samples cannot be cut in {microbatch_chunks} "
            "chunks",
            hint="microbatch_size = "
            f"{microbatch_chunks * -(-microbatch_size // microbatch_chunks)}",
            fields=["microbatch_chunks", "microbatch_size"],
        )
    microbatch_size //= microbatch_chunks
    if stage_segments is None and not segment_boundaries:
        return StageSegmentation(
            split_layers(layers, shape.stages, layers_per_stage),
            (1,) * shape.stages,
            microbatch_size,
        )
    where = "schedule" if segment_boundaries else "stage_segments"
    if segment_boundaries and stage_segments is not None:
        raise UsageError("the program is of pieces already", fields=["stage_segments", "schedule"])
    if not layer_boundaries:
        raise UsageError(
            f"stages of a model of kind {model_kind} have no pieces",
            hint="whole stages, or kind gpt",
            fields=[where, "kind"],
        )
    letters = split_letters_by_stage(segment_boundaries, shape.stages)
    hint = (
        f'stage_segments = "{LAYER_SEGMENTATION}"'
        if stage_segments is not None
        else "layers_per_stage = [...], as it was split"
    )
    if segment_boundaries and layers_per_stage is None:
        there = tuple(len(own) // len(layer_boundaries) for own in letters)
        layers_per_stage = there if sum(there) == layers else None
        if all(there) and layers_per_stage is None:
            hint = f"layers = {sum(there)}, as it was cut"
    each = split_layers(layers, len(letters), layers_per_stage)
    if stage_segments == LAYER_SEGMENTATION:
        letters = tuple(layer_boundaries * number for number in each)
    elif stage_segments is not None:
        try:
            letters = parse_segment_letters(stage_segments, shape)
        except UsageError as error:
            raise UsageError(error.fact, hint=hint, fields=error.fields) from error
    for stage, (own, number) in enumerate(zip(letters, each, strict=True)):
        if own not in ("", layer_boundaries * number):
            raise UsageError(
                f"stage {stage} has {number} layer{'s' * (number != 1)}, "
                f"{len(layer_boundaries) * number + 1} "
                f"pieces with {describe(layer_boundaries * number)} between them, and not "
                f"{describe(own)}",
                hint=hint,
                fields=[where, "layers_per_stage"],
            )
    found = StageSegmentation(each, tuple(len(own) + 1 for own in letters), microbatch_size)
    if tied_weights and found.segments_per_stage != (1,) and len(letters) == 1:
        raise UsageError(
            "the embedding is the head's weight, and they are in the first and the last of the "
            "pieces of one stage",
            hint="two stages, or tied = false",
            fields=[where, "tied_weights"],
        )
    if segment_boundaries and frozen_stages not in found.first_segments:
        raise UsageError(
            f"the first {frozen_stages} pieces are frozen, which are no whole stages",
            hint=f"frozen_stages = {' or '.join(map(str, found.first_segments[1:-1])) or 0}",
            fields=["frozen_stages", "schedule"],
        )
    return found
