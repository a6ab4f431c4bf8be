"""Compute the Costs of a plan's stages, messages, reductions, copies and update, in seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.cluster_costs import compute_step_bytes
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.per_stage_values import from_grid, to_grid
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.planner.estimate.link_time import build_process_mesh
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, StageTimes
from schedir.planner.trainer_profile import get_trainer
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.layer_time import stage_time
from schedir.planner.transformer.memory_estimate import ADAM, StateBytes, count_end_params
from schedir.planner.transformer.op_time import find_slowest_group, time_all_reduce
from schedir.planner.transformer.stage_bytes import (
    StageParameters,
    count_stage_params,
    count_stage_replicated,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec


def compute_stage_times(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    constants: SoftwareConstants | None = None,
) -> list[StageTimes]:
    """What a microbatch takes in each stage."""
    each = get_layers_per_stage(model, plan)
    known: dict[tuple[int, bool, bool], StageTimes] = {}
    found = []
    for number, layers in enumerate(each):
        kind = (layers, number == 0, number == len(each) - 1)
        if kind not in known:
            known[kind] = stage_time(model, cluster, plan, *kind, constants)
        found.append(known[kind])
    return found


def compute_costs(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    shape: PipelineShape,
    stage_times: list[StageTimes],
    constants: SoftwareConstants,
    state_bytes: StateBytes = ADAM,
) -> Costs:
    """The costs of a choice's program, in seconds: those of stages, and all that bytes decide.

    What runs again is an R as far as it may run ahead, and else the beginning of the backward.  Of
    sums over replicas that is left which the last backward does not hide
    (`reduction_overlap_share`).
    """
    F, I, W, R = np.array([one.total for one in stage_times]).T
    ahead = R * constants.recompute_ahead * (plan.recompute == "full")
    I = I + R - ahead
    bytes_of = (state_bytes.params, state_bytes.grads, state_bytes.optimizer)
    numbers = count_stage_params(model, plan, shape)
    params, grads, optimizer = (_to_tuple(size * numbers.total) for size in bytes_of)
    tokens = plan.microbatch_size * (model.sequence // plan.cp)
    sent = Sizes(
        activation=1.0 * cluster.itemsize * tokens * model.hidden,
        params=params,
        grads=grads,
        optimizer=optimizer,
    )
    again: list[tuple[int, int]] = []
    if plan.offload != "none":
        kept = get_trainer(cluster, constants, state_bytes).compute_sizes(
            model, plan, shape, constants, state_bytes
        )
        sent = replace(sent, saved=kept.saved, checkpoint=kept.checkpoint)
        if plan.recompute == "full":
            again = [*product(range(shape.stages), range(shape.microbatches))]
    where = build_process_mesh(plan)
    own = Costs(F=_to_tuple(F), I=_to_tuple(I), W=_to_tuple(W), B=_to_tuple(I + W),
        R=_to_tuple(ahead),
                reduce_tied=_compute_tied_reduction(model, cluster, shape, where,
                    state_bytes))  # fmt: skip
    if plan.sequence_parallel and plan.tp > 1:
        own = replace(
            own,
            reduce_sequence_parallel_grads=_compute_sequence_sums(
                model, cluster, plan, state_bytes
            ),
        )
    if plan.ep > 1:
        own = replace(
            own, **_compute_expert_costs(cluster, plan, shape, where, numbers, state_bytes)
        )
    replicas = plan.dp * plan.cp
    found = cluster.fill_costs(
        shape, sent, own, tp=plan.tp, dp=replicas, zero=plan.zero, mesh=where,
        optimizer_placement=plan.optimizer_placement, offload=plan.offload != "none",
        recomputed=again,
    )  # fmt: skip
    left = {
        name: from_grid(
            whole - np.minimum(constants.reduction_overlap_share * whole, (I + W)[:, None])
        )
        for name in ("reduce_grads", "reduce_scatter")
        for whole in [np.broadcast_to(to_grid(getattr(found, name) or 0.0), (shape.stages, 1))]
    }
    return replace(found, **left)


def _compute_expert_costs(
    cluster: Cluster,
    plan: ParallelPlan,
    shape: PipelineShape,
    process_mesh: NDArray[np.int64],
    parameters: StageParameters,
    state_bytes: StateBytes,
) -> dict[str, tuple[float, ...]]:
    """Costs where replicas hold parts of experts: these are summed over those replicas alone that
    have the same, each e-th, and a step is of as many parts fewer."""
    cut = plan.zero > 0
    rings = {
        "reduce_scatter" if cut else "reduce_grads": (
            cluster.reduce_scatter_time if cut else cluster.all_reduce_time, state_bytes.grads
        ),
        **({"unshard": (cluster.all_gather_time, state_bytes.params)} if cut else {}),
    }  # fmt: skip
    found = {name: np.zeros(shape.stages) for name in rings}
    every, same = len(process_mesh), max(len(process_mesh) // plan.ep, 1)
    parts = parameters.common / (every if cut else 1) + parameters.experts / (same if cut else 1)
    moved = compute_step_bytes(
        *(size * parts for size in (state_bytes.params, state_bytes.grads, state_bytes.optimizer))
    )
    step = np.zeros(shape.stages)
    for rank, stages in enumerate(shape.stages_on_rank):
        step[rank] = moved[list(stages)].sum() / cluster.hbm_bandwidth
        group = process_mesh[:, rank, 0]
        for one in stages:
            for name, (ring, size) in rings.items():
                found[name][one] = ring(size * parameters.common[one], group)
                found[name][one] += ring(size * parameters.experts[one], group[:: plan.ep])
    return {name: _to_tuple(value) for name, value in found.items()} | {"step": _to_tuple(step)}


def _compute_sequence_sums(
    model: TransformerSpec, cluster: Cluster, plan: ParallelPlan, state_bytes: StateBytes
) -> tuple[float, ...]:
    """The sum over slices, each of which has seen its own tokens with what all have whole; of what
    replicas have in parts it is the part (arXiv 2205.05198, section 4.2.2)."""
    every = plan.dp * plan.cp if plan.zero else 1
    group, seen = find_slowest_group(cluster, 1, plan.tp), count_stage_replicated(model, plan)
    each = state_bytes.grads * (seen.common / every + seen.experts / max(every // plan.ep, 1))
    return tuple(time_all_reduce(cluster, size, group) for size in each.tolist())


def _compute_tied_reduction(
    model: TransformerSpec,
    cluster: Cluster,
    shape: PipelineShape,
    process_mesh: NDArray[np.int64],
    state_bytes: StateBytes,
) -> float:
    """The sum of the gradients of a tied embedding, of the first rank and the last."""
    first, last = int(shape.replica_ranks[0, 0]), int(shape.replica_ranks[0, -1])
    if first == last or not model.tied:
        return 0.0
    size = state_bytes.grads * float(count_end_params(model, process_mesh.shape[2])[2])
    pairs = process_mesh[:, [first, last], 0]
    return max(cluster.all_reduce_time(size, pair) for pair in pairs)


def _to_tuple(value: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(value.tolist())
