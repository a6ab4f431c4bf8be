"""Trainers that the planner knows: their constants, states, options and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.config_export import ON_PROCESSORS
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_division import layers_of
from schedir.planner.transformer.memory_estimate import ADAM_32, StateBytes, states_for
from schedir.planner.transformer.stage_bytes import numbers_of, sizes
from schedir.planner.transformer.transformer_spec import TransformerSpec

# ---------------------------------------------------------------- sizes of the GPT

# The exact number of bytes that the GPT of `schedir train` holds on a CPU.


_ITEM = 4  # bytes of a number
# Bytes of a token in the head: the index of its logit, whether it counts, and whether its logit is
# in this rank's slice of the vocabulary.
_PICKED = 10
# Bytes of a token in a slice of the embedding: its row, and, if saved, whether the slice has it.
_FOUND, _FOUND_LATE = 9, 8


def own_sizes(
    model: TransformerSpec,
    choice: ParallelPlan,
    shape: PipelineShape,
    constants: SoftwareConstants | None = None,
    states: StateBytes = ADAM_32,
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
    layers, t = np.array(layers_of(model, choice), float), choice.tp
    tokens = float(choice.microbatch_size * model.sequence)
    wide = _ITEM * tokens * model.hidden
    logits = _ITEM * tokens * -(-model.vocab // t)
    products = wide * (4 + 12 / t)
    saved = layers * (products + _ITEM * tokens * (4 + model.heads // t))
    saved[0] += _FOUND * tokens * (t > 1)
    saved[-1] += 2 * wide + logits + (2 * _ITEM + _PICKED) * tokens
    tape = layers * products
    tape[0] += wide + _FOUND_LATE * tokens * (t > 1)
    tape[-1] += wide + logits
    both = saved + wide
    both[-1] = max(saved[-1], tape[-1])
    checkpoint = np.full(len(layers), wide)
    checkpoint[0] = 0.0  # the input of the first stage is the tokens, which are not counted
    numbers = numbers_of(model, choice, shape).all
    each = {name: size * numbers for name, size in states._asdict().items()}
    each |= {
        "saved": saved,
        "deferred_wgrad": tape,
        "saved_and_deferred": both,
        "checkpoint": checkpoint,
    }
    return Sizes(activation=wide, **{name: tuple(value.tolist()) for name, value in each.items()})


# ---------------------------------------------------------------- the trainer of a cluster


SizesOf = Callable[
    [TransformerSpec, ParallelPlan, PipelineShape, SoftwareConstants, StateBytes], Sizes
]


class Trainer(NamedTuple):
    """What a price depends on that differs between trainers.

    Args:
        constants: The constants of the model of time and memory.
        states: The bytes of weights, gradients and optimizer per parameter.
        options: The options with which its programs are compiled.
        sizes: Returns the sizes of its stages.
    """

    constants: SoftwareConstants
    states: StateBytes
    options: Mapping[str, Any]
    sizes: SizesOf


def trainer_for(
    cluster: Cluster, constants: SoftwareConstants | None = None, states: StateBytes | None = None
) -> Trainer:
    """Return the trainer of a cluster.  For a cluster of CPUs it is `schedir train`.

    `schedir train` runs recomputed forwards ahead of their backwards.  On a CPU no caching
    allocator holds free memory.

    >>> from schedir import planner
    >>> trainer_for(planner.cluster_preset("a100")).constants == planner.SoftwareConstants()
    True
    """
    constants, states = constants or SoftwareConstants(), states or states_for(cluster)
    if cluster.processors is None:
        return Trainer(constants, states, {}, sizes)
    return Trainer(replace(constants, **_OWN), states, ON_PROCESSORS, own_sizes)


_OWN: Final = {"allocator_share": 0.0, "reserved": 0.0, "recompute_ahead": 1.0}
