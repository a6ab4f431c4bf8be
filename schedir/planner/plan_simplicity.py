"""Prefer the simplest of the plans that are about as fast as the fastest plan.

A difference of 2 % is smaller than the error of a prediction. Each mechanism that a plan uses can
fail, must be understood, and costs time that the prediction does not contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from schedir.planner.parallel_plan import ParallelPlan, PlanEstimate

PREFERENCE_TOLERANCE: Final = 0.02  # A share of the shortest step time.
_PLAIN_SCHEDULES: Final = ("gpipe", "one_f_one_b")  # One stage per rank, and full backwards.


def measure_complexity(plan: ParallelPlan) -> tuple[int, int]:
    """Return the complexity of a plan as a sort key. The simplest plan has the smallest key.

    The simplest plan uses the fewest mechanisms. Each dimension of parallelism (pp, tp, dp, cp, ep)
    above 1 is a mechanism. The other mechanisms are several stages per rank, a schedule other than
    GPipe and 1F1B, recomputation, ZeRO 2 or 3, sequence parallelism, and each offload. ZeRO 1 is
    no mechanism, because it needs as much communication as data parallelism without ZeRO. If two
    plans have the same number of mechanisms, the plan with fewer stages per rank is simpler.

    Args:
        plan: The plan.

    Returns:
        The number of mechanisms, and the stages per rank.
    """
    mechanisms = (
        *(degree > 1 for degree in (plan.pp, plan.tp, plan.dp, plan.cp, plan.ep)),
        plan.stages_per_rank > 1,
        plan.schedule not in _PLAIN_SCHEDULES,
        plan.recompute != "none",
        plan.zero > 1,
        plan.sequence_parallel,
        plan.offload != "none",
        plan.optimizer_placement != "device",
    )
    return sum(mechanisms), plan.stages_per_rank


def prefer_simplest(plans: Sequence[PlanEstimate]) -> list[PlanEstimate]:
    """Move one plan to the front: the simplest plan within 2 % of the fastest.

    Of equally simple plans, this plan has the shortest predicted step.

    Args:
        plans: The plans, the fastest first.

    Returns:
        The simplest plan, and then all other plans in their order.

    Example:
        >>> from schedir import planner
        >>> gpt = planner.TransformerSpec(layers=4, hidden=256, heads=4, vocab=8192, sequence=256)
        >>> plans = planner.plan(gpt, planner.cluster_preset("a100"), 64, closed_form_only=True)
        >>> preferred, fastest, *_ = planner.prefer_simplest(plans)
        >>> preferred.zero, fastest.zero, preferred.step_time <= 1.02 * fastest.step_time
        (1, 3, True)
    """
    longest = (1 + PREFERENCE_TOLERANCE) * min((plan.step_time for plan in plans), default=0.0)
    fast = [plan for plan in plans if plan.step_time <= longest]
    preferred = min(
        fast,
        key=lambda plan: (*measure_complexity(plan), plan.step_time, plan.memory.total),
        default=None,
    )
    return [*filter(None, [preferred]), *(plan for plan in plans if plan is not preferred)]
