"""Stages of a GPT, split into segments at their tensor-parallel collectives.

`compile(stage_segments=)` makes a program for these segments. A layer has four segments, between
the collectives of Megatron-LM (arXiv 1909.08053, section 3):

    norm | f | attention | g | bias, residual, norm | f | feed-forward | g | bias, residual, ...

The last segment of a layer is the first segment of the next layer, so a stage of n layers has 4n +
1 segments. All segments of a stage except its last segment return two tensors: the tensor for the
collective, and the residual stream. The program runs the collectives. The segments have the
parameters of the stage, with the same names.

With sequence parallelism (arXiv 2205.05198, section 4.2.2), the residual stream and the tensors
between g and f have only the tokens of a rank. The segments between f and g have all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from schedir.errors import ModelError
from schedir.ir.pipeline.stage_segments import ENTRY_COLLECTIVE, EXIT_COLLECTIVE
from schedir.models.gpt import Layer, Stage
from schedir.models.gpt_config import LAYER_BOUNDARIES
from schedir.models.partial_module import select_submodules
from schedir.runtime.boundaries.boundary import Boundary

Tensors = tuple[Tensor, ...]


class SegmentStep(NamedTuple):
    """A function that a segment runs, and the names of the parameters that it uses.

    Attributes:
        layer: The key of a layer of the stage, or "" for a step outside of the layers.
        parameter_names: The dotted names of parameters and submodules of the layer or the stage.
        run: The function. It takes the layer or the stage, and the input tensors. It returns a
            tuple of tensors.
    """

    layer: str
    parameter_names: list[str]
    run: Callable[..., Tensors]


class StageSegment(Stage):
    """A segment of a stage, with the parameters that it uses.

    Args:
        stage: The stage. The segment shares the parameters of the stage.
        steps: The functions to run, in order.
    """

    def __init__(self, stage: Stage, steps: list[SegmentStep]) -> None:
        names = [
            f"layers.{layer}.{name}" if layer else name
            for layer, parameter_names, _ in steps
            for name in parameter_names
        ]
        vars(self).update(vars(select_submodules(stage, names)))
        self.steps = steps

    def forward(self, *inputs: Tensor) -> Any:
        """Return one tensor, or the tensor for the collective and the residual stream."""
        for step in self.steps:
            inputs = step.run(self.layers[step.layer] if step.layer else self, *inputs)
        return inputs if len(inputs) > 1 else inputs[0]


def split_stage(stage: Stage) -> list[nn.Module]:
    """Split a stage into its segments, in order.

    A program that is compiled with `stage_segments` runs each segment as a stage. The segments
    share the parameters of the stage, and use the same random streams for dropout. With one
    tensor-parallel rank the collectives do nothing.

    Args:
        stage: The stage.

    Raises:
        ModelError: The stage is the full model and has a tied weight, which two segments would use.

    Example:
        >>> from schedir import PipelineShape, compile, schedules
        >>> from schedir.models.gpt import GPTConfig, build_stage
        >>> from schedir.models.gpt_segments import count_segments, split_stage
        >>> stages = [build_stage(GPTConfig(layers=4), s, 2) for s in range(2)]
        >>> program = compile(schedules.one_f_one_b, PipelineShape(2, 4), tied_weights=True,
        ...     stage_segments=count_segments([2, 2]))
        >>> program.shape.stages, sum(len(split_stage(stage)) for stage in stages)
        (18, 18)
    """
    require_splittable(stage)
    embedding_names = ["embedding", "positions"] * (stage.embedding is not None)
    segments = [[SegmentStep("", embedding_names, _embed)]]
    for layer in stage.layers:
        segments[-1].append(SegmentStep(layer, ["attention_norm"], _normalize))
        segments.append([SegmentStep(layer, ["qkv", "proj.weight"], _attend)])
        segments.append([SegmentStep(layer, ["proj.bias", "mlp_norm"], _add_attention)])
        segments.append([SegmentStep(layer, ["up", "down.weight"], _feed_forward)])
        segments.append([SegmentStep(layer, ["down.bias"], _add_feed_forward)])
    segments[-1].append(SegmentStep("", ["norm", "head"] * (stage.head is not None), _apply_head))
    return [StageSegment(stage, steps) for steps in segments]


def require_splittable(stage: Stage) -> None:
    """Refuse a stage whose embedding and head are one tied weight.

    Args:
        stage: The stage.

    Raises:
        ModelError: Two segments of the stage would use the weight.
    """
    if (
        stage.embedding is not None
        and stage.head is not None
        and stage.config.tied
        and stage.layers
    ):
        raise ModelError(
            "the embedding and the head are one weight (tied), but they are in different segments "
            "of one stage",
            hint="use two or more stages, or tied=False",
        )


def count_segments(layers: Iterable[int]) -> tuple[int, ...]:
    """Return the number of segments of each stage, for `compile(..., stage_segments=...)`.

    Args:
        layers: The number of layers of each stage.
    """
    return tuple(len(LAYER_BOUNDARIES) * number + 1 for number in layers)


def build_boundaries(
    segments_per_stage: Sequence[int],
    boundary: Boundary | Sequence[int],
    frozen_stages: int = 0,
    tp_size: int = 1,
) -> dict[int, Any]:
    """Return the boundaries after each segment of split stages.

    A boundary between stages is one tensor. A boundary within a stage is two tensors: the tensor
    for the collective, and the residual stream. In the first stage after frozen stages, the
    residual stream depends on no trained parameter and has no gradient, until the output of the
    first attention is added to it. With sequence parallelism, boundaries have the tokens of one
    rank. The collective then changes the shape, so a segment sends or receives all tokens.

    Args:
        segments_per_stage: The number of segments of each stage.
        boundary: The boundary between stages, or its shape.
        frozen_stages: The number of frozen stages.
        tp_size: The number of tensor-parallel ranks that divide the sequence. 1 means no sequence
            parallelism.

    Returns:
        The boundary after each segment except the last, by the index of the segment.

    Example:
        >>> from schedir.models.gpt_segments import build_boundaries
        >>> behind = build_boundaries((2, 1), (8, 64))
        >>> [str(one) for one in behind[0]], str(behind[1])
        (['[8, 64] of torch.float32', '[8, 64] of torch.float32'], '[8, 64] of torch.float32')
        >>> str(build_boundaries((1, 5), (8, 64), frozen_stages=1)[1][1])
        '[8, 64] of torch.float32 without gradient'
        >>> str(build_boundaries((5,), (8, 64), tp_size=2)[0][0])
        '[8, 64] of torch.float32, received as [16, 64]'
    """
    stage_boundary = Boundary.from_shape(boundary)
    boundaries = list[Any]()
    token_dim = len(stage_boundary.shape) - 2
    all_tokens = tuple(
        tp_size * n if k == token_dim else n for k, n in enumerate(stage_boundary.shape)
    )
    boundary_by_letter = {
        ENTRY_COLLECTIVE: replace(stage_boundary, received_shape=all_tokens),
        EXIT_COLLECTIVE: replace(
            stage_boundary, shape=all_tokens, received_shape=stage_boundary.shape
        ),
    }
    for stage, number in enumerate(segments_per_stage):
        residual_boundaries = [stage_boundary] * (number - 1)
        if frozen_stages and stage == frozen_stages:
            residual_boundaries[:2] = [
                replace(stage_boundary, requires_grad=False) for _ in residual_boundaries[:2]
            ]
        boundaries += [
            (boundary_by_letter[LAYER_BOUNDARIES[k % len(LAYER_BOUNDARIES)]], residual_boundary)
            for k, residual_boundary in enumerate(residual_boundaries)
        ] + [stage_boundary]
    return dict(enumerate(boundaries[:-1]))


def _embed(stage: Stage, x: Tensor) -> Tensors:
    return (stage.embed(x),)


def _apply_head(stage: Stage, x: Tensor) -> Tensors:
    return (stage.apply_head(x),)


def _normalize(layer: Layer, x: Tensor) -> Tensors:
    return layer.attention_norm(x), x


def _attend(layer: Layer, normed: Tensor, x: Tensor) -> Tensors:
    return layer.proj.project_partial(layer.attend(layer.qkv.forward_local(normed))), x


def _add_attention(layer: Layer, part: Tensor, x: Tensor) -> Tensors:
    with layer.use_dropout_stream():
        x, normed = layer.add_attention(layer.proj.add_bias(part), x)
    return normed, x


def _feed_forward(layer: Layer, normed: Tensor, x: Tensor) -> Tensors:
    return layer.down.project_partial(layer.activate(layer.up.project_local(normed))), x


def _add_feed_forward(layer: Layer, part: Tensor, x: Tensor) -> Tensors:
    with layer.use_dropout_stream():
        if layer.dropout_rate:  # Advance the random stream past the mask of `_add_attention`.
            F.dropout(x.detach(), layer.dropout_rate)
        return (layer.add_feed_forward(layer.down.add_bias(part), x),)
