"""Stages of a GPT, split into segments at their tensor-parallel collectives
(`compile(stage_segments=)`).

A layer is four pieces, between the sums of Megatron-LM (arXiv 1909.08053, section 3):

    norm | f | attention | g | bias, residual, norm | f | feed-forward | g | bias, residual, ...

What ends a layer begins the next one, so a stage of n layers has 4 n + 1 pieces.  All but the last
pass two tensors on, what is summed and then the residual stream.  The sums are the program's; the
pieces have the stage's own parameters, under their names.

Where ranks share the sequence (arXiv 2205.05198, section 4.2.2), what is between g and f is of each
one's own tokens, and so is the residual stream; what f enters is of all.
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


class _SegmentStep(NamedTuple):
    """Something that a piece computes of what it is given, and the parameters that it takes."""

    parameter_names: list[str]
    run: Callable[..., Tensors]


class StageSegment(Stage):
    """A piece of a stage: it has some of its parameters, and computes what they are for."""

    def __init__(self, stage: Stage, steps: list[_SegmentStep]) -> None:
        vars(self).update(
            vars(
                select_submodules(stage, [name for step in steps for name in step.parameter_names])
            )
        )
        self.steps = steps

    def forward(self, *inputs: Tensor) -> Any:
        """One tensor, or what is summed and the residual stream."""
        for step in self.steps:
            inputs = step.run(self, *inputs)
        return inputs if len(inputs) > 1 else inputs[0]


def split_stage(stage: Stage) -> list[nn.Module]:
    """The pieces of a stage, in order: stages of a program whose `segments_per_stage` says so many.

    They share its parameters, and draw what it draws for dropout.  With one tensor-parallel rank
    they are as right: nothing is summed.  Raises ModelError for a stage that is the whole model,
    and whose embedding is its head's weight.

    >>> from schedir import PipelineShape, compile, schedules
    >>> from schedir.models.gpt import GPTConfig, build_stage
    >>> from schedir.models.gpt_segments import count_segments, split_stage
    >>> stages = [build_stage(GPTConfig(layers=4), s, 2) for s in range(2)]
    >>> program = compile(schedules.one_f_one_b, PipelineShape(2, 4), tied_weights=True,
    ...     stage_segments=count_segments([2, 2]))
    >>> program.shape.stages, sum(len(split_stage(stage)) for stage in stages)
    (18, 18)
    """
    if (
        stage.embedding is not None
        and stage.head is not None
        and stage.config.tied
        and stage.layers
    ):
        raise ModelError(
            "the embedding is the head's weight, and they are in the first and the last of the "
            "pieces of one stage",
            hint="two stages, or a model that is not tied",
        )
    found = [[_SegmentStep(["embedding", "positions"] * (stage.embedding is not None), _embed)]]
    for number in stage.layers:
        own = _LayerSegments(number)
        found[-1].append(own.make_step(own.normalize, "attention_norm"))
        found.append([own.make_step(own.attend, "qkv", "proj.weight")])
        found.append([own.make_step(own.add_attention, "proj.bias", "mlp_norm")])
        found.append([own.make_step(own.feed_forward, "up", "down.weight")])
        found.append([own.make_step(own.add_feed_forward, "down.bias")])
    found[-1].append(_SegmentStep(["norm", "head"] * (stage.head is not None), _apply_head))
    return [StageSegment(stage, steps) for steps in found]


def count_segments(layers: Iterable[int]) -> tuple[int, ...]:
    """How many pieces stages of so many layers have, as `compile(..., stage_segments=...)` takes
    it."""
    return tuple(len(LAYER_BOUNDARIES) * number + 1 for number in layers)


def build_boundaries(
    segments_per_stage: Sequence[int],
    boundary: Boundary | Sequence[int],
    frozen_stages: int = 0,
    tp_size: int = 1,
) -> dict[int, Any]:
    """What passes behind each piece of stages that are cut so: a boundary of the stages, or two.

    Of the first stage behind `frozen_stages` ones the residual stream depends on nothing that is
    trained, and has no gradient, until its attention adds to it.  Where so many tensor-parallel
    ranks `tp_size` the sequence, the boundary of the stages is of a rank's own tokens; of what is
    summed a piece gives or takes all of them.

    >>> from schedir.models.gpt_segments import build_boundaries
    >>> behind = build_boundaries((2, 1), (8, 64))
    >>> [str(one) for one in behind[0]], str(behind[1])
    (['[8, 64] of torch.float32', '[8, 64] of torch.float32'], '[8, 64] of torch.float32')
    >>> str(build_boundaries((1, 5), (8, 64), frozen_stages=1)[1][1])
    '[8, 64] of torch.float32 without gradient'
    >>> str(build_boundaries((5,), (8, 64), tp_size=2)[0][0])
    '[8, 64] of torch.float32, taken as [16, 64]'
    """
    one, found = Boundary.from_shape(boundary), list[Any]()
    many = len(one.shape) - 2
    all_tokens = tuple(tp_size * n if k == many else n for k, n in enumerate(one.shape))
    met = {
        ENTRY_COLLECTIVE: replace(one, received_shape=all_tokens),
        EXIT_COLLECTIVE: replace(one, shape=all_tokens, received_shape=one.shape),
    }
    for stage, number in enumerate(segments_per_stage):
        stream = [one] * (number - 1)
        if frozen_stages and stage == frozen_stages:
            stream[:2] = [replace(one, requires_grad=False) for _ in stream[:2]]
        found += [
            (met[LAYER_BOUNDARIES[k % len(LAYER_BOUNDARIES)]], own) for k, own in enumerate(stream)
        ] + [one]
    return dict(enumerate(found[:-1]))


def _embed(stage: Stage, x: Tensor) -> Tensors:
    return (stage.embed(x),)


def _apply_head(stage: Stage, x: Tensor) -> Tensors:
    return (stage.apply_head(x),)


class _LayerSegments:
    """What pieces compute of the layer of a number."""

    def __init__(self, layer_key: str) -> None:
        self.layer_key = layer_key

    def make_step(self, run: Callable[..., Tensors], *names: str) -> _SegmentStep:
        return _SegmentStep([f"layers.{self.layer_key}.{name}" for name in names], run)

    def get_layer(self, stage: Stage) -> Layer:
        found = stage.layers[self.layer_key]
        assert isinstance(found, Layer)
        return found

    def normalize(self, stage: Stage, x: Tensor) -> Tensors:
        return self.get_layer(stage).attention_norm(x), x

    def attend(self, stage: Stage, normed: Tensor, x: Tensor) -> Tensors:
        layer = self.get_layer(stage)
        return layer.proj.project_partial(layer.attend(layer.qkv.forward_local(normed))), x

    def add_attention(self, stage: Stage, part: Tensor, x: Tensor) -> Tensors:
        layer = self.get_layer(stage)
        with layer.use_dropout_stream():
            x, normed = layer.add_attention(layer.proj.add_bias(part), x)
        return normed, x

    def feed_forward(self, stage: Stage, normed: Tensor, x: Tensor) -> Tensors:
        layer = self.get_layer(stage)
        return layer.down.project_partial(layer.activate(layer.up.project_local(normed))), x

    def add_feed_forward(self, stage: Stage, part: Tensor, x: Tensor) -> Tensors:
        layer = self.get_layer(stage)
        with layer.use_dropout_stream():
            if layer.dropout_rate:  # what `add_attention` has drawn
                F.dropout(x.detach(), layer.dropout_rate)
            return (layer.add_feed_forward(layer.down.add_bias(part), x),)
