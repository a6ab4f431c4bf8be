"""Find the part of a step that limits the speed of a plan, and describe it in words."""

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

# Differences between two plans that are smaller than this share of the step time are ignored.
_MIN_DIFFERENCE = 0.01


def describe_plan(plan: ParallelPlan) -> str:
    """Return a short description of a plan.

    Args:
        plan: The plan. The description always has the recomputation. It has `cp`, `ep` and the
            other memory options only if they differ from the default. It has `stages_per_rank` only
            if this number is more than 1 and the schedule allows several values.

    Example:
        >>> from schedir.planner import ParallelPlan
        >>> plan = ParallelPlan(pp=4, tp=8, dp=2, stages_per_rank=2, schedule="zb_v", zero=1)
        >>> describe_plan(plan)
        'pp 4 tp 8 dp 2 microbatch_size 1 zb_v, without recomputation, zero 1'
    """
    shows_stages_per_rank = (
        get_formulas(plan.schedule).stages_per_rank == "many" and plan.stages_per_rank > 1
    )
    degrees = [f"pp {plan.pp} tp {plan.tp} dp {plan.dp}"]
    degrees += [f"cp {plan.cp}"] * (plan.cp > 1) + [f"ep {plan.ep}"] * (plan.ep > 1)
    degrees += [f"microbatch_size {plan.microbatch_size} {plan.schedule}"]
    degrees += [f"stages_per_rank {plan.stages_per_rank}"] * shows_stages_per_rank
    recompute = plan.recompute
    memory_options = (
        "without recomputation" if recompute == "none" else f"with {recompute} recomputation"
    )
    memory_options += f", zero {plan.zero}" * (plan.zero > 0)
    memory_options += ", sequence parallel" * plan.sequence_parallel
    memory_options += ", activations offloaded" * (plan.offload != "none")
    memory_options += ", optimizer state on the host" * (plan.optimizer_placement != "device")
    return f"{' '.join(degrees)}, {memory_options}"


def no_fit_error(
    model: TransformerSpec, cluster: Cluster, plan_table: PlanTable, *, offload: bool = False
) -> UsageError:
    """Return the error to raise if no plan fits in the GPU memory.

    Args:
        model: The model of the plans.
        cluster: The cluster of the plans.
        plan_table: The plans that were estimated. The hint describes the plan with the least
            memory.
        offload: True if plans that offload were searched too. The table has only plans that do not
            offload.

    Returns:
        The error. The caller raises this error.
    """
    least = plan_table.estimate_at(model, cluster, int(plan_table.total_memory.argmin()))
    return UsageError(
        f"none of {len(plan_table.plans)} plans fits into the {format_bytes(cluster.memory)} of a "
        f"GPU{', and no plan with offload was found that fits' * offload}: the smallest plan"
        f"{' without offload' * offload} needs {format_bytes(least.memory.total)}",
        hint=f"the smallest plan is {describe_plan(least)}",
        fields=["memory"],
    )


def attach_bottleneck(cluster: Cluster, estimate: PlanEstimate) -> PlanEstimate:
    """Return the estimate with its bottleneck set, without a comparison with other plans.

    Args:
        cluster: The cluster of the plan.
        estimate: The estimate of the plan.

    Returns:
        The estimate with `bottleneck` and `explanation`. `bottleneck` is "memory" if the plan does
        not fit. Otherwise `bottleneck` is the largest part of the step other than compute, or
        "compute" if all other parts are 0.
    """
    excess_bytes = estimate.memory.total - cluster.memory
    if excess_bytes > 0:
        need = f"the plan needs {format_bytes(excess_bytes)} more than a GPU has"
        return _explain(estimate, "memory", need)
    largest = max(StepBreakdown._fields[1:], key=lambda name: getattr(estimate.breakdown, name))
    part = getattr(estimate.breakdown, largest)
    if part <= 0:
        return _explain(estimate, "compute", "no other part takes time")
    return _explain(estimate, largest, f"{part:.4g} s of {estimate.step_time:.4g} s")


def _explain(estimate: PlanEstimate, bottleneck: str, explanation: str) -> PlanEstimate:
    return replace(estimate, bottleneck=bottleneck, explanation=f"{bottleneck}: {explanation}")


def attach_relative_bottleneck(
    model: TransformerSpec,
    cluster: Cluster,
    estimate: PlanEstimate,
    index: int,
    plan_table: PlanTable,
) -> PlanEstimate:
    """Return the estimate with the bottleneck that follows from a comparison with other plans.

    The first rule that applies sets `bottleneck`:

    - If another plan that fits is faster, each part of the step is compared with the same part of
      the fastest plan that fits. The bottleneck is the part with the largest excess in seconds.
    - If faster plans exist but none of them fits, the bottleneck is "memory". `explanation` names
      the faster plan that uses the least memory.
    - Otherwise the bottleneck is the largest part, other than compute, that is shorter in another
      plan that fits. If there is no such part, the bottleneck is "compute".

    Args:
        model: The model of the plans.
        cluster: The cluster of the plans.
        estimate: The estimate to explain.
        index: The column of this plan in `plan_table`.
        plan_table: All plans to compare with. Their times are from the closed form, or from
            simulations if `PlanTable.with_simulations` replaced them.
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
        excess = format_bytes(other.memory.total - cluster.memory)
        return _explain(
            estimate,
            "memory",
            f"a faster plan needs {excess} more than a GPU has. Its step takes "
            f"{_describe_step_time(other, mine)}: {describe_plan(other)}",
        )
    for part in np.argsort(-own).tolist():
        less = fits & (plan_table.breakdowns[part] < own[part] - _MIN_DIFFERENCE * mine)
        if part != 0 and less.any():
            return _attach_difference(
                model, cluster, estimate, own, plan_table, _find_fastest(plan_table, less), part
            )
    return _explain(estimate, "compute", "no plan that fits saves 1 % of the step in another part")


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
    """Return the estimate with a bottleneck: a part of the step that is shorter in another plan.

    `part_index` is the index of this part in `StepBreakdown`. None means the part with the largest
    difference.
    """
    other = plan_table.estimate_at(model, cluster, other_index)
    differences = breakdown - np.array(other.breakdown)
    part_index = int(differences.argmax()) if part_index is None else part_index
    name = StepBreakdown._fields[part_index]
    text = f"another plan spends {differences[part_index]:.4g} s less on it"
    if other.step_time >= breakdown.sum():
        worst = int(differences.argmin())
        text += f", but {-differences[worst]:.4g} s more on {StepBreakdown._fields[worst]}"
    step_time = _describe_step_time(other, float(breakdown.sum()))
    return _explain(estimate, name, f"{text}. Its step takes {step_time}: {describe_plan(other)}")


def _describe_step_time(other: PlanEstimate, step_time: float) -> str:
    """Return the step time of another plan, and its difference from `step_time` in percent."""
    change = other.step_time / step_time - 1
    return f"{other.step_time:.4g} s, {abs(change):.1%} {'more' if change > 0 else 'less'}"
