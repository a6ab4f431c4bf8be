"""Estimate the time and memory of all plans at once, in closed form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.cluster import Cluster
from schedir.planner.estimate.closed_form import estimate_breakdowns
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import GpuMemory, PlanEstimate, StepBreakdown
from schedir.planner.plan_columns import Floats, PlanColumns
from schedir.planner.plan_estimate import attach_estimates
from schedir.planner.transformer.memory_estimate import StateBytes, estimate_memory
from schedir.planner.transformer.transformer_spec import TransformerSpec


class PlanTable(NamedTuple):
    """What many plans take and hold: parts of their steps, and memory of the fullest rank, a row
    for each field of `StepBreakdown` and `GpuMemory`; and the sums of these."""

    plans: PlanColumns
    breakdowns: Floats
    memory: Floats
    step_times: Floats
    total_memory: Floats

    def estimate_at(self, model: TransformerSpec, cluster: Cluster, index: int) -> PlanEstimate:
        """One of them."""
        return attach_estimates(
            model, cluster, self.plans.plan_at(model, index),
            StepBreakdown(*self.breakdowns[:, index].tolist()), GpuMemory(*self.memory[:,
                                                                                   index].tolist()),
        )  # fmt: skip

    def select(self, mask: NDArray[np.bool_]) -> PlanTable:
        """Some of them."""
        arrays = (each[..., mask] for each in self[1:])
        return PlanTable(self.plans.select(mask), *arrays)

    def with_simulations(self, finalists: list[tuple[PlanEstimate, int]]) -> PlanTable:
        """The same, with what simulations tell of some of them, each with its number."""
        parts, memory = self.breakdowns.copy(), self.memory.copy()
        for one, at in finalists:
            parts[:, at], memory[:, at] = one.breakdown, one.memory
        return PlanTable(self.plans, parts, memory, parts.sum(axis=0), memory.sum(axis=0))


def estimate_closed_form(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> PlanTable:
    """The closed form of all plans."""
    shares = plans.compute_shares(model)
    holds = estimate_memory(model, plans, shares, constants, state_bytes)
    found = estimate_breakdowns(model, cluster, plans, shares, holds, constants, state_bytes)
    fullest = holds.memory.sum(axis=0).argmax(axis=1)
    memory = holds.memory[:, np.arange(len(plans)), fullest]
    return PlanTable(plans, found, memory, found.sum(axis=0), memory.sum(axis=0))
