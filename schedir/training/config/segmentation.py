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
from schedir.ir.pipeline.program_attributes import CHUNKS
from schedir.ir.pipeline.stage_segments import letters_in
from schedir.models.partitioning import split_layers
from schedir.passes.splitting.stage_segmentation import letters_of

LAYERS: Final = "layers"  # each stage where the ranks of its layers meet


@dataclass(frozen=True)
class StageSegmentation:
    """The whole stages of a run: of how many layers each is, and in how many `pieces` the program
    has it; and of how many samples the program's microbatches are."""

    division: tuple[int, ...]
    pieces: tuple[int, ...]
    size: int

    @property
    def first(self) -> list[int]:
        """Of each whole stage its first piece, as a stage of the program; and how many there are.

        >>> StageSegmentation((1, 2), (5, 9), 1).first
        [0, 5, 14]
        """
        return [0, *accumulate(self.pieces)]


def segmentation_of(
    layers: int,
    shape: PipelineShape,
    division: Sequence[int] | None,
    *,
    size: int,
    layer: str = "",
    kind: str = "",
    cut: Any = None,
    chunks: int | None = None,
    meets: str = "",
    frozen_stages: int = 0,
    tied: bool = False,
) -> StageSegmentation:
    """How a model is cut: `layers` on the whole stages of a shape, or on those of a program that is
    of pieces and says so (`meets`).

    `layer` has the letters in a layer of its `kind`, "" where nobody cuts it; `cut`, `chunks`,
    `frozen_stages` and `tied` are as a configuration has them, and `size` is that of whole
    microbatches.

    Raises UsageError for pieces that are not those of the layers, and what else cannot be.

    >>> segmentation_of(4, PipelineShape(2, 8), None, size=4, layer="fgfg", cut="layers", chunks=2)
    StageSegmentation(division=(2, 2), pieces=(9, 9), size=2)
    """
    chunks = 1 if chunks is None else CHUNKS.settle("microbatch_chunks", chunks, None)
    if size % chunks:
        raise UsageError(
            f"microbatches of {size} samples cannot be cut in {chunks} chunks",
            hint=f"microbatch_size = {chunks * -(-size // chunks)}",
            fields=["microbatch_chunks", "microbatch_size"],
        )
    size //= chunks
    if cut is None and not meets:
        return StageSegmentation(
            split_layers(layers, shape.stages, division), (1,) * shape.stages, size
        )
    where = "schedule" if meets else "stage_segments"
    if meets and cut is not None:
        raise UsageError("the program is of pieces already", fields=["stage_segments", "schedule"])
    if not layer:
        raise UsageError(
            f"stages of a model of kind {kind} have no pieces",
            hint="whole stages, or kind gpt",
            fields=[where, "kind"],
        )
    letters = letters_in(meets, shape.stages)
    hint = (
        f'stage_segments = "{LAYERS}"'
        if cut is not None
        else "layers_per_stage = [...], as it was split"
    )
    if meets and division is None:
        there = tuple(len(own) // len(layer) for own in letters)
        division = there if sum(there) == layers else None
        if all(there) and division is None:
            hint = f"layers = {sum(there)}, as it was cut"
    each = split_layers(layers, len(letters), division)
    if cut == LAYERS:
        letters = tuple(layer * number for number in each)
    elif cut is not None:
        try:
            letters = letters_of(cut, shape)
        except UsageError as error:
            raise UsageError(error.fact, hint=hint, fields=error.fields) from error
    for stage, (own, number) in enumerate(zip(letters, each, strict=True)):
        if own not in ("", layer * number):
            raise UsageError(
                f"stage {stage} has {number} layer{'s' * (number != 1)}, {len(layer) * number + 1} "
                f"pieces with {describe(layer * number)} between them, and not {describe(own)}",
                hint=hint,
                fields=[where, "layers_per_stage"],
            )
    found = StageSegmentation(each, tuple(len(own) + 1 for own in letters), size)
    if tied and found.pieces != (1,) and len(letters) == 1:
        raise UsageError(
            "the embedding is the head's weight, and they are in the first and the last of the "
            "pieces of one stage",
            hint="two stages, or tied = false",
            fields=[where, "tied_weights"],
        )
    if meets and frozen_stages not in found.first:
        raise UsageError(
            f"the first {frozen_stages} pieces are frozen, which are no whole stages",
            hint=f"frozen_stages = {' or '.join(map(str, found.first[1:-1])) or 0}",
            fields=["frozen_stages", "schedule"],
        )
    return found
