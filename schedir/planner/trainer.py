"""Trainer: what of a price is the trainer's: its constants, its states, how it lowers programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from schedir.ir.cluster import Cluster
from schedir.ir.plan import Plan
from schedir.ir.sizes import Sizes
from schedir.planner.choice import Choice
from schedir.planner.constants import Constants
from schedir.planner.memory import States, states_for
from schedir.planner.model import Model
from schedir.planner.own_sizes import own_sizes
from schedir.planner.runnable import ON_PROCESSORS
from schedir.planner.sizes import sizes

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
