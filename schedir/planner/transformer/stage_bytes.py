"""Compute the Sizes of a plan: bytes of each stage, in memory and in messages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.zero_states import is_sharded
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.memory_estimate import (
    ADAM,
    StateBytes,
    compute_saved_bytes,
    count_end_params,
    count_layer_params,
    count_replicated_params,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec

Floats = NDArray[np.float64]


class StageParameters(NamedTuple):
    """Numbers of weights of each stage, on one GPU: those that all replicas have, and those of
    experts, of which `ep` replicas have a part each."""

    common: Floats
    experts: Floats

    @property
    def total(self) -> Floats:
        """Both."""
        return self.common + self.experts


def count_stage_params(
    model: TransformerSpec, plan: ParallelPlan, shape: PipelineShape
) -> StageParameters:
    """The numbers of each stage's weights, by `count_layer_params` and `count_end_params`."""
    layers = np.array(get_layers_per_stage(model, plan), float)
    common, experts = (layers * each for each in count_layer_params(model, plan.tp, plan.ep))
    table, norm, matrix = count_end_params(model, plan.tp)
    shared = model.tied and shape.replica_ranks[0, 0] == shape.replica_ranks[0, -1]
    common[0] += table
    common[-1] += norm + (0 if shared else matrix)
    return StageParameters(common, experts)


def count_stage_replicated(model: TransformerSpec, plan: ParallelPlan) -> StageParameters:
    """Of `count_stage_params`, those that each slice has whole, and sees its own part of a sequence
    with where slices share that: `count_replicated_params` of layers, positions, and the head's
    norm."""
    layers = np.array(get_layers_per_stage(model, plan), float)
    common, experts = (layers * each for each in count_replicated_params(model, plan.ep))
    common[0] += model.sequence * model.hidden
    common[-1] += count_end_params(model, plan.tp)[1]
    return StageParameters(common, experts)


def compute_sizes(
    model: TransformerSpec,
    plan: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes = ADAM,
) -> Sizes:
    """What each stage of a choice holds, and what it sends: bytes of one GPU, of one microbatch.

    Of a layer it is `compute_saved_bytes`; the first stage also keeps the mask of its dropout, and
    the last the inputs of its norm and of the logits, and these in 32 bits, or their gradient, in
    the bits of activations, once that is made (arXiv 2205.05198, section 4.3).  What a layer holds
    while it runs again is there once for each rank, as a buffer, unless stages run again ahead of
    their backwards (`SoftwareConstants.recompute_ahead`): then they keep their inputs until they
    do, and all behind that.
    """
    constants = constants or SoftwareConstants()
    layers = np.array(get_layers_per_stage(model, plan), float)
    item = state_bytes.params  # bytes of an activation
    kept, again = compute_saved_bytes(model, plan, item)
    tokens = float(plan.microbatch_size) * (model.sequence // plan.cp) * model.hidden
    cut = plan.tp if plan.sequence_parallel else 1
    logits = float(plan.microbatch_size) * (model.sequence // plan.cp) * -(-model.vocab // plan.tp)
    ahead = plan.recompute == "full" and constants.recompute_ahead == 1
    saved = layers * (kept + again if ahead else kept)
    saved[0] += tokens / cut
    saved[-1] += 2 * item * tokens / cut + 4 * logits
    tape = saved.copy()
    tape[-1] -= max(4 - item, 0) * logits
    buffers = np.zeros(len(layers))
    for own in shape.stages_on_rank if not ahead else ():
        buffers[own[0]] = again * min(1.0, layers[list(own)].max())
    numbers = count_stage_params(model, plan, shape)
    each = {name: size * numbers.total for name, size in state_bytes._asdict().items()}
    # Of experts fewer replicas have parts of each: what these hold more.  The optimizer's are never
    # whole, so that they may count as if all replicas had parts of more experts.
    every = plan.dp * plan.cp
    more = numbers.experts * (1 / max(every // plan.ep, 1) - 1 / every)
    for name, size in state_bytes._asdict().items():
        if not is_sharded(name, plan.zero):
            continue
        if name == "optimizer":
            each[name] += size * more * every
        else:
            buffers += size * more
    return Sizes(
        activation=item * tokens / cut,
        saved=_to_tuple(saved),
        deferred_wgrad=_to_tuple(tape),
        checkpoint=None if ahead or plan.recompute != "full" else _to_tuple(saved),
        buffers=_to_tuple(buffers),
        **{name: _to_tuple(value) for name, value in each.items()},
    )


def _to_tuple(value: Floats) -> tuple[float, ...]:
    return tuple(value.tolist())
