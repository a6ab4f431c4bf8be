"""Compute the `Sizes` of a plan: the bytes of each stage in memory and in messages."""

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
    """The number of parameters of each stage on one GPU, of shape (stages,).

    Attributes:
        common: The number of parameters that all replicas have.
        experts: The number of parameters of the experts on one of `ep` replicas.
    """

    common: Floats
    experts: Floats

    @property
    def total(self) -> Floats:
        """The sum of common and expert parameters, of shape (stages,)."""
        return self.common + self.experts


def count_stage_params(
    model: TransformerSpec, plan: ParallelPlan, shape: PipelineShape
) -> StageParameters:
    """Return the number of parameters of each stage on one GPU.

    Args:
        model: The model.
        plan: The plan.
        shape: The pipeline shape. Its placement decides whether a tied embedding and head are on
            one rank.
    """
    layers = np.array(get_layers_per_stage(model, plan), float)
    common, experts = (layers * params for params in count_layer_params(model, plan.tp, plan.ep))
    table, norm, matrix = count_end_params(model, plan.tp)
    shared = model.tied and shape.replica_ranks[0, 0] == shape.replica_ranks[0, -1]
    common[0] += table
    common[-1] += norm + (0 if shared else matrix)
    return StageParameters(common, experts)


def count_stage_replicated(model: TransformerSpec, plan: ParallelPlan) -> StageParameters:
    """Return the number of parameters of each stage that each tensor-parallel rank has in full.

    These are `count_replicated_params` of the layers, the position embedding and the last norm.
    With sequence parallelism, each rank computes their gradients from its part of the tokens.

    Args:
        model: The model.
        plan: The plan.
    """
    layers = np.array(get_layers_per_stage(model, plan), float)
    common, experts = (layers * params for params in count_replicated_params(model, plan.ep))
    common[0] += model.position_params
    common[-1] += count_end_params(model, plan.tp)[1]
    return StageParameters(common, experts)


def compute_sizes(
    model: TransformerSpec,
    plan: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes = ADAM,
) -> Sizes:
    """Return the sizes of each stage of a plan on one GPU. Activations are per microbatch.

    - A layer saves the bytes of `compute_saved_bytes`. The first stage also saves the mask of its
      dropout.
    - The last stage also saves the inputs of its norm and of the logits, and the logits in 32 bits.
      I replaces the 32-bit logits by their gradients in the number type of activations (arXiv
      2205.05198, section 4.3). `SoftwareConstants.logit_bytes` includes more buffers of the loss.
    - The memory of recomputation is a buffer of each rank. If recomputation is a separate
      instruction (`SoftwareConstants.recompute_ahead` is 1), this memory is part of the saved
      activations instead. Stages then keep their inputs until they recompute.

    Args:
        model: The model.
        plan: The plan.
        shape: The pipeline shape of the program.
        constants: Constants of the software. None means `SoftwareConstants()`.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.
    """
    constants = constants or SoftwareConstants()
    layers = np.array(get_layers_per_stage(model, plan), float)
    item = state_bytes.params  # Activations have the number type of weights.
    saved_per_layer, recompute_bytes = compute_saved_bytes(model, plan, item, constants)
    tokens = float(plan.microbatch_size) * (model.sequence // plan.cp) * model.hidden
    cut = plan.tp if plan.sequence_parallel else 1
    logits = float(plan.microbatch_size) * (model.sequence // plan.cp) * -(-model.vocab // plan.tp)
    recomputes_ahead = plan.recompute == "full" and constants.recompute_ahead == 1
    saved = layers * (saved_per_layer + recompute_bytes if recomputes_ahead else saved_per_layer)
    saved[0] += constants.mask_bytes * tokens / cut
    saved[-1] += 2 * item * tokens / cut + 4 * logits
    deferred = saved.copy()
    deferred[-1] -= max(4 - item, 0) * logits
    buffers = np.zeros(len(layers))
    for rank_stages in shape.stages_on_rank if not recomputes_ahead else ():
        buffers[rank_stages[0]] = recompute_bytes * min(1.0, layers[list(rank_stages)].max())
    numbers = count_stage_params(model, plan, shape)
    buffers[-1] += (constants.logit_bytes - 4) * logits
    buffers += sum(compute_state_buffers(model, plan, shape, constants, state_bytes).values())
    state_sizes = {name: size * numbers.total for name, size in state_bytes._asdict().items()}
    if is_sharded("optimizer", plan.zero):
        extra_experts = _count_extra_experts(plan, numbers) * plan.dp * plan.cp
        state_sizes["optimizer"] += state_bytes.optimizer * extra_experts
    return Sizes(
        activation=item * tokens / cut,
        saved=_to_tuple(saved),
        deferred_wgrad=_to_tuple(deferred),
        recompute_inputs=None if recomputes_ahead or plan.recompute != "full" else _to_tuple(saved),
        buffers=_to_tuple(buffers),
        **{name: _to_tuple(value) for name, value in state_sizes.items()},
    )


def compute_state_buffers(
    model: TransformerSpec,
    plan: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> dict[str, Floats]:
    """Return the bytes of `Sizes.buffers` that are not activations, by the fields of `GpuMemory`.

    Args:
        model: The model.
        plan: The plan.
        shape: The pipeline shape of the program.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.

    Returns:
        The bytes of each stage, of shape (stages,). "buffers" has the unsharded buffers of ZeRO 1.
        "weights" and "gradients" have those bytes of experts that `Sizes` does not include,
        because it divides them among more replicas than ZeRO does. The optimizer state is never
        gathered, so the size `optimizer` includes all its bytes.
    """
    numbers = count_stage_params(model, plan, shape)
    extra_experts = _count_extra_experts(plan, numbers)
    return {
        "buffers": constants.unsharded_bytes * (plan.zero == 1) * numbers.total,
        "weights": state_bytes.params * is_sharded("params", plan.zero) * extra_experts,
        "gradients": state_bytes.grads * is_sharded("grads", plan.zero) * extra_experts,
    }


def _count_extra_experts(plan: ParallelPlan, numbers: StageParameters) -> Floats:
    """Return the parameters of experts on a replica, less those of an even division by ZeRO."""
    replicas = plan.dp * plan.cp
    return numbers.experts * (1 / max(replicas // plan.ep, 1) - 1 / replicas)


def _to_tuple(value: Floats) -> tuple[float, ...]:
    return tuple(value.tolist())
