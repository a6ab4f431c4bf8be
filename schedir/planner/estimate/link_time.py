"""Compute the times of messages and rings of many plans, by their placement on nodes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_columns import Floats, Ints, PlanColumns
from schedir.planner.transformer.transformer_spec import TransformerSpec


class LinkTimes(NamedTuple):
    """Seconds of a boundary's messages, by plan: over all borders between neighbouring ranks, and
    from the last rank to the first, where several stages are placed in a loop."""

    neighbors: Floats
    wraparound: Floats


def compute_link_times(
    model: TransformerSpec, cluster: Cluster, plans: PlanColumns, placement: NodePlacement
) -> LinkTimes:
    """What a microbatch's boundary takes from rank to rank.

    Of a boundary each of t slices sends all, or 1/t, which the others then gather (SC21, arXiv
    2104.04473, section 4.1), whichever takes less; where the sequence is cut over slices each has
    its own part, and nothing is gathered.
    """
    size = 1.0 * cluster.itemsize * plans.microbatch_size * model.sequence / plans.cp * model.hidden
    within, between = (
        cluster.nvlink_bandwidth,
        min(cluster.nvlink_bandwidth, cluster.network_bandwidth),
    )
    t = plans.tp
    gather = (t - 1) * (
        cluster.latency + size / t / np.where(t > cluster.gpus_per_node, between, within)
    )

    def message(link: float) -> Floats:
        part = cluster.latency + size / t / link
        whole = cluster.latency + size / link
        cut = plans.sequence_parallel > 0
        return np.where(cut, part, np.minimum(whole, part + gather))

    slow, near = message(between), message(within)
    borders = placement.node_crossings * slow + (plans.pp - 1 - placement.node_crossings) * near
    around = np.where(placement.has_separate_ends, slow, near)
    return LinkTimes(np.where(plans.pp > 1, borders, 0.0), np.where(plans.pp > 1, around, 0.0))


def build_process_mesh(plan: ParallelPlan) -> Ints:
    """Which process is where: shape (d c, p, t), as `Cluster.costs` takes it.

    Slices stand side by side, then parts of a sequence, and then what `order` says.

    >>> from schedir.planner import ParallelPlan
    >>> build_process_mesh(ParallelPlan(pp=2, dp=2)).tolist()
    [[[0], [1]], [[2], [3]]]
    >>> build_process_mesh(ParallelPlan(pp=2, dp=2, rank_order="tp-dp-pp")).tolist()
    [[[0], [2]], [[1], [3]]]
    """
    p, t, d, c = plan.pp, plan.tp, plan.dp, plan.cp
    each = np.arange(plan.gpus, dtype=np.int64)
    if plan.rank_order == "tp-pp-dp":
        placed = each.reshape(d, p, c, t).transpose(0, 2, 1, 3)
    else:
        placed = each.reshape(p, d, c, t).transpose(1, 2, 0, 3)
    return placed.reshape(d * c, p, t)


class NodePlacement(NamedTuple):
    """Where a layout lies on nodes: over how many of the borders between ranks some replica leaves
    its node, whether the first and the last rank of some are on two, and the slowest links of
    replicas, and of those that have the same experts."""

    node_crossings: int
    has_separate_ends: bool
    replica_bandwidth: float
    expert_bandwidth: float


@lru_cache(maxsize=4096)
def place_on_nodes(cluster: Cluster, plan: ParallelPlan) -> NodePlacement:
    """Those of a choice's p, t, d, c, e and order."""
    where = build_process_mesh(plan)
    nodes = where // cluster.gpus_per_node
    crossed = (nodes[:, 1:] != nodes[:, :-1]).any(axis=(0, 2))
    groups = where.reshape(len(where), -1)
    alike = (nodes - nodes[:1]).reshape(len(where), -1)  # as seen from each group's first one
    some = groups[:, np.unique(alike, axis=1, return_index=True)[1]].T
    slowest, experts = (
        min(cluster.bandwidth(group[::each]) for group in some) for each in (1, plan.ep)
    )
    return NodePlacement(
        int(crossed.sum()), bool((nodes[:, 0] != nodes[:, -1]).any()), slowest, experts
    )


def place_plans_on_nodes(cluster: Cluster, plans: PlanColumns) -> NodePlacement:
    """Of many plans, a column each."""
    first, which = plans.find_distinct("pp", "tp", "dp", "cp", "ep")
    each = []
    for i in first.tolist():
        p, t, d, c, e = (int(getattr(plans, name)[i]) for name in ("pp", "tp", "dp", "cp", "ep"))
        each.append(
            place_on_nodes(
                cluster, ParallelPlan(pp=p, tp=t, dp=d, cp=c, ep=e, rank_order=plans.rank_order)
            )
        )
    columns: list[Any] = [np.array(column)[which] for column in zip(*each, strict=True)]
    return NodePlacement(*columns)


class ReplicaRing(NamedTuple):
    """Replicas that sum and gather: how many, and their slowest link, by plan."""

    size: Ints
    bandwidth: Floats
    latency: float

    def compute_gather_time(self, size: Any) -> Any:
        """Seconds of a gather, or a scattered sum, of `size` bytes: as `Cluster.all_gather`, of
        arrays."""
        many = self.size[:, None]
        taken = (many - 1) * (self.latency + size / many / self.bandwidth[:, None])
        return np.where((many > 1) & (size > 0), taken, 0.0)


def build_replica_rings(
    cluster: Cluster, plans: PlanColumns, placement: NodePlacement
) -> tuple[ReplicaRing, ReplicaRing]:
    """The rings of each plan's replicas, and of those that have the same experts."""
    many = plans.dp * plans.cp
    return (
        ReplicaRing(many, np.array(placement.replica_bandwidth), cluster.latency),
        ReplicaRing(
            np.maximum(many // plans.ep, 1), np.array(placement.expert_bandwidth), cluster.latency
        ),
    )
