"""Compute the Sizes of a plan: bytes of each stage, in memory and in messages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import is_cut
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import layers_of
from schedir.planner.transformer.memory_estimate import (
    ADAM,
    StateBytes,
    ends_numbers,
    layer_kept,
    layer_numbers,
    whole_numbers,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec

Floats = NDArray[np.float64]


class StageParameters(NamedTuple):
    """Numbers of weights of each stage, on one GPU: those that all replicas have, and those of
    experts, of which `ep` replicas have a part each."""

    common: Floats
    experts: Floats

    @property
    def all(self) -> Floats:
        """Both."""
        return self.common + self.experts


def numbers_of(
    model: TransformerSpec, choice: ParallelPlan, shape: PipelineShape
) -> StageParameters:
    """The numbers of each stage's weights, by `layer_numbers` and `ends_numbers`."""
    layers = np.array(layers_of(model, choice), float)
    common, experts = (layers * each for each in layer_numbers(model, choice.tp, choice.ep))
    table, norm, matrix = ends_numbers(model, choice.tp)
    shared = model.tied and shape.holders[0, 0] == shape.holders[0, -1]
    common[0] += table
    common[-1] += norm + (0 if shared else matrix)
    return StageParameters(common, experts)


def seen_in_parts(model: TransformerSpec, choice: ParallelPlan) -> StageParameters:
    """Of `numbers_of`, those that each slice has whole, and sees its own part of a sequence with
    where slices share that: `whole_numbers` of layers, positions, and the head's norm."""
    layers = np.array(layers_of(model, choice), float)
    common, experts = (layers * each for each in whole_numbers(model, choice.ep))
    common[0] += model.sequence * model.hidden
    common[-1] += ends_numbers(model, choice.tp)[1]
    return StageParameters(common, experts)


def sizes(
    model: TransformerSpec,
    choice: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    states: StateBytes = ADAM,
) -> Sizes:
    """What each stage of a choice holds, and what it sends: bytes of one GPU, of one microbatch.

    Of a layer it is `layer_kept`; the first stage also keeps the mask of its dropout, and the last
    the inputs of its norm and of the logits, and these in 32 bits, or their gradient, in the bits
    of activations, once that is made (arXiv 2205.05198, section 4.3).  What a layer holds while it
    runs again is there once for each rank, as a buffer, unless stages run again ahead of their
    backwards (`SoftwareConstants.recompute_ahead`): then they keep their inputs until they do, and
    all behind that.
    """
    constants = constants or SoftwareConstants()
    layers = np.array(layers_of(model, choice), float)
    item = states.params  # bytes of an activation
    kept, again = layer_kept(model, choice, item)
    tokens = float(choice.microbatch_size) * (model.sequence // choice.cp) * model.hidden
    cut = choice.tp if choice.sequence_parallel else 1
    logits = (
        float(choice.microbatch_size) * (model.sequence // choice.cp) * -(-model.vocab // choice.tp)
    )
    ahead = choice.recompute == "full" and constants.recompute_ahead == 1
    saved = layers * (kept + again if ahead else kept)
    saved[0] += tokens / cut
    saved[-1] += 2 * item * tokens / cut + 4 * logits
    tape = saved.copy()
    tape[-1] -= max(4 - item, 0) * logits
    buffers = np.zeros(len(layers))
    for own in shape.stages_of if not ahead else ():
        buffers[own[0]] = again * min(1.0, layers[list(own)].max())
    numbers = numbers_of(model, choice, shape)
    each = {name: size * numbers.all for name, size in states._asdict().items()}
    # Of experts fewer replicas have parts of each: what these hold more.  The optimizer's are never
    # whole, so that they may count as if all replicas had parts of more experts.
    every = choice.dp * choice.cp
    more = numbers.experts * (1 / max(every // choice.ep, 1) - 1 / every)
    for name, size in states._asdict().items():
        if not is_cut(name, choice.zero):
            continue
        if name == "optimizer":
            each[name] += size * more * every
        else:
            buffers += size * more
    return Sizes(
        activation=item * tokens / cut,
        saved=_each(saved),
        deferred_wgrad=_each(tape),
        checkpoint=None if ahead or choice.recompute != "full" else _each(saved),
        buffers=_each(buffers),
        **{name: _each(value) for name, value in each.items()},
    )


def _each(value: Floats) -> tuple[float, ...]:
    return tuple(value.tolist())
