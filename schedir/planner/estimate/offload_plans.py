"""Simulate plans that fit only with host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.errors import MemoryLimitError, UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.zero_states import CUT_FROM
from schedir.planner.bottleneck import alone, in_short
from schedir.planner.estimate.simulated_estimate import simulate_plan
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import Offload, ParallelPlan, PlanEstimate, StatePlacement
from schedir.planner.plan_table import PlanTable
from schedir.planner.transformer.memory_estimate import StateBytes, kept_by_layer
from schedir.planner.transformer.transformer_spec import TransformerSpec

SIMULATED: Final = 24  # plans that offload, as long as any of them fits
_TRIED: Final = 96
_FORWARD: Final = 1 / 3  # of what computes, that is in forwards
_AT_ONCE: Final = 2  # stages of which the states, or what is saved, are on the device at least


class OffloadOption(NamedTuple):
    """What goes to the host."""

    offload: Offload
    optimizer_placement: StatePlacement


WAYS: Final = (
    OffloadOption("fit", "device"),
    OffloadOption("none", "host"),
    OffloadOption("fit", "host"),
)


def offloaded(
    model: TransformerSpec,
    cluster: Cluster,
    found: PlanTable,
    top: int,
    constants: SoftwareConstants,
    states: StateBytes,
    known: list[float],
) -> list[PlanEstimate]:
    """The plans that offload, simulated, as far as they are likely to be among the `top`: steps of
    plans that do not are `known`."""
    best, steps = list[PlanEstimate](), sorted(known)
    for tries, (guess, at, way) in enumerate(_likely(model, cluster, found, constants, states)):
        worst = steps[top - 1] if len(steps) >= top else np.inf
        if guess >= worst or len(best) >= SIMULATED or tries >= _TRIED:
            break
        choice = replace(found.plans.choice(model, at), **way._asdict())
        try:
            one = simulate_plan(model, cluster, choice, constants, states=states)
        except MemoryLimitError:
            continue
        if one.fits:
            best.append(alone(cluster, one))
            steps = sorted([*steps, one.step])
    return best


def for_states_alone(found: PlanTable) -> NDArray[np.bool_]:
    """Of which plans ranks that are alone have many stages for nothing but to move their states."""
    plans = found.plans
    which: NDArray[np.bool_] = (
        (plans.pp == 1) & (plans.stages_per_rank > 1) & (plans.zero < CUT_FROM["grads"])
    )
    return which


def _likely(
    model: TransformerSpec,
    cluster: Cluster,
    found: PlanTable,
    constants: SoftwareConstants,
    states: StateBytes,
) -> Iterator[tuple[float, int, OffloadOption]]:
    """Plans that do not fit, with a way in which they may, in order of about how long they take.

    About, for it decides only what is simulated, and in which order: what does not fit is moved
    while the rank computes, and takes longer by what its copies take more than that.  Of what lives
    for one microbatch only, copies out run beside forwards, a third of that, and back beside
    backwards.  States are loaded one stage after the other, and the last is stored behind that.
    """
    plans, share = found.plans, 1 + constants.allocator_share
    weights, gradients, optimizer, activations, _ = found.memory
    compute, again, tensor = found.parts[:3]
    assert cluster.host is not None and cluster.host_memory is not None
    room = (cluster.memory - constants.reserved) / share
    microbatch = kept_by_layer(model, plans, states.params)[0][:, 0] * model.layers / plans.pp
    beside = np.clip(activations / microbatch - 1, _FORWARD, 1) * (compute + again + tensor)
    stays = np.minimum(activations, _AT_ONCE * microbatch / plans.stages_per_rank)
    guesses = []
    for way in WAYS:
        away = optimizer * (way.optimizer_placement == "host")
        over = np.maximum(found.total - share * away - cluster.memory, 0) / share
        stepped = weights + gradients + away * np.minimum(_AT_ONCE / plans.stages_per_rank, 1)
        can = (found.total > cluster.memory) & (
            way.optimizer_placement == "host" or ~for_states_alone(found)
        )
        can &= away + over <= cluster.host_memory
        can &= stepped <= room
        can &= over <= activations - stays if way.offload == "fit" else over == 0
        can &= (over > 0) == (way.offload == "fit")
        moved = microbatch * over / np.maximum(activations, 1)
        slower = np.maximum(plans.microbatches * moved / cluster.host - beside, 0)
        guess = found.step + slower + away / cluster.host * (1 + 1 / plans.stages_per_rank)
        guesses.append(np.where(can, guess, np.inf))
    table = np.array(guesses)
    for number in np.argsort(table, axis=None, kind="stable").tolist():
        way_number, at = divmod(number, len(plans))
        if not np.isfinite(guess := float(table[way_number, at])):
            return
        yield guess, at, WAYS[way_number]


def beside(plans: list[PlanEstimate], least: PlanEstimate) -> list[PlanEstimate]:
    """The plans, the fastest first, with what offload is worth: each that offloads beside the best
    one that does not, and the first beside the best that does; where none fits without, `least`
    holds the least."""
    plain = next((one for one in plans if not one.offloads), None)
    moving = next((one for one in plans if one.offloads), None)
    found = []
    for one in plans:
        said = ""
        if one.offloads and plain is None:
            said = f"no plan fits without: the least holds {format_bytes(least.memory.total)}, "
            said += in_short(least)
        elif one.offloads and plain is not None:
            said = _beside(one, plain, "the best plan without")
        elif one is plans[0]:
            said = "no plan that fits with it is among the first"
            said = said if moving is None else _beside(one, moving, "the best plan with it")
        found.append(replace(one, beside=said))
    return found


def _beside(one: PlanEstimate, other: PlanEstimate, what: str) -> str:
    change = one.step / other.step - 1
    more = f"{abs(change):.1%} {'more' if change > 0 else 'less'}"
    return f"{more} than {what}, {in_short(other)}, which takes {other.step:.4g} s"


def refuse_offload(choice: ParallelPlan, who: str) -> None:
    """Raise UsageError for a choice that offloads, of what knows nothing of copies."""
    if choice.offloads:
        raise UsageError(
            f"{who} knows nothing of copies to the host and back",
            fields=["offload", "optimizer_placement"],
        )
