"""Estimate the step times of many plans in closed form, without a program.

The rank that works longest decides: its work, the time that it waits for all others, and what is
not hidden of messages and sums.  `simulated_estimate` simulates the program instead.
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
    """What one microbatch takes on each share: its `Times`, of arrays; and both together."""

    stage_times: Any
    F: Floats
    I: Floats  # with what runs again before it
    W: Floats
    shorter_end: Floats  # what the embedding takes, or the head, whichever takes less

    @property
    def total(self) -> Floats:
        """The whole of it."""
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
    """The parts of a step of each plan, a row for each of the fields of `StepBreakdown`: they add
    up to it.

    `memory_table` says what weights ranks have.
    """
    rank = compute_rank_times(model, cluster, plans, shares, constants)
    m, rows = plans.microbatches[:, None], np.arange(len(plans))
    busy = np.where(shares.rank_count > 0, m * rank.total, -1.0)
    at = busy.argmax(axis=1)

    def there(each: Any) -> Any:
        """Of the rank that decides."""
        return each[rows, at]

    waits, messages, each = _apply_formulas(plans, shares, rank, constants)
    where = place_plans_on_nodes(cluster, plans)
    way = compute_link_times(model, cluster, plans, where)
    v, p = plans.stages_per_rank, plans.pp
    loop = np.array([SCHEDULE_FORMULAS[name].stages_per_rank == "many" for name in SCHEDULE_NAMES])[
        plans.schedule
    ]
    vee = np.array([SCHEDULE_FORMULAS[name].is_vee for name in SCHEDULE_NAMES])[plans.schedule]
    loops = np.array([SCHEDULE_FORMULAS[name].is_breadth_first for name in SCHEDULE_NAMES])[
        plans.schedule
    ] & (p > 1)
    borders = np.where(loop, v * (p - 1) + v - 1, p - 1)
    path = np.where(loop, v * way.neighbors + (v - 1) * way.wraparound, way.neighbors)
    mean = path / np.maximum(borders, 1)
    # A rank sends each microbatch's boundary on, and a gradient back, for each of its stages.
    others = (rank.total * shares.rank_count).sum(axis=1) / p
    hidden = plans.microbatches * np.minimum(each * mean, there(rank.total) - others)
    transfers = messages * mean - hidden
    # A slow rank that has both ends, as in a vee, waits the less for the others.
    slack = plans.microbatches * (there(rank.total) - others)
    bubble = (waits * shares.rank_count).sum(axis=1) - there(waits) - vee * slack
    bubble = np.maximum(bubble + loops * plans.microbatches * rank.shorter_end, 0)
    transfers = np.maximum(transfers, 2 * plans.microbatches * v * mean * (p > 1) - there(busy))
    compute, tensor = rank.stage_times
    data = _estimate_data_parallel(
        model, cluster, plans, shares, memory_table, constants, state_bytes, rank, where
    )
    optimizer = _estimate_optimizer(cluster, plans, memory_table, state_bytes)
    found = dict(
        compute=plans.microbatches * there(compute.F + compute.I + compute.W),
        recompute=plans.microbatches * there(compute.R),
        tensor_parallel=plans.microbatches * there(tensor.F + tensor.I + tensor.W + tensor.R),
        transfers=transfers,
        bubble=bubble * _compute_idle_share(cluster, plans),
        data_parallel=data,
        optimizer=optimizer,
        host_copies=0 * optimizer,
    )
    return np.stack([found[name] for name in StepBreakdown._fields])


def _compute_idle_share(cluster: Cluster, plans: PlanColumns) -> Floats:
    """Of the time that ranks wait, the share in which processors do.

    While k of p ranks of a pipeline compute as it fills, k/p of all processes have what so many
    processors can give; where these are fewer than processes, they work on while others wait.
    """
    if cluster.processors is None:
        return np.ones(len(plans))
    can = min(cluster.processors / cluster.gpus_per_node, 1.0)
    found = np.ones(len(plans))
    for p in np.unique(plans.pp[plans.pp > 1]).tolist():
        working = np.arange(1, p) / p
        found[plans.pp == p] = np.maximum(can - working, 0).sum() / (1 - working).sum()
    return found


def compute_rank_times(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    constants: SoftwareConstants,
) -> RankTimes:
    """What a microbatch takes on each rank: its stages one by one, as `layer.stage` has them."""
    layer, embedding, head = _compute_part_work(model, cluster, plans, constants)
    v = plans.stages_per_rank[:, None]
    each = shares.layers / v
    first, last = 1.0 * shares.has_first_stage, 1.0 * shares.has_last_stage
    one = v == 1
    before = _sum_work((layer, each), (embedding, first), (head, last * one)).stage_times
    behind = _sum_work((layer, each), (head, last)).stage_times
    inner = _sum_work((layer, shares.layers - each * np.where(one, 1, first + last))).stage_times
    with_first: Any = np.where(one, 1.0, first)
    with_last: Any = np.where(one, 0.0, last)
    times: Any = inner.plus(before, with_first).plus(behind, with_last)
    F, I, W, R = times.total
    ends: list[Any] = [sum(_sum_work((part, 1.0)).stage_times.total) for part in (embedding, head)]
    return RankTimes(times, F, I + R, W, np.minimum(*ends)[:, 0])


def _sum_work(*terms: tuple[GpuWork, Any]) -> GpuWork:
    found = GpuWork()
    for term, times in terms:
        found = found.plus(term, times)
    return found


def _compute_part_work(
    model: TransformerSpec, cluster: Cluster, plans: PlanColumns, constants: SoftwareConstants
) -> Iterator[GpuWork]:
    """The work of a layer, of the embedding and of the head in each plan, columns: plans differ in
    it by few combinations of their fields."""
    split = np.array([SCHEDULE_FORMULAS[name].has_split_backward for name in SCHEDULE_NAMES])[
        plans.schedule
    ]
    names = ["tp", "microbatch_size", "recompute", "sequence_parallel", "cp", "ep"]
    names += ["pp"] if bool((plans.ep > 1).any()) else []
    found = np.zeros((len(plans), 3, 12))
    for half in (False, True):
        mine = np.flatnonzero(split == half)
        some = plans.select(mine)
        first, which = some.find_distinct(*names)
        each = [
            [compute_work(part, model, cluster, choice, constants) for part in _MODEL_PARTS]
            for choice in (some.plan_at(model, i) for i in first.tolist())
        ]
        found[mine] = np.array(each).reshape(-1, 3, 12)[which]
    for part in range(3):
        columns = found[:, part].T[:, :, None]
        yield GpuWork(*(PhaseTimes(*columns[k : k + 4]) for k in (0, 4, 8)))


def _apply_formulas(
    plans: PlanColumns, shares: RankGroupShares, rank_times: RankTimes, constants: SoftwareConstants
) -> tuple[Floats, Floats, Floats]:
    """How long the others wait for each share, how many messages nothing hides, and of these how
    many are each microbatch's.  For what may run again while its gradient is on its way nobody
    waits (`recompute_ahead`)."""
    waits = np.zeros(rank_times.F.shape)
    messages, each = np.zeros((2, len(plans)))
    v, full = (
        plans.stages_per_rank[:, None],
        (plans.recompute == RECOMPUTE_MODES.index("full"))[:, None],
    )
    awaited = rank_times.I - constants.recompute_ahead * full * rank_times.stage_times.total.R
    for number in np.unique(plans.schedule).tolist():
        mine, family = plans.schedule == number, SCHEDULE_FORMULAS[SCHEDULE_NAMES[number]]
        waits[mine] = family.wait_time(
            *(x[mine] / v[mine] for x in (rank_times.F, awaited, rank_times.W))
        )
        messages[mine] = family.exposed_messages(
            plans.pp[mine], plans.stages_per_rank[mine], plans.microbatches[mine]
        )
        each[mine] = family.messages_per_microbatch(plans.pp[mine])
    return waits, messages * (plans.pp > 1), each * (plans.microbatches > plans.pp)


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
    """Sums of gradients and gathers of weights over replicas, as far as nothing hides them.

    Sums: reduce-scatters and gathers of arXiv 1910.02054, section 7; without ZeRO a ring's
    all-reduce, which is both.  Each stage's run under its last backward, as far as the software
    does so (`reduction_overlap_share`), and those of all but the last stage to end under the
    backwards of the next ones; ranks that end before the first have until then.  With ZeRO weights
    are gathered at the head of the step, where ranks wait for their first microbatch; and where
    they are in parts again and again, beside what is computed.  Where gradients are in parts a rank
    has one whole one at a time: the next backward waits until it is summed.
    """
    zero, v, p, m = (
        getattr(plans, name)[:, None] for name in ("zero", "stages_per_rank", "pp", "microbatches")
    )
    each = [
        *zip(
            build_replica_rings(cluster, plans, placement),
            (memory_table.common_params, memory_table.expert_params),
            strict=True,
        )
    ]
    scatter = sum(ring.compute_gather_time(state_bytes.grads * own) for ring, own in each)
    gather = sum(ring.compute_gather_time(state_bytes.params * own) for ring, own in each)
    flush = np.array([not SCHEDULE_FORMULAS[name].has_split_backward for name in SCHEDULE_NAMES])[
        plans.schedule
    ][:, None]
    back = (rank_times.I + rank_times.W) / v  # of a stage
    sums, share = (
        np.where(zero > 0, 1, 2) * scatter,
        memory_table.outer_stage_params
        / np.maximum(memory_table.common_params + memory_table.expert_params, 1),
    )
    hidden, last = (
        constants.reduction_overlap_share,
        share * sums,
    )  # that of the first stage ends last
    left = last - np.minimum(hidden * last, back)
    left = left + np.maximum(sums - last - (v - 1) * np.minimum(p, m) * back, 0)
    turns = (_count_reductions(plans)[:, None] - 1) * np.maximum(sums - rank_times.F, 0)
    left = np.where((zero > 1) & (v > 2), sums - np.minimum(hidden * sums, v * back) + turns, left)
    late = np.maximum(left - flush * shares.first_rank * back[:, :1], 0)
    begin = np.where(zero > 0, share * gather, 0.0)
    later = np.where(zero > 2, _count_unshards(plans)[:, None] / v * gather - begin, 0.0)
    begin = np.maximum(begin - shares.first_rank * (rank_times.F / v)[:, :1], 0) + np.maximum(
        later - m * rank_times.total, 0
    )
    ends = _estimate_tied_reduction(model, cluster, plans, state_bytes, placement)
    ends = ends + _estimate_sequence_sums(model, cluster, plans, shares, state_bytes)
    there = shares.rank_count > 0
    return (late * there).max(axis=1) + (begin * there).max(axis=1) + ends  # type: ignore[no-any-return]


def _count_unshards(plans: PlanColumns) -> Floats:
    """How often a rank makes a stage whole in a step."""
    found = plans.stages_per_rank.astype(float)
    for number in np.unique(plans.schedule).tolist():
        mine = (plans.schedule == number) & (plans.zero >= 3)
        found[mine] = count_unshards(
            SCHEDULE_NAMES[number],
            plans.pp[mine],
            plans.stages_per_rank[mine],
            plans.microbatches[mine],
        )
    return found


def _count_reductions(plans: PlanColumns) -> Any:
    """How often each gradient is summed: behind each run of a stage's backwards where gradients are
    in parts, of which a breadth-first order has one."""
    runs = np.where(
        plans.schedule == SCHEDULE_NAMES.index("looped_bfs"), 1, plans.microbatches // plans.pp
    )
    return np.where((plans.zero >= 2) & (plans.stages_per_rank > 2), np.maximum(runs, 1), 1)


def _estimate_tied_reduction(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    state_bytes: StateBytes,
    placement: NodePlacement,
) -> Any:
    """The sum of the gradients of a tied embedding, of the first rank and the last (SC21, arXiv
    2104.04473, section 3; arXiv 1909.08053, appendix): a ring of two."""
    vee = np.array([SCHEDULE_FORMULAS[name].is_vee for name in SCHEDULE_NAMES])[plans.schedule]
    apart = (plans.pp > 1) & ~vee & model.tied
    slow = min(cluster.nvlink_bandwidth, cluster.network_bandwidth)
    link = np.where(placement.has_separate_ends, slow, cluster.nvlink_bandwidth)
    size = state_bytes.grads * count_end_params(model, plans.tp)[2]
    return np.where(apart, 2 * (cluster.latency + size / 2 / link), 0.0)


def _estimate_sequence_sums(
    model: TransformerSpec,
    cluster: Cluster,
    plans: PlanColumns,
    shares: RankGroupShares,
    state_bytes: StateBytes,
) -> Floats:
    """The sums over slices that share the sequence, of the rank on which they take longest."""
    e, t, v, zero = (
        getattr(plans, name)[:, None] for name in ("ep", "tp", "stages_per_rank", "zero")
    )
    every = np.where(zero > 0, (plans.dp * plans.cp)[:, None], 1)
    each, (common, experts) = state_bytes.grads / every, count_replicated_params(model, e)
    inner = shares.layers / v * common * each
    inner = inner + shares.layers / v * experts * state_bytes.grads / np.maximum(every // e, 1)
    ends = (
        shares.has_first_stage * model.sequence * model.hidden
        + shares.has_last_stage * count_end_params(model, t)[1]
    )
    found: Any = np.zeros(shares.layers.shape)
    cut = plans.sequence_parallel > 0
    for number in np.unique(plans.tp[cut]).tolist():
        mine, group = cut & (plans.tp == number), find_slowest_group(cluster, 1, number)
        for sizes, times in ((inner + ends * each, 1), (inner, plans.stages_per_rank - 1)):
            size, which = np.unique(sizes[mine], return_inverse=True)
            seconds = np.array([time_all_reduce(cluster, one, group) for one in size.tolist()])
            more = seconds[which].reshape(int(mine.sum()), -1)
            found[mine] += more * np.broadcast_to(times, len(plans))[mine, None]
    most: Floats = found.max(axis=1)
    return most


def _estimate_optimizer(
    cluster: Cluster, plans: PlanColumns, memory_table: MemoryTable, state_bytes: StateBytes
) -> Floats:
    """Norms and updates: the step of `Cluster.costs`, of the rank with the most weights."""
    zero, d, c, e = (getattr(plans, name)[:, None] for name in ("zero", "dp", "cp", "ep"))
    common = memory_table.common_params / np.where(zero > 0, d * c, 1)
    own = common + memory_table.expert_params / np.where(zero > 0, np.maximum(d * c // e, 1), 1)
    each = compute_step_bytes(*(size * own for size in state_bytes)) / cluster.hbm_bandwidth
    first, which = plans.find_distinct("pp", "tp")
    norms = [
        cluster.small_all_reduce_time(8, int(plans.pp[i] * plans.tp[i])) for i in first.tolist()
    ]
    return each.max(axis=1) + np.array(norms)[which]  # type: ignore[no-any-return]
