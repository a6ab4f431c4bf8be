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
from schedir.ir.pipeline.stage_segments import ENTERS, LEAVES
from schedir.models.gpt import Layer, Stage
from schedir.models.gpt_config import LAYER
from schedir.models.partial_module import part_of
from schedir.runtime.boundaries.boundary import Boundary

Given = tuple[Tensor, ...]


class _SegmentStep(NamedTuple):
    """Something that a piece computes of what it is given, and the parameters that it takes."""

    names: list[str]
    run: Callable[..., Given]


class StageSegment(Stage):
    """A piece of a stage: it has some of its parameters, and computes what they are for."""

    def __init__(self, stage: Stage, steps: list[_SegmentStep]) -> None:
        vars(self).update(vars(part_of(stage, [name for step in steps for name in step.names])))
        self.steps = steps

    def forward(self, *given: Tensor) -> Any:
        """One tensor, or what is summed and the residual stream."""
        for step in self.steps:
            given = step.run(self, *given)
        return given if len(given) > 1 else given[0]


def pieces(stage: Stage) -> list[nn.Module]:
    """The pieces of a stage, in order: stages of a program whose `cut` says so many.

    They share its parameters, and draw what it draws for dropout.  With one tensor-parallel rank
    they are as right: nothing is summed.  Raises ModelError for a stage that is the whole model,
    and whose embedding is its head's weight.

    >>> from schedir import PipelineShape, compile, schedules
    >>> from schedir.models.gpt import GPTConfig, build_stage
    >>> from schedir.models.gpt_segments import cut_of, pieces
    >>> stages = [build_stage(GPTConfig(layers=4), s, 2) for s in range(2)]
    >>> program = compile(schedules.one_f_one_b, PipelineShape(2, 4), tied_weights=True,
    ...     stage_segments=cut_of([2, 2]))
    >>> program.shape.stages, sum(len(pieces(stage)) for stage in stages)
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
    found = [[_SegmentStep(["embedding", "positions"] * (stage.embedding is not None), _begin)]]
    for number in stage.layers:
        own = _LayerSegments(number)
        found[-1].append(own.step(own.enter, "attention_norm"))
        found.append([own.step(own.attend, "qkv", "proj.weight")])
        found.append([own.step(own.between, "proj.bias", "mlp_norm")])
        found.append([own.step(own.feed, "up", "down.weight")])
        found.append([own.step(own.add, "down.bias")])
    found[-1].append(_SegmentStep(["norm", "head"] * (stage.head is not None), _end))
    return [StageSegment(stage, steps) for steps in found]


def cut_of(layers: Iterable[int]) -> tuple[int, ...]:
    """How many pieces stages of so many layers have, as `compile(..., stage_segments=...)` takes
    it."""
    return tuple(len(LAYER) * number + 1 for number in layers)


def boundaries(
    cut: Sequence[int],
    boundary: Boundary | Sequence[int],
    frozen_stages: int = 0,
    share: int = 1,
) -> dict[int, Any]:
    """What passes behind each piece of stages that are cut so: a boundary of the stages, or two.

    Of the first stage behind `frozen_stages` ones the residual stream depends on nothing that is
    trained, and has no gradient, until its attention adds to it.  Where so many tensor-parallel
    ranks `share` the sequence, the boundary of the stages is of a rank's own tokens; of what is
    summed a piece gives or takes all of them.

    >>> from schedir.models.gpt_segments import boundaries
    >>> behind = boundaries((2, 1), (8, 64))
    >>> [str(one) for one in behind[0]], str(behind[1])
    (['[8, 64] of torch.float32', '[8, 64] of torch.float32'], '[8, 64] of torch.float32')
    >>> str(boundaries((1, 5), (8, 64), frozen_stages=1)[1][1])
    '[8, 64] of torch.float32 without gradient'
    >>> str(boundaries((5,), (8, 64), share=2)[0][0])
    '[8, 64] of torch.float32, taken as [16, 64]'
    """
    one, found = Boundary.of(boundary), list[Any]()
    many = len(one.shape) - 2
    all_tokens = tuple(share * n if k == many else n for k, n in enumerate(one.shape))
    met = {
        ENTERS: replace(one, taken=all_tokens),
        LEAVES: replace(one, shape=all_tokens, taken=one.shape),
    }
    for stage, number in enumerate(cut):
        stream = [one] * (number - 1)
        if frozen_stages and stage == frozen_stages:
            stream[:2] = [replace(one, grad=False) for _ in stream[:2]]
        found += [(met[LAYER[k % len(LAYER)]], own) for k, own in enumerate(stream)] + [one]
    return dict(enumerate(found[:-1]))


def _begin(stage: Stage, x: Tensor) -> Given:
    return (stage.begin(x),)


def _end(stage: Stage, x: Tensor) -> Given:
    return (stage.end(x),)


class _LayerSegments:
    """What pieces compute of the layer of a number."""

    def __init__(self, number: str) -> None:
        self.number = number

    def step(self, run: Callable[..., Given], *names: str) -> _SegmentStep:
        return _SegmentStep([f"layers.{self.number}.{name}" for name in names], run)

    def of(self, stage: Stage) -> Layer:
        found = stage.layers[self.number]
        assert isinstance(found, Layer)
        return found

    def enter(self, stage: Stage, x: Tensor) -> Given:
        return self.of(stage).attention_norm(x), x

    def attend(self, stage: Stage, normed: Tensor, x: Tensor) -> Given:
        layer = self.of(stage)
        return layer.proj.part(layer.heads(layer.qkv.entered(normed))), x

    def between(self, stage: Stage, part: Tensor, x: Tensor) -> Given:
        layer = self.of(stage)
        with layer.drawing():
            x, normed = layer.between(layer.proj.with_bias(part), x)
        return normed, x

    def feed(self, stage: Stage, normed: Tensor, x: Tensor) -> Given:
        layer = self.of(stage)
        return layer.down.part(layer.widened(layer.up.entered_product(normed))), x

    def add(self, stage: Stage, part: Tensor, x: Tensor) -> Given:
        layer = self.of(stage)
        with layer.drawing():
            if layer.share:  # what `between` has drawn
                F.dropout(x.detach(), layer.share)
            return (layer.add(layer.down.with_bias(part), x),)
