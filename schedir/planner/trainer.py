"""Trainer: what of a price is the trainer's: its constants, its states, how it lowers programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cluster import Cluster
from schedir.ir.plan import Plan
from schedir.ir.sizes import Sizes
from schedir.planner.choice import Choice
from schedir.planner.constants import Constants
from schedir.planner.division import layers_of
from schedir.planner.memory import ADAM_32, States, states_for
from schedir.planner.model import Model
from schedir.planner.runnable import ON_PROCESSORS
from schedir.planner.sizes import numbers_of, sizes

# ---------------------------------------------------------------- sizes of the GPT

# Bytes that the GPT of `schedir train` holds on a CPU.  They are exact.


_ITEM = 4  # bytes of a number
_PICKED = 10  # bytes of a token: where its logit is, whether it counts, and whether it is here
_FOUND, _FOUND_LATE = 9, 8  # of a slice's rows of the embedding: where, and whether it is here


def own_sizes(
    model: Model,
    choice: Choice,
    plan: Plan,
    constants: Constants | None = None,
    states: States = ADAM_32,
) -> Sizes:
    """What each stage of a choice holds of a microbatch, and its weights, in 32 bits.

    A layer of width h on t slices keeps 4h + 12h/t numbers of each token, which are those of arXiv
    2205.05198, section 4.1, without masks, for nothing is dropped; and what the paper leaves out:
    two of each norm, and one for each head instead of its scores (arXiv 2307.08691, section 3.1.2).
    The head keeps its norm's input and its own, logits, and which of them is right.  A tape, of
    what is split, has the input of each linear layer and its gradient.  `sizes_of` measures the
    same, in tests/cpu/test_own_sizes.py; with ZeRO it counts the padding of buckets, too.
    """
    layers, t = np.array(layers_of(model, choice), float), choice.t
    tokens = float(choice.b * model.sequence)
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
    checkpoint[0] = 0.0  # tokens are there all the time
    numbers = numbers_of(model, choice, plan).all
    each = {name: size * numbers for name, size in states._asdict().items()}
    each |= {"saved": saved, "tape": tape, "both": both, "checkpoint": checkpoint}
    return Sizes(activation=wide, **{name: tuple(value.tolist()) for name, value in each.items()})


SizesOf = Callable[[Model, Choice, Plan, Constants, States], Sizes]


class Trainer(NamedTuple):
    """`options` are those of its programs, `sizes` tells what its stages hold."""

    constants: Constants
    states: States
    options: Mapping[str, Any]
    sizes: SizesOf


def trainer_for(
    cluster: Cluster, constants: Constants | None = None, states: States | None = None
) -> Trainer:
    """The trainer of a cluster.  Where there are processors it is `schedir train`, which runs
    forwards again ahead of their backwards, and no allocator keeps what is free.

    >>> from schedir import planner
    >>> trainer_for(planner.cluster("a100")).constants == planner.Constants()
    True
    """
    constants, states = constants or Constants(), states or states_for(cluster)
    if cluster.processors is None:
        return Trainer(constants, states, {}, sizes)
    return Trainer(replace(constants, **_OWN), states, ON_PROCESSORS, own_sizes)


_OWN: Final = {"allocator_share": 0.0, "reserved": 0.0, "recompute_ahead": 1.0}
