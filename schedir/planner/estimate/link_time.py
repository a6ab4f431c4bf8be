"""Compute the times of messages, collectives and waits of many plans."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.plan_columns import Floats, Ints, PlanColumns
from schedir.planner.transformer.transformer_spec import TransformerSpec


class LinkTimes(NamedTuple):
    """Times of the messages of one boundary, in seconds, of shape (plans,).

    Attributes:
        neighbors: The sum of the times of a message between each pair of neighboring ranks.
        wraparound: The time of a message from the last rank to the first rank. Only the placement
            `loop` has such messages.
    """

    neighbors: Floats
    wraparound: Floats


def compute_link_times(
    model: TransformerSpec, cluster: Cluster, plans: PlanColumns, placement: NodePlacement
) -> LinkTimes:
    """Return the times to send the boundary of a microbatch from rank to rank.

    Each of t tensor-parallel ranks sends either the full boundary, or 1/t of the boundary. In the
    second case, the receivers gather the parts (SC21, arXiv 2104.04473, section 4.1). The estimate
    uses the faster of the two ways. With sequence parallelism each rank sends its part of the
    sequence, 1/t, and nothing is gathered.

    Args:
        model: The model.
        cluster: The cluster.
        plans: The plans.
        placement: The placement of the plans, from `place_plans_on_nodes`.
    """
    size = 1.0 * cluster.itemsize * plans.microbatch_size * model.sequence / plans.cp * model.hidden
    intra_node = cluster.nvlink_bandwidth
    inter_node = min(cluster.nvlink_bandwidth, cluster.network_bandwidth)
    t = plans.tp
    is_wide = t > cluster.gpus_per_node
    gather = (t - 1) * (
        np.where(is_wide, cluster.max_latency, cluster.latency)
        + size / t / np.where(is_wide, inter_node, intra_node)
    )

    def message(link: float, latency: float) -> Floats:
        """Return the seconds of one message over a link of `link` bytes per second."""
        part = latency + size / t / link
        full = latency + size / link
        is_sharded = plans.sequence_parallel > 0
        return np.where(is_sharded, part, np.minimum(full, part + gather))

    slow = message(inter_node, cluster.max_latency)
    fast = message(intra_node, cluster.latency)
    borders = placement.node_crossings * slow + (plans.pp - 1 - placement.node_crossings) * fast
    wraparound = np.where(placement.has_separate_ends, slow, fast)
    return LinkTimes(np.where(plans.pp > 1, borders, 0.0), np.where(plans.pp > 1, wraparound, 0.0))


def build_process_mesh(plan: ParallelPlan) -> Ints:
    """Return the global rank of each process, of shape (dp * cp, pp, tp).

    `Cluster.fill_costs` needs this mesh. The ranks of a tensor-parallel group are consecutive, and
    context-parallel groups come next. `ParallelPlan.rank_order` decides whether pipeline ranks or
    replicas follow.

    Args:
        plan: The plan.

    Example:
        >>> from schedir.planner import ParallelPlan
        >>> build_process_mesh(ParallelPlan(pp=2, dp=2)).tolist()
        [[[0], [1]], [[2], [3]]]
        >>> build_process_mesh(ParallelPlan(pp=2, dp=2, rank_order="tp-dp-pp")).tolist()
        [[[0], [2]], [[1], [3]]]
    """
    p, t, d, c = plan.pp, plan.tp, plan.dp, plan.cp
    processes = np.arange(plan.gpus, dtype=np.int64)
    if plan.rank_order == "tp-pp-dp":
        mesh = processes.reshape(d, p, c, t).transpose(0, 2, 1, 3)
    else:
        mesh = processes.reshape(p, d, c, t).transpose(1, 2, 0, 3)
    return mesh.reshape(d * c, p, t)


class NodePlacement(NamedTuple):
    """The placement of a plan on nodes, as scalars or as arrays of shape (plans,).

    Attributes:
        node_crossings: The number of pairs of neighboring ranks that are on different nodes in at
            least one replica.
        has_separate_ends: True if the first and the last rank are on different nodes in at least
            one replica.
        replica_bandwidth: The bandwidth of the slowest link between replicas, in bytes per second.
        replica_nodes: The largest number of nodes that a group of replicas spans.
        expert_bandwidth: The bandwidth of the slowest link between replicas with the same experts,
            in bytes per second.
    """

    node_crossings: int
    has_separate_ends: bool
    replica_bandwidth: float
    replica_nodes: int
    expert_bandwidth: float


@lru_cache(maxsize=4096)
def place_on_nodes(cluster: Cluster, plan: ParallelPlan) -> NodePlacement:
    """Return the placement of one plan, from its parallel degrees and its rank order.

    Args:
        cluster: The cluster.
        plan: The plan.
    """
    mesh = build_process_mesh(plan)
    nodes = mesh // cluster.gpus_per_node
    crossed = (nodes[:, 1:] != nodes[:, :-1]).any(axis=(0, 2))
    groups = mesh.reshape(len(mesh), -1)
    # Groups of replicas have the same links if the distances between their ranks, in nodes, are
    # equal. So one group for each set of distances is enough.
    node_offsets = (nodes - nodes[:1]).reshape(len(mesh), -1)
    distinct_groups = groups[:, np.unique(node_offsets, axis=1, return_index=True)[1]].T
    slowest, experts = (
        min(cluster.bandwidth(group[::stride]) for group in distinct_groups)
        for stride in (1, plan.ep)
    )
    return NodePlacement(
        int(crossed.sum()),
        bool((nodes[:, 0] != nodes[:, -1]).any()),
        slowest,
        max(len(np.unique(group // cluster.gpus_per_node)) for group in distinct_groups),
        experts,
    )


def place_plans_on_nodes(cluster: Cluster, plans: PlanColumns) -> NodePlacement:
    """Return the placements of many plans, with an array for each field.

    Args:
        cluster: The cluster.
        plans: The plans.
    """
    first_rows, row_of_plan = plans.find_distinct("pp", "tp", "dp", "cp", "ep")
    placements = []
    for i in first_rows.tolist():
        p, t, d, c, e = (int(getattr(plans, name)[i]) for name in ("pp", "tp", "dp", "cp", "ep"))
        layout = ParallelPlan(pp=p, tp=t, dp=d, cp=c, ep=e, rank_order=plans.rank_order)
        placements.append(place_on_nodes(cluster, layout))
    columns: list[Any] = [np.array(column)[row_of_plan] for column in zip(*placements, strict=True)]
    return NodePlacement(*columns)


@lru_cache(maxsize=4096)
def compute_expected_maximum(replicas: int) -> float:
    """Return the expected maximum of independent standard normal numbers, one for each replica.

    A step ends when its slowest replica ends. A step therefore takes (1 + `Cluster.jitter` x
    result) times the mean step time of a replica.

    Args:
        replicas: The number of replicas.

    References:
        Blom, "Statistical estimates and transformed beta-variables" (1958): for n replicas, the
        normal quantile of (n - 0.375) / (n + 0.25).

    Example:
        >>> [round(compute_expected_maximum(n), 2) for n in (1, 2, 8, 128)]
        [0.0, 0.59, 1.43, 2.58]
    """
    return NormalDist().inv_cdf((replicas - 0.375) / (replicas + 0.25))


def compute_data_loading_time(cluster: Cluster, sequences: Any) -> Any:
    """Return the seconds of a step for which a replica waits for its training data.

    Args:
        cluster: The cluster.
        sequences: The sequences that the replica reads in a step, as a number or an array.
    """
    return cluster.data_loading_us / 1e6 * sequences


class ReplicaRing(NamedTuple):
    """The ring of each plan in which replicas reduce gradients and gather weights.

    Attributes:
        size: The number of replicas, of shape (plans,).
        bandwidth: The bandwidth of the slowest link in bytes per second, of shape (plans,).
        latency: The mean latency of the links in seconds, of shape (plans,).
    """

    size: Ints
    bandwidth: Floats
    latency: Floats

    def compute_gather_time(self, size: Any) -> Any:
        """Return the seconds of an all-gather or a reduce-scatter, as in `Cluster.all_gather_time`.

        Args:
            size: Bytes of the gathered tensor, an array whose first dimension is the plans.
        """
        ring_size = self.size[:, None]
        seconds = (ring_size - 1) * (
            self.latency[:, None] + size / ring_size / self.bandwidth[:, None]
        )
        return np.where((ring_size > 1) & (size > 0), seconds, 0.0)

    def compute_bucket_latency(self) -> Floats:
        """Return the seconds that the latency of the links adds to a reduce-scatter of a bucket.

        The shape is (plans, 1).
        """
        seconds: Floats = (self.size - 1) * self.latency
        return seconds[:, None]


def build_replica_rings(
    cluster: Cluster, plans: PlanColumns, placement: NodePlacement
) -> tuple[ReplicaRing, ReplicaRing]:
    """Return the rings of all replicas, and the rings of replicas with the same experts.

    Args:
        cluster: The cluster.
        plans: The plans.
        placement: The placement of the plans, from `place_plans_on_nodes`.
    """
    replicas = plans.dp * plans.cp
    nodes = np.array(placement.replica_nodes)
    experts = np.maximum(replicas // plans.ep, 1)
    bandwidths = (placement.replica_bandwidth, placement.expert_bandwidth)

    def compute_mean_latencies(size: Ints) -> Floats:
        pairs = zip(size.tolist(), np.minimum(nodes, size).tolist(), strict=True)
        return np.array([cluster.compute_mean_latency(*pair) for pair in pairs])

    common, of_experts = (
        ReplicaRing(size, np.array(bandwidth), compute_mean_latencies(size))
        for size, bandwidth in zip((replicas, experts), bandwidths, strict=True)
    )
    return common, of_experts
