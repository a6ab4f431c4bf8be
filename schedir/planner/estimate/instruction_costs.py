"""Compute the costs of all instructions of a plan's program, in seconds."""

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
from schedir.planner.estimate.link_time import (
    build_process_mesh,
    place_on_nodes,
)
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, StageTimes
from schedir.planner.trainer_profile import get_trainer
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.layer_time import stage_time
from schedir.planner.transformer.memory_estimate import ADAM, StateBytes, count_end_params
from schedir.planner.transformer.op_time import find_slowest_group, time_all_reduce
from schedir.planner.transformer.stage_sizes import (
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
    """Return the times of one microbatch in each stage, in the order of the stages.

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        constants: Constants of the software. None means `SoftwareConstants()`.
    """
    layers_per_stage = get_layers_per_stage(model, plan)
    cache: dict[tuple[int, bool, bool], StageTimes] = {}
    times = []
    for number, layers in enumerate(layers_per_stage):
        kind = (layers, number == 0, number == len(layers_per_stage) - 1)
        if kind not in cache:
            cache[kind] = stage_time(model, cluster, plan, *kind, constants)
        times.append(cache[kind])
    return times


def compute_costs(
    model: TransformerSpec,
    cluster: Cluster,
    plan: ParallelPlan,
    shape: PipelineShape,
    stage_times: list[StageTimes],
    constants: SoftwareConstants,
    state_bytes: StateBytes = ADAM,
) -> Costs:
    """Return the costs of all instructions of a plan's program, in seconds.

    The share `recompute_ahead` of full recomputation is a separate instruction R. The rest of the
    recomputation is part of the backward. The cost of a reduction over replicas is only the time
    that the last backward does not hide (`get_reduction_overlap`).

    Args:
        model: The model.
        cluster: The cluster.
        plan: The plan.
        shape: The pipeline shape of the program.
        stage_times: The times of each stage, from `compute_stage_times`.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.
    """
    F, I, W, R = np.array([times.total for times in stage_times]).T
    recompute_costs = R * constants.recompute_ahead * (plan.recompute == "full")
    I = I + R - recompute_costs
    numbers = count_stage_params(model, plan, shape)
    params, grads, optimizer = (_to_tuple(size * numbers.total) for size in state_bytes)
    tokens = plan.microbatch_size * (model.sequence // plan.cp)
    sizes = Sizes(
        activation=1.0 * cluster.itemsize * tokens * model.hidden,
        params=params,
        grads=grads,
        optimizer=optimizer,
    )
    recomputed: list[tuple[int, int]] = []
    if plan.offload != "none":
        saved_sizes = get_trainer(cluster, constants, state_bytes).compute_sizes(
            model, plan, shape, constants, state_bytes
        )
        sizes = replace(
            sizes, saved=saved_sizes.saved, recompute_inputs=saved_sizes.recompute_inputs
        )
        if plan.recompute == "full":
            recomputed = [*product(range(shape.stages), range(shape.microbatches))]
    process_mesh = build_process_mesh(plan)
    stage_costs = Costs(F=_to_tuple(F), I=_to_tuple(I), W=_to_tuple(W), B=_to_tuple(I + W),
        R=_to_tuple(recompute_costs),
                reduce_tied=_compute_tied_reduction(model, cluster, shape, process_mesh,
                    state_bytes))  # fmt: skip
    if plan.sequence_parallel and plan.tp > 1:
        stage_costs = replace(
            stage_costs,
            reduce_sequence_parallel_grads=_compute_sequence_sums(
                model, cluster, plan, state_bytes
            ),
        )
    if plan.ep > 1:
        layers = get_layers_per_stage(model, plan)
        stage_costs = replace(
            stage_costs,
            FB=tuple(map(time_joined_pair, stage_times, layers, (F + I + W).tolist())),
            **_compute_expert_costs(cluster, plan, shape, process_mesh, numbers, state_bytes),
        )
    replicas = plan.dp * plan.cp
    costs = cluster.fill_costs(
        shape, sizes, stage_costs, tp=plan.tp, dp=replicas, zero=plan.zero, mesh=process_mesh,
        optimizer_placement=plan.optimizer_placement, offload=plan.offload != "none",
        recomputed=recomputed,
    )  # fmt: skip
    layer_counts = np.array(get_layers_per_stage(model, plan), float)
    bucket_time = _compute_bucket_latencies(cluster, plan, numbers.common, layer_counts, constants)
    overlap = np.full(shape.stages, constants.get_reduction_overlap(plan.zero))
    overlap[0] *= 1 - count_end_params(model, plan.tp)[0] / numbers.total[0]
    changed = {
        name: from_grid(full - np.minimum(overlap[:, None] * full, (I + W)[:, None]))
        for name in ("reduce_grads", "reduce_scatter")
        for full in [to_grid(getattr(costs, name) or 0.0) + bucket_time[:, None]]
    }
    if plan.zero and replicas > 1 and costs.unshard is not None and constants.shard_copy_us:
        copies = constants.tensors_per_layer * layer_counts * replicas
        copy_time = copies * constants.shard_copy_us / 1e6
        changed["unshard"] = from_grid(to_grid(costs.unshard) + copy_time[:, None])
    return replace(costs, **changed)


def _compute_bucket_latencies(
    cluster: Cluster,
    plan: ParallelPlan,
    params: NDArray[np.float64],
    layers: NDArray[np.float64],
    constants: SoftwareConstants,
) -> NDArray[np.float64]:
    """Return the latency of the all-reduces of all buckets of a stage except one, in seconds."""
    replicas = plan.dp * plan.cp
    if plan.zero or replicas == 1:
        return np.zeros(len(params))
    nodes = min(place_on_nodes(cluster, plan.layout).replica_nodes, replicas)
    latency = 2 * (replicas - 1) * cluster.compute_mean_latency(replicas, nodes)
    more_buckets: NDArray[np.float64] = constants.count_buckets(params, layers) - 1
    return more_buckets * latency


def time_joined_pair(times: StageTimes, layers: int, alone: float) -> float:
    """Return the time of a joined pair: a forward, and the backward of another microbatch.

    The segments of the two instructions alternate. Compute of one instruction hides all-to-alls of
    the other instruction (arXiv 2412.19437, section 3.2.1). The estimate assumes that all segments
    of an instruction take the same time.

    Args:
        times: The times of one microbatch in the stage.
        layers: The number of layers of the stage.
        alone: Seconds of the forward and the backward, one after the other.
    """
    segments, a2a = 2 * layers + 1, times.all_to_alls
    halves = ((times.total.F, a2a.F), (alone - times.total.F, a2a.B))
    computed = exchanged = 0.0
    ready = [0.0, 0.0]
    for _ in range(segments):
        for k, (total, a2a_time) in enumerate(halves):
            computed = max(computed, ready[k]) + (total - a2a_time) / segments
            exchanged = ready[k] = max(exchanged, computed) + a2a_time / (segments - 1 or 1)
    return computed


def _compute_expert_costs(
    cluster: Cluster,
    plan: ParallelPlan,
    shape: PipelineShape,
    process_mesh: NDArray[np.int64],
    parameters: StageParameters,
    state_bytes: StateBytes,
) -> dict[str, tuple[float, ...]]:
    """Return the costs that expert parallelism changes: field of `Costs` -> seconds per stage.

    The field `step` has seconds per rank instead. The gradients of an expert are reduced over the
    replicas with the same experts: every `ep`-th replica. The update of an expert is divided among
    these replicas only.
    """
    cut = plan.zero > 0
    rings = {
        "reduce_scatter" if cut else "reduce_grads": (
            cluster.reduce_scatter_time if cut else cluster.all_reduce_time, state_bytes.grads
        ),
        **({"unshard": (cluster.all_gather_time, state_bytes.params)} if cut else {}),
    }  # fmt: skip
    costs = {name: np.zeros(shape.stages) for name in rings}
    replicas = len(process_mesh)
    expert_replicas = max(len(process_mesh) // plan.ep, 1)
    local_params = parameters.common / (replicas if cut else 1) + parameters.experts / (
        expert_replicas if cut else 1
    )
    moved = compute_step_bytes(*(size * local_params for size in state_bytes))
    step = np.zeros(shape.stages)
    for rank, stages in enumerate(shape.stages_on_rank):
        step[rank] = moved[list(stages)].sum() / cluster.hbm_bandwidth
        group = process_mesh[:, rank, 0]
        for times in stages:
            for name, (ring, size) in rings.items():
                costs[name][times] = ring(size * parameters.common[times], group)
                costs[name][times] += ring(size * parameters.experts[times], group[:: plan.ep])
    return {name: _to_tuple(value) for name, value in costs.items()} | {"step": _to_tuple(step)}


def _compute_sequence_sums(
    model: TransformerSpec, cluster: Cluster, plan: ParallelPlan, state_bytes: StateBytes
) -> tuple[float, ...]:
    """Return, for each stage, the seconds to sum gradients over sequence-parallel ranks.

    Only the gradients of weights that every tensor-parallel rank has in full are summed (arXiv
    2205.05198, section 4.2.2). With ZeRO each replica sums only its shard.
    """
    replicas = plan.dp * plan.cp if plan.zero else 1
    group = find_slowest_group(cluster, 1, plan.tp)
    replicated = count_stage_replicated(model, plan)
    bytes_per_param = state_bytes.grads * (
        replicated.common / replicas + replicated.experts / max(replicas // plan.ep, 1)
    )
    return tuple(time_all_reduce(cluster, size, group) for size in bytes_per_param.tolist())


def _compute_tied_reduction(
    model: TransformerSpec,
    cluster: Cluster,
    shape: PipelineShape,
    process_mesh: NDArray[np.int64],
    state_bytes: StateBytes,
) -> float:
    """Return the seconds to reduce the gradient of a tied embedding over its two stages."""
    first_rank = int(shape.replica_ranks[0, 0])
    last_rank = int(shape.replica_ranks[0, -1])
    if first_rank == last_rank or not model.tied:
        return 0.0
    size = state_bytes.grads * float(count_end_params(model, process_mesh.shape[2])[2])
    pairs = process_mesh[:, [first_rank, last_rank], 0]
    return max(cluster.all_reduce_time(size, pair) for pair in pairs)


def _to_tuple(value: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(value.tolist())
