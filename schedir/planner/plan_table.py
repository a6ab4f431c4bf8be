"""Estimate the time and memory of many plans in closed form, with array operations."""

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
    """Estimates of many plans, as arrays with one column for each plan.

    Attributes:
        plans: The plans.
        breakdowns: Parts of the steps in seconds: a row for each field of `StepBreakdown`.
        memory: Bytes on the rank that uses the most memory: a row for each field of `GpuMemory`.
        step_times: Step times in seconds, the sums of `breakdowns`, of shape (plans,).
        total_memory: Bytes of each plan, the sums of `memory`, of shape (plans,).
    """

    plans: PlanColumns
    breakdowns: Floats
    memory: Floats
    step_times: Floats
    total_memory: Floats

    def estimate_at(self, model: TransformerSpec, cluster: Cluster, index: int) -> PlanEstimate:
        """Return one plan with its estimates.

        Args:
            model: The model of the plans.
            cluster: The cluster of the plans.
            index: The column of the plan.
        """
        return attach_estimates(
            model, cluster, self.plans.plan_at(model, index),
            StepBreakdown(*self.breakdowns[:, index].tolist()), GpuMemory(*self.memory[:,
                                                                                   index].tolist()),
        )  # fmt: skip

    def select(self, mask: NDArray[np.bool_]) -> PlanTable:
        """Return a table of some of the plans.

        Args:
            mask: The plans to keep, of shape (plans,).
        """
        arrays = (column[..., mask] for column in self[1:])
        return PlanTable(self.plans.select(mask), *arrays)

    def with_simulations(self, finalists: list[tuple[PlanEstimate, int]]) -> PlanTable:
        """Return a table in which simulated results replace the estimates of some plans.

        Args:
            finalists: The simulated plans, each with its column.
        """
        parts = self.breakdowns.copy()
        memory = self.memory.copy()
        for estimate, row in finalists:
            parts[:, row], memory[:, row] = estimate.breakdown, estimate.memory
        return PlanTable(self.plans, parts, memory, parts.sum(axis=0), memory.sum(axis=0))


def estimate_closed_form(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> PlanTable:
    """Estimate all plans in closed form.

    Args:
        model: The model.
        cluster: The cluster.
        plans: The plans.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.
    """
    shares = plans.compute_shares(model)
    memory_table = estimate_memory(model, cluster, plans, shares, constants, state_bytes)
    breakdowns = estimate_breakdowns(
        model, cluster, plans, shares, memory_table, constants, state_bytes
    )
    fullest = memory_table.memory.sum(axis=0).argmax(axis=1)
    memory = memory_table.memory[:, np.arange(len(plans)), fullest]
    return PlanTable(plans, breakdowns, memory, breakdowns.sum(axis=0), memory.sum(axis=0))
