"""Attach the estimates of time and memory to a plan."""

from __future__ import annotations

from dataclasses import fields

from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import (
    NOWHERE,
    GpuMemory,
    HostMemory,
    ParallelPlan,
    PlanEstimate,
    StepBreakdown,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec


def plain(choice: ParallelPlan) -> ParallelPlan:
    """The choice alone, without what is said of its time and memory."""
    return ParallelPlan(**{f.name: getattr(choice, f.name) for f in fields(ParallelPlan)})


def priced(
    model: TransformerSpec,
    cluster: Cluster,
    choice: ParallelPlan,
    parts: StepBreakdown,
    memory: GpuMemory,
    *,
    exact: bool = False,
    host: HostMemory = NOWHERE,
) -> PlanEstimate:
    """A choice with its step, what a GPU does of the model in it, and whether it fits."""
    step = sum(parts)
    flops = model.flops(choice.batch) / step / choice.gpus
    return PlanEstimate(
        **vars(plain(choice)), step=step, parts=parts, memory=memory, flops=flops,
        mfu=flops / cluster.roof, exact=exact, host=host,
        fits=memory.total <= cluster.memory and host.total <= (cluster.host_memory or 0.0),
    )  # fmt: skip
