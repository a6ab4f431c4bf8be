"""Links: what messages between ranks and sums over replicas take in many plans."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from schedir.ir.cluster import Cluster
from schedir.planner.choice import Order
from schedir.planner.model import Model
from schedir.planner.plans import Floats, Plans


class Ways(NamedTuple):
    """Seconds of a boundary's messages, by plan: over all borders between neighbouring ranks, and
    from the last rank to the first, where several stages are placed in a loop."""

    borders: Floats
    around: Floats


def ways(model: Model, cluster: Cluster, plans: Plans) -> Ways:
    """What a microbatch's boundary takes from rank to rank.

    Of a boundary each of t slices sends all, or 1/t, which the others then gather (SC21, arXiv
    2104.04473, section 4.1), whichever takes less; where the sequence is cut over slices each has
    its own part, and nothing is gathered.
    """
    size = 1.0 * cluster.itemsize * plans.b * model.sequence / plans.c * model.hidden
    within, between = cluster.nvlink, min(cluster.nvlink, cluster.network)
    t = plans.t
    gather = (t - 1) * (
        cluster.latency + size / t / np.where(t > cluster.gpus_per_node, between, within)
    )

    def message(link: float) -> Floats:
        part = cluster.latency + size / t / link
        whole = cluster.latency + size / link
        cut = plans.sequence_parallel > 0
        return np.where(cut, part, np.minimum(whole, part + gather))

    slow, near = message(between), message(within)
    across = crossings(cluster, plans)
    borders = across * slow + (plans.p - 1 - across) * near
    reach = plans.p * plans.t * plans.c * (plans.d if plans.order == "tdp" else 1)
    around = np.where(reach > cluster.gpus_per_node, slow, near)
    return Ways(np.where(plans.p > 1, borders, 0.0), np.where(plans.p > 1, around, 0.0))


def crossings(cluster: Cluster, plans: Plans) -> Any:
    """Over how many of the p - 1 borders between ranks some replica leaves a node.

    With ranks side by side, border k of a replica that begins at process o lies at o + k t c, and
    replicas begin at multiples of p t c: it is one between nodes where k t c is a multiple of what
    p t c and a node have in common.
    """
    node, near = cluster.gpus_per_node, plans.t * plans.c
    if plans.order == "tdp":
        step = near * plans.d
        some = np.where((step < node) & (node % step == 0), node // np.minimum(step, node), 1)
        return np.where(plans.p * step <= node, 0, (plans.p - 1) // some)
    common = np.gcd(np.where(plans.d > 1, plans.p * near, 0), node)
    return (plans.p - 1) // (common // np.gcd(near, common))


def members(d: int, c: int, t: int, p: int, order: Order) -> tuple[int, ...]:
    """Processes of the first replica group: those that have the same weights."""
    stride = t * c * (p if order == "tpd" else 1)
    return tuple(k * stride + j * t for k in range(d) for j in range(c))


@lru_cache(maxsize=4096)
def bandwidth(cluster: Cluster, group: tuple[int, ...]) -> float:
    """As `Cluster.bandwidth`, which many plans ask for the same groups."""
    return cluster.bandwidth(group)


class Ring(NamedTuple):
    """Replicas that sum and gather: how many, and their slowest link, by plan."""

    size: Floats
    bandwidth: Floats
    latency: float

    def turn(self, size: Any) -> Any:
        """Seconds of a gather, or a scattered sum, of `size` bytes: as `Cluster.all_gather`, of
        arrays."""
        many = self.size[:, None]
        taken = (many - 1) * (self.latency + size / many / self.bandwidth[:, None])
        return np.where((many > 1) & (size > 0), taken, 0.0)


def replicas(cluster: Cluster, plans: Plans, *, experts: bool = False) -> Ring:
    """The ring of each plan's replicas, or of those that have the same experts."""
    first, which = plans.distinct("d", "c", "t", "p", "e")
    links = []
    for i in first.tolist():
        d, c, t, p, e = (int(getattr(plans, name)[i]) for name in ("d", "c", "t", "p", "e"))
        group = members(d, c, t, p, plans.order)
        links.append(bandwidth(cluster, group[:: e if experts else 1]))
    size = np.maximum(plans.d * plans.c // (plans.e if experts else 1), 1)
    return Ring(size.astype(float), np.array(links)[which], cluster.latency)
