"""Estimate the step times of many plans in closed form, without a program.

The rank with the most compute determines the step time. The step time is the sum of the compute of
this rank, its waiting time for all other ranks, and the messages and reductions that compute does
not hide. The module `simulated_estimate` simulates the program instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.cluster_costs import compute_step_bytes
from schedir.planner.estimate.link_time import (
    NodePlacement,
    build_replica_rings,
    compute_data_loading_time,
    compute_expected_maximum,
    compute_link_times,
    place_plans_on_nodes,
)
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS, count_unshards
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import PhaseTimes, StepBreakdown
from schedir.planner.plan_columns import (
    RECOMPUTE_MODES,
    SCHEDULE_NAMES,
    Floats,
    PlanColumns,
    RankGroupShares,
)
from schedir.planner.transformer.layer_time import GpuWork, compute_work
from schedir.planner.transformer.memory_estimate import (
    MemoryTable,
    StateBytes,
    count_end_params,
    count_replicated_params,
)
from schedir.planner.transformer.op_time import find_slowest_group, time_all_reduce
from schedir.planner.transformer.transformer_spec import TransformerSpec

_MODEL_PARTS: Final = ("layer", "embedding", "head")


class RankTimes(NamedTuple):
    """Times of one microbatch on each rank group (`RankGroupShares`): arrays (plans, groups).

    The times are in seconds.

    Attributes:
        stage_times: The sum of the times of all stages of a rank, as a `StageTimes` of arrays.
        F: The forward, with collectives.
        I: The backward of the inputs, with collectives and recomputation.
        W: The backward of the weights, with collectives.
        shorter_end: The time of the embedding or of the head, whichever is shorter, of shape
            (plans,).
    """

    stage_times: Any
    F: Floats
    I: Floats
    W: Floats
    shorter_end: Floats

    @property
    def total(self) -> Floats:
        """Seconds of the forward and the full backward, of shape (plans, groups)."""
        return self.F + self.I + self.W


def estimate_breakdowns(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    memory_table: MemoryTable,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
) -> Floats:
    """Estimate the parts of the step time of each plan.

    Args:
        model: The model.
        cluster: The cluster.
        plans: The plans.
        shares: The layers of each rank group, from `PlanColumns.compute_shares`.
        memory_table: The parameters of each rank group, from `estimate_memory`.
        constants: Constants of the software.
        state_bytes: Bytes of weights, gradients and optimizer state per parameter.

    Returns:
        Seconds, of shape (fields of `StepBreakdown`, plans). The sum over the fields is the step
        time.
    """
    rank_times = compute_rank_times(model, cluster, plans, shares, constants)
    m, rows = plans.microbatches[:, None], np.arange(len(plans))
    busy_times = np.where(shares.rank_count > 0, m * rank_times.total, -1.0)
    busiest = busy_times.argmax(axis=1)

    def at_busiest(times: Any) -> Any:
        """Return, for each plan, the value of the rank group with the most compute."""
        return times[rows, busiest]

    waits, messages, messages_each = _apply_formulas(plans, rank_times, constants)
    placement = place_plans_on_nodes(cluster, plans)
    link_times = compute_link_times(model, cluster, plans, placement)
    v, p = plans.stages_per_rank, plans.pp
    has_many_stages = plans.get_formula_column("stages_per_rank") == "many"
    is_vee = plans.get_formula_column("is_vee")
    is_breadth_first = plans.get_formula_column("is_breadth_first") & (p > 1)
    boundaries = np.where(has_many_stages, v * (p - 1) + v - 1, p - 1)
    boundary_time = np.where(
        has_many_stages,
        v * link_times.neighbors + (v - 1) * link_times.wraparound,
        link_times.neighbors,
    )
    mean_boundary_time = boundary_time / np.maximum(boundaries, 1)
    # Ranks wait for a slower rank. This waiting time hides the messages of each microbatch.
    mean_rank_time = (rank_times.total * shares.rank_count).sum(axis=1) / p
    hidden = plans.microbatches * np.minimum(
        messages_each * mean_boundary_time, at_busiest(rank_times.total) - mean_rank_time
    )
    transfers = messages * mean_boundary_time - hidden
    # In a vee placement the slowest rank has the first and the last stage. Its waiting time for the
    # other ranks is therefore shorter than in `waits`.
    slack = plans.microbatches * (at_busiest(rank_times.total) - mean_rank_time)
    bubble = (waits * shares.rank_count).sum(axis=1) - at_busiest(waits) - is_vee * slack
    bubble = np.maximum(bubble + is_breadth_first * plans.microbatches * rank_times.shorter_end, 0)
    transfers = np.maximum(
        transfers,
        2 * plans.microbatches * v * mean_boundary_time * (p > 1) - at_busiest(busy_times),
    )
    compute, tensor, _ = rank_times.stage_times
    data_parallel = _estimate_data_parallel(
        model, cluster, plans, shares, memory_table, constants, state_bytes, rank_times, placement
    )
    optimizer = _estimate_optimizer(cluster, plans, memory_table, state_bytes)
    parts = dict(
        compute=plans.microbatches * at_busiest(compute.F + compute.I + compute.W),
        recompute=plans.microbatches * at_busiest(compute.R),
        layer_collectives=plans.microbatches
        * at_busiest(tensor.F + tensor.I + tensor.W + tensor.R),
        transfers=transfers,
        bubble=bubble * _compute_idle_share(cluster, plans),
        data_parallel=data_parallel,
        optimizer=optimizer,
        host_copies=0 * optimizer,
        data_loading=compute_data_loading_time(cluster, plans.microbatches * plans.microbatch_size),
    )
    replicas, replica_index = np.unique(plans.dp * plans.cp, return_inverse=True)
    slowest = np.array([compute_expected_maximum(n) for n in replicas.tolist()])[replica_index]
    parts["data_parallel"] = data_parallel + cluster.jitter * slowest * sum(parts.values())
    return np.stack([parts[name] for name in StepBreakdown._fields])


def _compute_idle_share(cluster: Cluster, plans: PlanColumns) -> Floats:
    """Return the share of the ranks' waiting time for which their CPU cores are idle.

    While the pipeline fills, only k of p ranks compute, so only the share k/p of all processes
    needs cores. If there are fewer cores than processes, the cores of waiting processes run the
    processes that compute. For GPUs, the share is 1.
    """
    if cluster.processors is None:
        return np.ones(len(plans))
    cores_per_process = min(cluster.processors / cluster.gpus_per_node, 1.0)
    idle_share = np.ones(len(plans))
    for p in np.unique(plans.pp[plans.pp > 1]).tolist():
        working = np.arange(1, p) / p
        idle_share[plans.pp == p] = (
            np.maximum(cores_per_process - working, 0).sum() / (1 - working).sum()
        )
    return idle_share


def compute_rank_times(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
) -> RankTimes:
    """Return the times of a microbatch on each rank group.

    The times are sums over the stages of a rank. `stage_time` computes the time of a stage in the
    same way.

    Args:
        model: The model.
        cluster: The cluster.
        plans: The plans.
        shares: The layers of each rank group.
        constants: Constants of the software.
    """
    layer, embedding, head = _compute_part_work(model, cluster, plans, constants)
    v = plans.stages_per_rank[:, None]
    layers_per_stage = shares.layers / v
    has_first = 1.0 * shares.has_first_stage
    has_last = 1.0 * shares.has_last_stage
    is_single = v == 1
    first_stage = _sum_work(
        (layer, layers_per_stage), (embedding, has_first), (head, has_last * is_single)
    ).stage_times
    last_stage = _sum_work((layer, layers_per_stage), (head, has_last)).stage_times
    inner_stages = _sum_work(
        (layer, shares.layers - layers_per_stage * np.where(is_single, 1, has_first + has_last))
    ).stage_times
    with_first: Any = np.where(is_single, 1.0, has_first)
    with_last: Any = np.where(is_single, 0.0, has_last)
    times: Any = inner_stages.plus(first_stage, with_first).plus(last_stage, with_last)
    F, I, W, R = times.total
    end_times: list[Any] = [
        sum(_sum_work((part, 1.0)).stage_times.total) for part in (embedding, head)
    ]
    return RankTimes(times, F, I + R, W, np.minimum(*end_times)[:, 0])


def _sum_work(*terms: tuple[GpuWork, Any]) -> GpuWork:
    total = GpuWork()
    for term, times in terms:
        total = total.plus(term, times)
    return total


def _compute_part_work(
    model: TransformerSpec, cluster: Cluster, plans: PlanColumns, constants: SoftwareConstants
) -> Iterator[GpuWork]:
    """Yield the work of a layer, the embedding and the head, as columns of shape (plans, 1).

    The work is computed once for all plans with equal values of the fields that it depends on.
    """
    has_split = plans.get_formula_column("has_split_backward")
    names = ["tp", "microbatch_size", "recompute", "sequence_parallel", "cp", "ep"]
    names += ["pp"] if constants.crossing_us or bool((plans.ep > 1).any()) else []
    names += ["dp"] if constants.crossing_us else []
    work = np.zeros((len(plans), 3, 16))
    for is_split in (False, True):
        rows = np.flatnonzero(has_split == is_split)
        selected = plans.select(rows)
        first_rows, row_of_plan = selected.find_distinct(*names)
        distinct_work = [
            [compute_work(part, model, cluster, plan, constants) for part in _MODEL_PARTS]
            for plan in (selected.plan_at(model, i) for i in first_rows.tolist())
        ]
        work[rows] = np.array(distinct_work).reshape(-1, 3, 16)[row_of_plan]
    for part in range(3):
        columns = work[:, part].T[:, :, None]
        yield GpuWork(*(PhaseTimes(*columns[k : k + 4]) for k in (0, 4, 8, 12)))


def _apply_formulas(
    plans: PlanColumns, rank_times: RankTimes, constants: SoftwareConstants
) -> tuple[Floats, Floats, Floats]:
    """Return waiting times, and numbers of messages that do not overlap with compute.

    The first result has one number for each rank group: the seconds that any other rank waits for
    one rank of the group. Its shape is (plans, groups). The second result is the number of exposed
    messages of a step. The third result is the number of exposed messages per microbatch. The
    second and the third result have the shape (plans,). Recomputation that may run before the
    gradient arrives (`recompute_ahead`) adds no waiting time.
    """
    waits = np.zeros(rank_times.F.shape)
    messages, messages_each = np.zeros((2, len(plans)))
    v = plans.stages_per_rank[:, None]
    has_full_recompute = (plans.recompute == RECOMPUTE_MODES.index("full"))[:, None]
    awaited_backward = (
        rank_times.I
        - constants.recompute_ahead * has_full_recompute * rank_times.stage_times.total.R
    )
    for number in np.unique(plans.schedule).tolist():
        is_mine, formulas = plans.schedule == number, SCHEDULE_FORMULAS[SCHEDULE_NAMES[number]]
        waits[is_mine] = formulas.wait_time(
            *(x[is_mine] / v[is_mine] for x in (rank_times.F, awaited_backward, rank_times.W))
        )
        messages[is_mine] = formulas.exposed_messages(
            plans.pp[is_mine], plans.stages_per_rank[is_mine], plans.microbatches[is_mine]
        )
        messages_each[is_mine] = formulas.messages_per_microbatch(plans.pp[is_mine])
    return waits, messages * (plans.pp > 1), messages_each * (plans.microbatches > plans.pp)


def _estimate_data_parallel(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    memory_table: MemoryTable,
    constants: SoftwareConstants,
    state_bytes: StateBytes,
    rank_times: RankTimes,
    placement: NodePlacement,
) -> Floats:
    """Return the time of reductions and gathers over replicas that compute does not hide.

    - Gradients: without ZeRO, a ring all-reduce; with ZeRO, a reduce-scatter (arXiv 1910.02054,
      section 7).
    - The share `get_reduction_overlap` of the reduction of a stage overlaps with the last backward
      of the stage. The gradient of the embedding is ready only after this backward.
    - On a rank with several stages, all reductions except the last reduction also overlap with
      later backwards. If the backward is not split, the last backward of rank r
      ends before the last backward of rank 0, earlier by the time of r backwards of a stage.
      Reductions between these two ends are not exposed.
    - Weights: with ZeRO, the replicas gather the weights at the start of the step, while ranks wait
      for their first microbatch. With sharded weights, the replicas gather them several times, in
      parallel with compute.
    - With sharded gradients and more than two stages per rank, a rank has the unsharded gradients
      of one stage at a time. The backward of another stage waits until these gradients are reduced.
    """
    zero, v, p, m = (
        getattr(plans, name)[:, None] for name in ("zero", "stages_per_rank", "pp", "microbatches")
    )
    rings_and_params = [
        *zip(
            build_replica_rings(cluster, plans, placement),
            (memory_table.common_params, memory_table.expert_params),
            strict=True,
        )
    ]
    scatter, gather = (
        sum(ring.compute_gather_time(size * params) for ring, params in rings_and_params)
        for size in (state_bytes.grads, state_bytes.params)
    )
    ring, params = rings_and_params[0]
    # The weights of each replica are copied one by one.
    copies = constants.tensors_per_layer * shares.layers * (ring.size * (ring.size > 1))[:, None]
    gather = gather + copies * constants.shard_copy_us / 1e6
    more_buckets = constants.count_buckets(params, shares.layers) - 1
    scatter = scatter + (zero == 0) * more_buckets * ring.compute_bucket_latency()
    is_flushed = ~plans.get_formula_column("has_split_backward")[:, None]
    stage_backward = (rank_times.I + rank_times.W) / v  # The backward of one stage.
    reductions = np.where(zero > 0, 1, 2) * scatter
    outer_share = memory_table.outer_stage_params / np.maximum(
        memory_table.common_params + memory_table.expert_params, 1
    )
    embedding_params = shares.has_first_stage * count_end_params(model, plans.tp[:, None])[0]
    early_share = 1 - embedding_params / np.maximum(memory_table.outer_stage_params, 1)
    overlap_share = constants.get_reduction_overlap(zero) * early_share
    last_reduction = outer_share * reductions  # The reduction of a rank's first stage ends last.
    exposed = last_reduction - np.minimum(overlap_share * last_reduction, stage_backward)
    exposed = exposed + np.maximum(
        reductions - last_reduction - (v - 1) * np.minimum(p, m) * stage_backward, 0
    )
    repeated = (_count_reductions(plans)[:, None] - 1) * np.maximum(reductions - rank_times.F, 0)
    exposed = np.where(
        (zero > 1) & (v > 2),
        reductions - np.minimum(overlap_share * reductions, v * stage_backward) + repeated,
        exposed,
    )
    exposed_reductions = np.maximum(
        exposed - is_flushed * shares.first_rank * stage_backward[:, :1], 0
    )
    first_gather = np.where(zero > 0, outer_share * gather, 0.0)
    later_gathers = np.where(
        zero > 2, _count_unshards(plans)[:, None] / v * gather - first_gather, 0.0
    )
    first_gather = np.maximum(
        first_gather - shares.first_rank * (rank_times.F / v)[:, :1], 0
    ) + np.maximum(later_gathers - m * rank_times.total, 0)
    end_reductions = _estimate_tied_reduction(model, cluster, plans, state_bytes, placement)
    end_reductions = end_reductions + _estimate_sequence_sums(
        model, cluster, plans, shares, state_bytes
    )
    exists = shares.rank_count > 0
    slowest_reduction = (exposed_reductions * exists).max(axis=1)
    slowest_gather = (first_gather * exists).max(axis=1)
    return slowest_reduction + slowest_gather + end_reductions  # type: ignore[no-any-return]


def _count_unshards(plans: PlanColumns) -> Floats:
    """Return the number of unshards of a rank in a step, summed over its stages, for each plan."""
    counts = plans.stages_per_rank.astype(float)
    for number in np.unique(plans.schedule).tolist():
        is_mine = (plans.schedule == number) & (plans.zero >= 3)
        counts[is_mine] = count_unshards(
            SCHEDULE_NAMES[number],
            plans.pp[is_mine],
            plans.stages_per_rank[is_mine],
            plans.microbatches[is_mine],
        )
    return counts


def _count_reductions(plans: PlanColumns) -> Any:
    """Return how often each gradient is reduced in a step, for each plan.

    With sharded gradients and more than two stages per rank, a gradient is reduced after each group
    of consecutive backwards of its stage. In a breadth-first schedule, each stage has one such
    group. All other plans reduce each gradient once.
    """
    group_count = np.where(
        plans.schedule == SCHEDULE_NAMES.index("looped_bfs"), 1, plans.microbatches // plans.pp
    )
    return np.where((plans.zero >= 2) & (plans.stages_per_rank > 2), np.maximum(group_count, 1), 1)


def _estimate_tied_reduction(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    state_bytes: StateBytes,
    placement: NodePlacement,
) -> Any:
    """Return the time to reduce the gradient of a tied embedding over the first and the last rank.

    The two ranks form a ring (SC21, arXiv 2104.04473, section 3; arXiv 1909.08053, appendix).
    """
    is_reduced = (plans.pp > 1) & ~plans.get_formula_column("is_vee") & model.tied
    slowest_link = min(cluster.nvlink_bandwidth, cluster.network_bandwidth)
    link = np.where(placement.has_separate_ends, slowest_link, cluster.nvlink_bandwidth)
    latency = np.where(placement.has_separate_ends, cluster.max_latency, cluster.latency)
    size = state_bytes.grads * count_end_params(model, plans.tp)[2]
    return np.where(is_reduced, 2 * (latency + size / 2 / link), 0.0)


def _estimate_sequence_sums(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    state_bytes: StateBytes,
) -> Floats:
    """Return the time to sum gradients of replicated weights over sequence-parallel ranks.

    The result is the time of the slowest rank group of each plan.
    """
    e, t, v, zero = (
        getattr(plans, name)[:, None] for name in ("ep", "tp", "stages_per_rank", "zero")
    )
    replicas = np.where(zero > 0, (plans.dp * plans.cp)[:, None], 1)
    bytes_per_param = state_bytes.grads / replicas
    common, experts = count_replicated_params(model, e)
    inner_bytes = shares.layers / v * common * bytes_per_param
    inner_bytes = inner_bytes + shares.layers / v * experts * state_bytes.grads / np.maximum(
        replicas // e, 1
    )
    end_params = (
        shares.has_first_stage * model.position_params
        + shares.has_last_stage * count_end_params(model, t)[1]
    )
    result: Any = np.zeros(shares.layers.shape)
    uses_it = plans.sequence_parallel > 0
    for number in np.unique(plans.tp[uses_it]).tolist():
        is_mine = uses_it & (plans.tp == number)
        group = find_slowest_group(cluster, 1, number)
        for sizes, times in (
            (inner_bytes + end_params * bytes_per_param, 1),
            (inner_bytes, plans.stages_per_rank - 1),
        ):
            distinct_sizes, size_index = np.unique(sizes[is_mine], return_inverse=True)
            seconds = np.array(
                [
                    time_all_reduce(cluster, tensor_bytes, group)
                    for tensor_bytes in distinct_sizes.tolist()
                ]
            )
            group_times = seconds[size_index].reshape(int(is_mine.sum()), -1)
            result[is_mine] += group_times * np.broadcast_to(times, len(plans))[is_mine, None]
    slowest: Floats = result.max(axis=1)
    return slowest


def _estimate_optimizer(
    cluster: Cluster, plans: PlanColumns, memory_table: MemoryTable, state_bytes: StateBytes
) -> Floats:
    """Return the time of the gradient norm and the update, on the rank with the most weights.

    `Cluster.fill_costs` computes the update in the same way.
    """
    zero, d, c, e = (getattr(plans, name)[:, None] for name in ("zero", "dp", "cp", "ep"))
    common = memory_table.common_params / np.where(zero > 0, d * c, 1)
    params = common + memory_table.expert_params / np.where(zero > 0, np.maximum(d * c // e, 1), 1)
    update_time = (
        compute_step_bytes(*(size * params for size in state_bytes)) / cluster.hbm_bandwidth
    )
    first_rows, row_of_plan = plans.find_distinct("pp", "tp")
    norm_times = [
        cluster.small_all_reduce_time(8, int(plans.pp[i] * plans.tp[i]))
        for i in first_rows.tolist()
    ]
    return update_time.max(axis=1) + np.array(norm_times)[row_of_plan]  # type: ignore[no-any-return]
