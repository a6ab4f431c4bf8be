"""Change the number of GPUs of a cluster."""

from __future__ import annotations

from dataclasses import replace

from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster


def resize_cluster(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with a given number of GPUs.

    Args:
        cluster: The cluster.
        gpus: The number of GPUs. If a node has more GPUs, the result is one node with `gpus` GPUs.

    Raises:
        UsageError: `gpus` is more than the GPUs of a node, and not a multiple of this number.
    """
    gpus_per_node = cluster.gpus_per_node
    if gpus < gpus_per_node:
        return replace(cluster, nodes=1, gpus_per_node=gpus)
    if gpus % gpus_per_node:
        fewer = gpus // gpus_per_node * gpus_per_node
        raise UsageError(
            f"{gpus} GPUs do not fill nodes: a node of the cluster has {gpus_per_node} GPUs",
            hint=f"{fewer} or {fewer + gpus_per_node} GPUs",
            fields=["gpus"],
        )
    return replace(cluster, nodes=gpus // gpus_per_node)
