"""Simulate plans that fit only with host memory."""

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

MAX_OFFLOAD_PLANS: Final = 24  # plans that offload, as long as any of them fits
_MAX_SIMULATIONS: Final = 96
_FORWARD_SHARE: Final = 1 / 3  # of what computes, that is in forwards
_RESIDENT_STAGES: Final = (
    2  # stages of which the states, or what is saved, are on the device at least
)


class OffloadOption(NamedTuple):
    """What goes to the host."""

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
    """The plans that offload, simulated, as far as they are likely to be among the `top`: steps of
    plans that do not are `step_times`."""
    best, steps = list[PlanEstimate](), sorted(step_times)
    for tries, (guess, at, way) in enumerate(
        _guess_offload_plans(model, cluster, plan_table, constants, state_bytes)
    ):
        worst = steps[top - 1] if len(steps) >= top else np.inf
        if guess >= worst or len(best) >= MAX_OFFLOAD_PLANS or tries >= _MAX_SIMULATIONS:
            break
        choice = replace(plan_table.plans.plan_at(model, at), **way._asdict())
        try:
            one = simulate_plan(model, cluster, choice, constants, state_bytes=state_bytes)
        except MemoryLimitError:
            continue
        if one.fits:
            best.append(attach_bottleneck(cluster, one))
            steps = sorted([*steps, one.step_time])
    return best


def mask_state_offload_plans(plan_table: PlanTable) -> NDArray[np.bool_]:
    """Of which plans ranks that are alone have many stages for nothing but to move their states."""
    plans = plan_table.plans
    which: NDArray[np.bool_] = (
        (plans.pp == 1) & (plans.stages_per_rank > 1) & (plans.zero < SHARDED_FROM_LEVEL["grads"])
    )
    return which


def _guess_offload_plans(
    model: TransformerSpec,
    cluster: Cluster,
    plan_table: PlanTable,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> Iterator[tuple[float, int, OffloadOption]]:
    """Plans that do not fit, with a way in which they may, in order of about how long they take.

    About, for it decides only what is simulated, and in which order: what does not fit is moved
    while the rank computes, and takes longer by what its copies take more than that.  Of what lives
    for one microbatch only, copies out run beside forwards, a third of that, and back beside
    backwards.  States are loaded one stage after the other, and the last is stored behind that.
    """
    plans, share = plan_table.plans, 1 + constants.allocator_share
    weights, gradients, optimizer, activations, _ = plan_table.memory
    compute, again, tensor = plan_table.breakdowns[:3]
    assert cluster.host_bandwidth is not None and cluster.host_memory is not None
    room = (cluster.memory - constants.reserved_bytes) / share
    microbatch = (
        compute_saved_by_plan(model, plans, state_bytes.params)[0][:, 0] * model.layers / plans.pp
    )
    beside = np.clip(activations / microbatch - 1, _FORWARD_SHARE, 1) * (compute + again + tensor)
    stays = np.minimum(activations, _RESIDENT_STAGES * microbatch / plans.stages_per_rank)
    guesses = []
    for way in OFFLOAD_OPTIONS:
        away = optimizer * (way.optimizer_placement == "host")
        over = np.maximum(plan_table.total_memory - share * away - cluster.memory, 0) / share
        stepped = (
            weights + gradients + away * np.minimum(_RESIDENT_STAGES / plans.stages_per_rank, 1)
        )
        can = (plan_table.total_memory > cluster.memory) & (
            way.optimizer_placement == "host" or ~mask_state_offload_plans(plan_table)
        )
        can &= away + over <= cluster.host_memory
        can &= stepped <= room
        can &= over <= activations - stays if way.offload == "fit" else over == 0
        can &= (over > 0) == (way.offload == "fit")
        moved = microbatch * over / np.maximum(activations, 1)
        slower = np.maximum(plans.microbatches * moved / cluster.host_bandwidth - beside, 0)
        guess = (
            plan_table.step_times
            + slower
            + away / cluster.host_bandwidth * (1 + 1 / plans.stages_per_rank)
        )
        guesses.append(np.where(can, guess, np.inf))
    table = np.array(guesses)
    for number in np.argsort(table, axis=None, kind="stable").tolist():
        way_number, at = divmod(number, len(plans))
        if not np.isfinite(guess := float(table[way_number, at])):
            return
        yield guess, at, OFFLOAD_OPTIONS[way_number]


def attach_offload_comparison(
    plans: list[PlanEstimate], min_memory_plan: PlanEstimate
) -> list[PlanEstimate]:
    """The plans, the fastest first, with what offload is worth: each that offloads beside the best
    one that does not, and the first beside the best that does; where none fits without,
    `min_memory_plan` holds the least."""
    plain = next((one for one in plans if not one.has_offload), None)
    moving = next((one for one in plans if one.has_offload), None)
    found = []
    for one in plans:
        said = ""
        if one.has_offload and plain is None:
            said = (
                "no plan fits without: the least holds "
                f"{format_bytes(min_memory_plan.memory.total)}, "
            )
            said += describe_plan(min_memory_plan)
        elif one.has_offload and plain is not None:
            said = _describe_comparison(one, plain, "the best plan without")
        elif one is plans[0]:
            said = "no plan that fits with it is among the first"
            said = (
                said
                if moving is None
                else _describe_comparison(one, moving, "the best plan with it")
            )
        found.append(replace(one, offload_comparison=said))
    return found


def _describe_comparison(estimate: PlanEstimate, other: PlanEstimate, subject: str) -> str:
    change = estimate.step_time / other.step_time - 1
    more = f"{abs(change):.1%} {'more' if change > 0 else 'less'}"
    return f"{more} than {subject}, {describe_plan(other)}, which takes {other.step_time:.4g} s"


def require_no_offload(plan: ParallelPlan, feature: str) -> None:
    """Raise UsageError for a choice that offloads, of what knows nothing of copies."""
    if plan.has_offload:
        raise UsageError(
            f"{feature} knows nothing of copies to the host and back",
            fields=["offload", "optimizer_placement"],
        )
