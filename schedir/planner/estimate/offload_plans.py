"""Simulate plans that fit in GPU memory only if they offload to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import MemoryLimitError, UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL
from schedir.planner.bottleneck import attach_bottleneck, describe_plan
from schedir.planner.estimate.simulated_estimate import simulate_plan
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import OffloadMode, ParallelPlan, PlanEstimate, StatePlacement
from schedir.planner.plan_table import PlanTable
from schedir.planner.transformer.memory_estimate import StateBytes, compute_saved_by_plan
from schedir.planner.transformer.transformer_spec import TransformerSpec

MAX_OFFLOAD_PLANS: Final = 24  # The search ends when it has found this many plans that fit.
_MAX_SIMULATIONS: Final = 96  # The search ends after this many simulations, to limit its time.
_FORWARD_SHARE: Final = 1 / 3  # The share of forwards in compute: a backward takes twice as long.
# While one stage computes, the data of another stage are copied. So the device has the optimizer
# states or the saved activations of two stages at the same time.
_RESIDENT_STAGES: Final = 2


class OffloadOption(NamedTuple):
    """What a plan offloads to the host: activations, optimizer states or both.

    Attributes:
        offload: See `ParallelPlan.offload`.
        optimizer_placement: See `ParallelPlan.optimizer_placement`.
    """

    offload: OffloadMode
    optimizer_placement: StatePlacement


OFFLOAD_OPTIONS: Final = (
    OffloadOption("fit", "device"),
    OffloadOption("none", "host"),
    OffloadOption("fit", "host"),
)


def simulate_offload_plans(
    model: TransformerSpec,
    cluster: Cluster,
    plan_table: PlanTable,
    top: int,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
    step_times: list[float],
) -> list[PlanEstimate]:
    """Simulate the plans with offload that are likely to be among the best.

    Args:
        model: The model.
        cluster: The cluster. The cluster needs `host_bandwidth` and `host_memory`.
        plan_table: The closed-form estimates of all plans, without offload.
        top: The number of plans that the caller needs.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.
        step_times: Step times of the plans without offload, in seconds. The search ends when `top`
            plans are faster than the estimate of the next candidate.

    Returns:
        The simulated plans with offload that fit.
    """
    best, steps = list[PlanEstimate](), sorted(step_times)
    for try_count, (guess, row, option) in enumerate(
        _guess_offload_plans(model, cluster, plan_table, constants, state_bytes)
    ):
        worst = steps[top - 1] if len(steps) >= top else np.inf
        if guess >= worst or len(best) >= MAX_OFFLOAD_PLANS or try_count >= _MAX_SIMULATIONS:
            break
        candidate = replace(plan_table.plans.plan_at(model, row), **option._asdict())
        try:
            estimate = simulate_plan(model, cluster, candidate, constants, state_bytes=state_bytes)
        except MemoryLimitError:
            continue
        if estimate.fits:
            best.append(attach_bottleneck(cluster, estimate))
            steps = sorted([*steps, estimate.step_time])
    return best


def mask_state_offload_plans(plan_table: PlanTable) -> NDArray[np.bool_]:
    """Return a mask of the plans that are useful only if they offload optimizer states.

    These plans have pp 1, several stages per rank, and unsharded gradients.

    Args:
        plan_table: The plans.
    """
    plans = plan_table.plans
    mask: NDArray[np.bool_] = (
        (plans.pp == 1) & (plans.stages_per_rank > 1) & (plans.zero < SHARDED_FROM_LEVEL["grads"])
    )
    return mask


def _guess_offload_plans(
    model: TransformerSpec,
    cluster: Cluster,
    plan_table: PlanTable,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> Iterator[tuple[float, int, OffloadOption]]:
    """Yield plans that do not fit, each with an offload that may make it fit, the fastest first.

    Each result is (estimated seconds of a step, column of `plan_table`, offload). The times are
    rough: they only decide which plans are simulated, and in which order. If the copies of
    offloaded activations take longer than the compute that hides them, the estimate adds the
    difference. If only one microbatch is in flight, only forwards hide the copies to the host, and
    only backwards hide the copies from the host. Offloaded optimizer states add the time to load
    the states of all stages and to store the states of one stage.
    """
    plans, share = plan_table.plans, 1 + constants.allocator_share
    weights, gradients, optimizer, activations, *_ = plan_table.memory
    compute, recompute, tensor = plan_table.breakdowns[:3]
    assert cluster.host_bandwidth is not None and cluster.host_memory is not None
    memory_limit = (cluster.memory - constants.reserved_bytes) / share
    microbatch = (
        compute_saved_by_plan(model, plans, state_bytes.params)[0][:, 0] * model.layers / plans.pp
    )
    hiding_time = np.clip(activations / microbatch - 1, _FORWARD_SHARE, 1) * (
        compute + recompute + tensor
    )
    resident = np.minimum(activations, _RESIDENT_STAGES * microbatch / plans.stages_per_rank)
    guesses = []
    for option in OFFLOAD_OPTIONS:
        offloaded_state = optimizer * (option.optimizer_placement == "host")
        excess = (
            np.maximum(plan_table.total_memory - share * offloaded_state - cluster.memory, 0)
            / share
        )
        state_memory = (
            weights
            + gradients
            + offloaded_state * np.minimum(_RESIDENT_STAGES / plans.stages_per_rank, 1)
        )
        is_possible = (plan_table.total_memory > cluster.memory) & (
            option.optimizer_placement == "host" or ~mask_state_offload_plans(plan_table)
        )
        is_possible &= offloaded_state + excess <= cluster.host_memory
        is_possible &= state_memory <= memory_limit
        is_possible &= excess <= activations - resident if option.offload == "fit" else excess == 0
        is_possible &= (excess > 0) == (option.offload == "fit")
        moved = microbatch * excess / np.maximum(activations, 1)
        exposed_copies = np.maximum(
            plans.microbatches * moved / cluster.host_bandwidth - hiding_time, 0
        )
        guess = (
            plan_table.step_times
            + exposed_copies
            + offloaded_state / cluster.host_bandwidth * (1 + 1 / plans.stages_per_rank)
        )
        guesses.append(np.where(is_possible, guess, np.inf))
    table = np.array(guesses)
    for number in np.argsort(table, axis=None, kind="stable").tolist():
        way_number, row = divmod(number, len(plans))
        if not np.isfinite(guess := float(table[way_number, row])):
            return
        yield guess, row, OFFLOAD_OPTIONS[way_number]


def attach_offload_comparison(
    plans: list[PlanEstimate], min_memory_plan: PlanEstimate
) -> list[PlanEstimate]:
    """Return the plans with `offload_comparison` set: a sentence about the effect of offload.

    A plan with offload is compared with the best plan without offload. If the first plan has no
    offload, it is compared with the best plan with offload.

    Args:
        plans: The plans, the fastest first.
        min_memory_plan: The plan without offload that uses the least memory. The text describes
            this plan if no plan fits without offload.
    """
    plain = next((estimate for estimate in plans if not estimate.has_offload), None)
    offloading = next((estimate for estimate in plans if estimate.has_offload), None)
    result = []
    for estimate in plans:
        text = ""
        if estimate.has_offload and plain is None:
            text = (
                "no plan fits without offload: the smallest needs "
                f"{format_bytes(min_memory_plan.memory.total)}: {describe_plan(min_memory_plan)}"
            )
        elif estimate.has_offload and plain is not None:
            text = _describe_comparison(estimate, plain, "the best plan without offload")
        elif estimate is plans[0]:
            text = (
                "no plan with offload is among the best plans"
                if offloading is None
                else _describe_comparison(estimate, offloading, "the best plan with offload")
            )
        result.append(replace(estimate, offload_comparison=text))
    return result


def _describe_comparison(estimate: PlanEstimate, other: PlanEstimate, subject: str) -> str:
    change = estimate.step_time / other.step_time - 1
    difference = f"{abs(change):.1%} {'more' if change > 0 else 'less'} time"
    return f"{difference} than {subject} ({other.step_time:.4g} s): {describe_plan(other)}"


def require_no_offload(plan: ParallelPlan, feature: str) -> None:
    """Raise an error if a plan offloads.

    Args:
        plan: The plan.
        feature: The name of the feature that does not support offload, for the message.

    Raises:
        UsageError: The plan offloads.
    """
    if plan.has_offload:
        raise UsageError(
            f"{feature} does not support plans with offload",
            hint='offload="none", optimizer_placement="device"',
            fields=["offload", "optimizer_placement"],
        )
