"""Estimate the time and memory of all plans at once, in closed form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.cluster import Cluster
from schedir.planner.estimate.closed_form import parts
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import GpuMemory, PlanEstimate, StepBreakdown
from schedir.planner.plan_columns import Floats, PlanColumns
from schedir.planner.plan_estimate import priced
from schedir.planner.transformer.memory_estimate import StateBytes, held
from schedir.planner.transformer.transformer_spec import TransformerSpec


class PlanTable(NamedTuple):
    """What many plans take and hold: parts of their steps, and memory of the fullest rank, a row
    for each field of `StepBreakdown` and `GpuMemory`; and the sums of these."""

    plans: PlanColumns
    parts: Floats
    memory: Floats
    step: Floats
    total: Floats

    def at(self, model: TransformerSpec, cluster: Cluster, number: int) -> PlanEstimate:
        """One of them."""
        return priced(
            model, cluster, self.plans.choice(model, number),
            StepBreakdown(*self.parts[:, number].tolist()), GpuMemory(*self.memory[:,
                                                                                   number].tolist()),
        )  # fmt: skip

    def take(self, which: NDArray[np.bool_]) -> PlanTable:
        """Some of them."""
        arrays = (each[..., which] for each in self[1:])
        return PlanTable(self.plans.take(which), *arrays)

    def told(self, finalists: list[tuple[PlanEstimate, int]]) -> PlanTable:
        """The same, with what simulations tell of some of them, each with its number."""
        parts, memory = self.parts.copy(), self.memory.copy()
        for one, at in finalists:
            parts[:, at], memory[:, at] = one.parts, one.memory
        return PlanTable(self.plans, parts, memory, parts.sum(axis=0), memory.sum(axis=0))


def closed_form(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    constants: SoftwareConstants,
    states: StateBytes,
) -> PlanTable:
    """The closed form of all plans."""
    shares = plans.shares(model)
    holds = held(model, plans, shares, constants, states)
    found = parts(model, cluster, plans, shares, holds, constants, states)
    fullest = holds.memory.sum(axis=0).argmax(axis=1)
    memory = holds.memory[:, np.arange(len(plans)), fullest]
    return PlanTable(plans, found, memory, found.sum(axis=0), memory.sum(axis=0))
