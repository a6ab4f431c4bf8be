"""Attach estimates of time and memory to a plan, or remove them."""

from __future__ import annotations

from dataclasses import fields

from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import (
    NO_HOST_MEMORY,
    GpuMemory,
    HostMemory,
    ParallelPlan,
    PlanEstimate,
    StepBreakdown,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec


def strip_estimates(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan without its estimates.

    Args:
        plan: A plan or a `PlanEstimate`.
    """
    return ParallelPlan(**{f.name: getattr(plan, f.name) for f in fields(ParallelPlan)})


def attach_estimates(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    breakdown: StepBreakdown,
    memory: GpuMemory,
    *,
    is_simulated: bool = False,
    host_memory: HostMemory = NO_HOST_MEMORY,
) -> PlanEstimate:
    """Return a plan with its step time, the utilization of its GPUs, and whether it fits.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        breakdown: The times of the parts of the plan's step, in seconds.
        memory: Peak bytes of the GPU with the highest peak.
        is_simulated: True if the estimates are from a simulation of the program.
        host_memory: Peak bytes of host memory of the process with the highest peak.
    """
    step = sum(breakdown)
    flops = model.count_flops(plan.batch) / step / plan.gpus
    return PlanEstimate(
        **vars(strip_estimates(plan)), step_time=step, breakdown=breakdown, memory=memory,
        flops_per_second=flops,
        mfu=flops / cluster.peak_flops, is_simulated=is_simulated, host_memory=host_memory,
        fits=memory.total <= cluster.memory and host_memory.total <= (cluster.host_memory or 0.0),
    )  # fmt: skip
