"""Trainers that the planner knows: their constants, states, options and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.config_export import CPU_COMPILE_OPTIONS
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.memory_estimate import ADAM_32, StateBytes, get_state_bytes
from schedir.planner.transformer.stage_bytes import compute_sizes, count_stage_params
from schedir.planner.transformer.transformer_spec import TransformerSpec

# ---------------------------------------------------------------- sizes of the GPT

# The exact number of bytes that the GPT of `schedir train` holds on a CPU.


_FLOAT_BYTES = 4  # bytes of a number
# Bytes of a token in the head: the index of its logit, whether it counts, and whether its logit is
# in this rank's slice of the vocabulary.
_TARGET_BYTES = 10
# Bytes of a token in a slice of the embedding: its row, and, if saved, whether the slice has it.
_LOOKUP_BYTES, _DEFERRED_LOOKUP_BYTES = 9, 8


def compute_trainer_sizes(
    model: TransformerSpec,
    plan: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    state_bytes: StateBytes = ADAM_32,
) -> Sizes:
    """Return the sizes of each stage of a choice: its weights, and what it saves of a microbatch.

    All numbers have 32 bits.  A layer of width h on t slices saves 4h + 12h/t numbers per token, as
    in arXiv 2205.05198, section 4.1, but without masks, because there is no dropout.  It also saves
    what the paper leaves out: two numbers per norm, and one per head in place of its scores (arXiv
    2307.08691, section 3.1.2).  The head saves the input of its norm and its own, the logits, and
    which of them is right.  The tape of a split backward has the input of each linear layer and the
    gradient of its output.  `measure_sizes` measures the same (tests/cpu/test_own_sizes.py); with
    ZeRO it also counts the padding of buckets.
    """
    layers, t = np.array(get_layers_per_stage(model, plan), float), plan.tp
    tokens = float(plan.microbatch_size * model.sequence)
    wide = _FLOAT_BYTES * tokens * model.hidden
    logits = _FLOAT_BYTES * tokens * -(-model.vocab // t)
    products = wide * (4 + 12 / t)
    saved = layers * (products + _FLOAT_BYTES * tokens * (4 + model.heads // t))
    saved[0] += _LOOKUP_BYTES * tokens * (t > 1)
    saved[-1] += 2 * wide + logits + (2 * _FLOAT_BYTES + _TARGET_BYTES) * tokens
    tape = layers * products
    tape[0] += wide + _DEFERRED_LOOKUP_BYTES * tokens * (t > 1)
    tape[-1] += wide + logits
    both = saved + wide
    both[-1] = max(saved[-1], tape[-1])
    checkpoint = np.full(len(layers), wide)
    checkpoint[0] = 0.0  # the input of the first stage is the tokens, which are not counted
    numbers = count_stage_params(model, plan, shape).total
    each = {name: size * numbers for name, size in state_bytes._asdict().items()}
    each |= {
        "saved": saved,
        "deferred_wgrad": tape,
        "saved_and_deferred": both,
        "checkpoint": checkpoint,
    }
    return Sizes(activation=wide, **{name: tuple(value.tolist()) for name, value in each.items()})


# ---------------------------------------------------------------- the trainer of a cluster


SizesFunction = Callable[
    [TransformerSpec, ParallelPlan, PipelineShape, SoftwareConstants, StateBytes], Sizes
]


class Trainer(NamedTuple):
    """What a price depends on that differs between trainers.

    Args:
        constants: The constants of the model of time and memory.
        state_bytes: The bytes of weights, gradients and optimizer per parameter.
        compile_options: The options with which its programs are compiled.
        compute_sizes: Returns the sizes of its stages.
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
    """Return the trainer of a cluster.  For a cluster of CPUs it is `schedir train`.

    `schedir train` runs recomputed forwards ahead of their backwards.  On a CPU no caching
    allocator holds free memory.

    >>> from schedir import planner
    >>> get_trainer(planner.cluster_preset("a100")).constants == planner.SoftwareConstants()
    True
    """
    constants, state_bytes = (
        constants or SoftwareConstants(),
        state_bytes or get_state_bytes(cluster),
    )
    if cluster.processors is None:
        return Trainer(constants, state_bytes, {}, compute_sizes)
    return Trainer(
        replace(constants, **_TRAIN_CONSTANTS),
        state_bytes,
        CPU_COMPILE_OPTIONS,
        compute_trainer_sizes,
    )


_TRAIN_CONSTANTS: Final = {"allocator_share": 0.0, "reserved_bytes": 0.0, "recompute_ahead": 1.0}
