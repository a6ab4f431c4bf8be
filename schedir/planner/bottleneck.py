"""Name what limits the speed of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.planner.estimate.schedule_formulas import family
from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate, StepBreakdown
from schedir.planner.plan_table import PlanTable
from schedir.planner.transformer.transformer_spec import TransformerSpec

_LESS = 0.01  # of a step: what is less than that is no reason


def in_short(choice: ParallelPlan) -> str:
    """A choice in a few words.

    >>> from schedir.planner import ParallelPlan
    >>> in_short(ParallelPlan(pp=4, tp=8, dp=2, stages_per_rank=2, microbatches=8, schedule="zb_v",
    ...     zero=1))
    'pp 4 tp 8 dp 2 microbatch_size 1 zb_v, without recomputation, zero 1'
    """
    many = family(choice.schedule).stages == "many" and choice.stages_per_rank > 1
    told = [f"pp {choice.pp} tp {choice.tp} dp {choice.dp}"]
    told += [f"cp {choice.cp}"] * (choice.cp > 1) + [f"ep {choice.ep}"] * (choice.ep > 1)
    told += [f"microbatch_size {choice.microbatch_size} {choice.schedule}"]
    told += [f"stages_per_rank {choice.stages_per_rank}"] * many
    again = choice.recompute
    rest = "without recomputation" if again == "none" else f"with {again} recomputation"
    rest += f", zero {choice.zero}" * (choice.zero > 0)
    rest += ", sequence cut over slices" * choice.sequence_parallel
    rest += ", activations offloaded" * (choice.offload != "none")
    rest += ", states on the host" * (choice.optimizer_placement != "device")
    return f"{' '.join(told)}, {rest}"


def nothing_fits(
    model: TransformerSpec, cluster: Cluster, found: PlanTable, *, offload: bool = False
) -> UsageError:
    """The refusal where no plan has room, with the one that takes the least; where one could also
    `offload`, of those that do not."""
    least = found.at(model, cluster, int(found.total.argmin()))
    return UsageError(
        f"none of {len(found.plans)} plans fits into {format_bytes(cluster.memory)} a GPU"
        f"{', and none that offloads was found that does' * offload}: the least "
        f"holds {format_bytes(least.memory.total)}{' without' * offload}",
        hint=f"that is {in_short(least)}",
        fields=["memory"],
    )


def alone(cluster: Cluster, one: PlanEstimate) -> PlanEstimate:
    """A plan with its largest part beside what the model asks for, where no others are known."""
    over = one.memory.total - cluster.memory
    if over > 0:
        return replace(one, bound="memory", why=f"memory: it does not fit by {format_bytes(over)}")
    largest = max(StepBreakdown._fields[1:], key=lambda name: getattr(one.parts, name))
    part = getattr(one.parts, largest)
    if part <= 0:
        return replace(one, bound="compute", why="compute: there is nothing else")
    return replace(one, bound=largest, why=f"{largest}: {part:.4g} s of {one.step:.4g} s")


def among(
    model: TransformerSpec, cluster: Cluster, one: PlanEstimate, at: int, found: PlanTable
) -> PlanEstimate:
    """A plan with what all others say of it, of which it is number `at`; times in closed form.

    Where another one that fits is faster, `bound` is the part that it has most less of.  Else it is
    "memory", if faster ones do not fit: `why` tells of the one that needs least more.  Else it is
    the largest part that another plan has less of.
    """
    fits = found.total <= cluster.memory
    mine, own = found.step[at], found.parts[:, at]
    faster = found.step < mine * (1 - _LESS)
    if (better := faster & fits).any():
        return _beside(model, cluster, one, own, found, _fastest(found, better))
    if faster.any():
        near = int(np.where(faster, found.total, np.inf).argmin())
        other = found.at(model, cluster, near)
        return replace(
            one,
            bound="memory",
            why=f"memory: the next faster plan, {in_short(other)}, takes {_takes(other, mine)} and "
            f"does not fit by {format_bytes(other.memory.total - cluster.memory)}",
        )
    for part in np.argsort(-own).tolist():
        less = fits & (found.parts[part] < own[part] - _LESS * mine)
        if part != 0 and less.any():
            return _beside(model, cluster, one, own, found, _fastest(found, less), part)
    return replace(one, bound="compute", why="compute: no plan has less of anything else")


def _fastest(found: PlanTable, which: NDArray[np.bool_]) -> int:
    return int(np.where(which, found.step, np.inf).argmin())


def _beside(
    model: TransformerSpec,
    cluster: Cluster,
    one: PlanEstimate,
    own: Any,
    found: PlanTable,
    at: int,
    part: int | None = None,
) -> PlanEstimate:
    """A plan beside another one: what that has less of, most if no part is told."""
    other = found.at(model, cluster, at)
    differences = own - np.array(other.parts)
    part = int(differences.argmax()) if part is None else part
    name = StepBreakdown._fields[part]
    text = f"{name}: {in_short(other)}, has {differences[part]:.4g} s less of it"
    if other.step >= own.sum():
        worst = int(differences.argmin())
        text += f", and {-differences[worst]:.4g} s more of {StepBreakdown._fields[worst]}"
    return replace(one, bound=name, why=f"{text}: it takes {_takes(other, float(own.sum()))}")


def _takes(other: PlanEstimate, mine: float) -> str:
    """How long another plan takes, beside this one."""
    change = other.step / mine - 1
    return f"{other.step:.4g} s, {abs(change):.1%} {'more' if change > 0 else 'less'}"
