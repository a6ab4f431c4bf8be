"""Lowering: the passes that make a program of a draft, in their order.

The one list of them: `compile` folds over it, `check` counts what it expects, and whoever lowers
another draft in the way of a program repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schedir.ir.fields import YES_OR_NO, Kind
from schedir.passes.overlap import EARLY_GATHERS, EARLY_RECEIVES, GROUP_OPPOSITES
from schedir.passes.record import Pass
from schedir.passes.reductions import (
    OPTIMIZER_STEP,
    REDUCE_GRADS,
    REDUCE_HOLDERS,
    REDUCE_NORM,
    REDUCE_TIED,
)
from schedir.passes.scatter_gather import SCATTER_GATHER
from schedir.passes.share_slots import SHARE_SLOTS
from schedir.passes.transfers import TRANSFER

LOWERING: Final[tuple[Pass, ...]] = (
    TRANSFER,
    SCATTER_GATHER,
    REDUCE_GRADS,
    REDUCE_HOLDERS,
    REDUCE_TIED,
    REDUCE_NORM,
    OPTIMIZER_STEP,
    GROUP_OPPOSITES,
    EARLY_GATHERS,
    EARLY_RECEIVES,
    SHARE_SLOTS,
)

# What passes take beside the options of all lowering: by name the kind, and what it is for.
OPTIONS: Final[Mapping[str, tuple[Kind, str]]] = {
    option: (each.kinds.get(option, YES_OR_NO), each.about or f"with the pass {each.name}")
    for each in LOWERING
    for option in each.options
}
