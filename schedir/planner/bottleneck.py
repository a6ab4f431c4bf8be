"""Name what limits the speed of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.planner.estimate.schedule_formulas import get_formulas
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate, StepBreakdown
from schedir.planner.plan_table import PlanTable
from schedir.planner.transformer.transformer_spec import TransformerSpec

_MIN_DIFFERENCE = 0.01  # of a step: what is less than that is no reason


def describe_plan(plan: ParallelPlan) -> str:
    """A choice in a few words.

    >>> from schedir.planner import ParallelPlan
    >>> plan = ParallelPlan(pp=4, tp=8, dp=2, stages_per_rank=2, schedule="zb_v", zero=1)
    >>> describe_plan(plan)
    'pp 4 tp 8 dp 2 microbatch_size 1 zb_v, without recomputation, zero 1'
    """
    many = get_formulas(plan.schedule).stages_per_rank == "many" and plan.stages_per_rank > 1
    told = [f"pp {plan.pp} tp {plan.tp} dp {plan.dp}"]
    told += [f"cp {plan.cp}"] * (plan.cp > 1) + [f"ep {plan.ep}"] * (plan.ep > 1)
    told += [f"microbatch_size {plan.microbatch_size} {plan.schedule}"]
    told += [f"stages_per_rank {plan.stages_per_rank}"] * many
    again = plan.recompute
    rest = "without recomputation" if again == "none" else f"with {again} recomputation"
    rest += f", zero {plan.zero}" * (plan.zero > 0)
    rest += ", sequence cut over slices" * plan.sequence_parallel
    rest += ", activations offloaded" * (plan.offload != "none")
    rest += ", states on the host" * (plan.optimizer_placement != "device")
    return f"{' '.join(told)}, {rest}"


def no_fit_error(
    model: TransformerSpec, cluster: Cluster, plan_table: PlanTable, *, offload: bool = False
) -> UsageError:
    """The refusal where no plan has room, with the one that takes the least; where one could also
    `offload`, of those that do not."""
    least = plan_table.estimate_at(model, cluster, int(plan_table.total_memory.argmin()))
    return UsageError(
        f"none of {len(plan_table.plans)} plans fits into {format_bytes(cluster.memory)} a GPU"
        f"{', and none that offloads was found that does' * offload}: the least "
        f"holds {format_bytes(least.memory.total)}{' without' * offload}",
        hint=f"that is {describe_plan(least)}",
        fields=["memory"],
    )


def attach_bottleneck(cluster: Cluster, estimate: PlanEstimate) -> PlanEstimate:
    """A plan with its largest part beside what the model asks for, where no others are known."""
    over = estimate.memory.total - cluster.memory
    if over > 0:
        return replace(
            estimate,
            bottleneck="memory",
            explanation=f"memory: it does not fit by {format_bytes(over)}",
        )
    largest = max(StepBreakdown._fields[1:], key=lambda name: getattr(estimate.breakdown, name))
    part = getattr(estimate.breakdown, largest)
    if part <= 0:
        return replace(estimate, bottleneck="compute", explanation="compute: there is nothing else")
    return replace(
        estimate,
        bottleneck=largest,
        explanation=f"{largest}: {part:.4g} s of {estimate.step_time:.4g} s",
    )


def attach_relative_bottleneck(
    model: TransformerSpec,
    cluster: Cluster,
    estimate: PlanEstimate,
    index: int,
    plan_table: PlanTable,
) -> PlanEstimate:
    """A plan with what all others say of it, of which it is number `index`; times in closed form.

    Where another one that fits is faster, `bottleneck` is the part that it has most less of.  Else
    it is "memory", if faster ones do not fit: `explanation` tells of the one that needs least more.
    Else it is the largest part that another plan has less of.
    """
    fits = plan_table.total_memory <= cluster.memory
    mine, own = plan_table.step_times[index], plan_table.breakdowns[:, index]
    faster = plan_table.step_times < mine * (1 - _MIN_DIFFERENCE)
    if (better := faster & fits).any():
        return _attach_difference(
            model, cluster, estimate, own, plan_table, _find_fastest(plan_table, better)
        )
    if faster.any():
        near = int(np.where(faster, plan_table.total_memory, np.inf).argmin())
        other = plan_table.estimate_at(model, cluster, near)
        return replace(
            estimate,
            bottleneck="memory",
            explanation=f"memory: the next faster plan, {describe_plan(other)}, takes "
            f"{_describe_step_time(other, mine)} and "
            f"does not fit by {format_bytes(other.memory.total - cluster.memory)}",
        )
    for part in np.argsort(-own).tolist():
        less = fits & (plan_table.breakdowns[part] < own[part] - _MIN_DIFFERENCE * mine)
        if part != 0 and less.any():
            return _attach_difference(
                model, cluster, estimate, own, plan_table, _find_fastest(plan_table, less), part
            )
    return replace(
        estimate, bottleneck="compute", explanation="compute: no plan has less of anything else"
    )


def _find_fastest(plan_table: PlanTable, mask: NDArray[np.bool_]) -> int:
    return int(np.where(mask, plan_table.step_times, np.inf).argmin())


def _attach_difference(
    model: TransformerSpec,
    cluster: Cluster,
    estimate: PlanEstimate,
    breakdown: Any,
    plan_table: PlanTable,
    other_index: int,
    part_index: int | None = None,
) -> PlanEstimate:
    """A plan beside another one: what that has less of, most if no part is told."""
    other = plan_table.estimate_at(model, cluster, other_index)
    differences = breakdown - np.array(other.breakdown)
    part_index = int(differences.argmax()) if part_index is None else part_index
    name = StepBreakdown._fields[part_index]
    text = f"{name}: {describe_plan(other)}, has {differences[part_index]:.4g} s less of it"
    if other.step_time >= breakdown.sum():
        worst = int(differences.argmin())
        text += f", and {-differences[worst]:.4g} s more of {StepBreakdown._fields[worst]}"
    return replace(
        estimate,
        bottleneck=name,
        explanation=f"{text}: it takes {_describe_step_time(other, float(breakdown.sum()))}",
    )


def _describe_step_time(other: PlanEstimate, step_time: float) -> str:
    """How long another plan takes, beside this one."""
    change = other.step_time / step_time - 1
    return f"{other.step_time:.4g} s, {abs(change):.1%} {'more' if change > 0 else 'less'}"
