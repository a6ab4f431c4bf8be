"""Describe the trainers that the planner supports: constants, state bytes, options and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_compilation import CPU_COMPILE_OPTIONS
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.memory_estimate import ADAM_32, StateBytes, get_state_bytes
from schedir.planner.transformer.stage_sizes import compute_sizes, count_stage_params
from schedir.planner.transformer.transformer_spec import TransformerSpec

# ---------------------------------------------------------------- sizes of the GPT

# These sizes are exact for the GPT of `schedir train` on a CPU.


_FLOAT_BYTES = 4  # Bytes of a float32 number.
# Bytes that the head saves for each target token: the int64 index of its logit, and two booleans.
# One boolean is the mask. The other is true if this rank's slice of the vocabulary has the token.
_TARGET_BYTES = 10
# Bytes that a slice of the embedding keeps for each token. The forward saves an int64 index of a
# row, and a boolean that is true if the slice contains the token. Until W, only the index is kept.
_LOOKUP_BYTES, _DEFERRED_LOOKUP_BYTES = 9, 8


def compute_trainer_sizes(
    model: TransformerSpec,
    plan: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes = ADAM_32,
) -> Sizes:
    """Return the sizes of each stage: its model states, and the tensors saved per microbatch.

    All numbers have 32 bits. A layer of hidden size h on t tensor-parallel ranks saves 4h + 12h/t
    numbers per token. It saves no masks, because there is no dropout. It also saves two numbers per
    norm, and one number per attention head instead of its scores. The head saves the input of its
    norm and of its matrix, the logits and the targets. For a split backward, each linear layer
    keeps its input and the gradient of its output. `measure_sizes` measures the same sizes
    (tests/cpu/test_planner_memory.py). With ZeRO `measure_sizes` also counts the padding of
    buckets.

    Args:
        model: The model.
        plan: The plan.
        shape: The pipeline shape of the plan.
        constants: Not used. The parameter exists because the size functions of all trainers have
            the same signature.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.

    Returns:
        Bytes of each stage.

    References:
        arXiv 2205.05198, section 4.1: activations of a layer.
        arXiv 2307.08691, section 3.1.2: the number per head.
    """
    layers, t = np.array(get_layers_per_stage(model, plan), float), plan.tp
    tokens = float(plan.microbatch_size * model.sequence)
    boundary = _FLOAT_BYTES * tokens * model.hidden
    logits = _FLOAT_BYTES * tokens * -(-model.vocab // t)
    linear_inputs = boundary * (4 + 12 / t)
    saved = layers * (linear_inputs + _FLOAT_BYTES * tokens * (4 + model.heads // t))
    saved[0] += _LOOKUP_BYTES * tokens * (t > 1)
    saved[-1] += 2 * boundary + logits + (2 * _FLOAT_BYTES + _TARGET_BYTES) * tokens
    deferred = layers * linear_inputs
    deferred[0] += boundary + _DEFERRED_LOOKUP_BYTES * tokens * (t > 1)
    deferred[-1] += boundary + logits
    saved_and_deferred = saved + boundary
    saved_and_deferred[-1] = max(saved[-1], deferred[-1])
    checkpoint = np.full(len(layers), boundary)
    checkpoint[0] = 0.0  # The input of the first stage is the tokens, which sizes do not include.
    params = count_stage_params(model, plan, shape).total
    size_values = {name: size * params for name, size in state_bytes._asdict().items()}
    size_values |= {
        "saved": saved,
        "deferred_wgrad": deferred,
        "saved_and_deferred": saved_and_deferred,
        "recompute_inputs": checkpoint,
    }
    return Sizes(
        activation=boundary, **{name: tuple(value.tolist()) for name, value in size_values.items()}
    )


# ---------------------------------------------------------------- the trainer of a cluster


SizesFunction = Callable[
    [TransformerSpec, ParallelPlan, PipelineShape, SoftwareConstants, StateBytes], Sizes
]


class Trainer(NamedTuple):
    """Properties of a trainer that change the estimates of the planner.

    Args:
        constants: The constants of the software.
        state_bytes: The bytes of weights, gradients and optimizer state per parameter.
        compile_options: The options with which the trainer calls `schedir.compile`.
        compute_sizes: The function that returns the sizes of the stages of a plan.
    """

    constants: SoftwareConstants
    state_bytes: StateBytes
    compile_options: Mapping[str, Any]
    compute_sizes: SizesFunction


def get_trainer(
    cluster: Cluster,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes | None = None,
) -> Trainer:
    """Return the trainer that the planner assumes on a cluster.

    For GPUs the trainer has `constants` and `state_bytes`. For CPUs the trainer is `schedir train`.
    It can run a recomputed forward before the gradient for the backward arrives. On CPUs, `schedir
    train` has no caching allocator, and `Sizes` include all its memory.

    Args:
        cluster: The cluster.
        constants: Constants of the software. None means `SoftwareConstants()`. For CPUs,
            `_TRAIN_CONSTANTS` replaces some of these constants.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter. None means the
            bytes for the cluster's number type (`get_state_bytes`).

    Example:
        >>> from schedir import planner
        >>> get_trainer(planner.cluster_preset("a100")).constants == planner.SoftwareConstants()
        True
    """
    constants = constants or SoftwareConstants()
    state_bytes = state_bytes or get_state_bytes(cluster)
    if cluster.processors is None:
        return Trainer(constants, state_bytes, {}, compute_sizes)
    return Trainer(
        replace(constants, **_TRAIN_CONSTANTS),
        state_bytes,
        CPU_COMPILE_OPTIONS,
        compute_trainer_sizes,
    )


_TRAIN_CONSTANTS: Final = {"allocator_share": 0.0, "reserved_bytes": 0.0, "recompute_ahead": 1.0}
