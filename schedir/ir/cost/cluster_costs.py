"""Compute the costs of a program on a Cluster, from bytes and the speeds of links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from math import inf
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CommandHint, CostsError, UsageError
from schedir.ir.cost.costs import Cost, Costs
from schedir.ir.cost.per_stage_values import from_grid, to_grid
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import (
    BOUNDARY_GATHER_OPS,
    EP_COLLECTIVE_OPS,
    INSTRUCTIONS,
    OPTIMIZER_STEP_SIZES,
    TP_SPLIT_OPS,
    TRAINING_VALUES,
    VALUES,
    PeerRule,
    Row,
    Scope,
    Value,
    is_tp_split,
)
from schedir.ir.pipeline.pipeline_shape import PipelineShape

Floats = NDArray[np.float64]
# Name of a cost -> the ring collective that gathers or sums weights or gradients of a stage.
_RING_BY_COST: Final = {
    row.cost: row.ring for row in INSTRUCTIONS if row.ring is not None and row.ring.size
}
_ALL_TO_ALL_COSTS: Final = dict.fromkeys(INSTRUCTIONS[op].cost for op in EP_COLLECTIVE_OPS)
# Costs of collectives that only programs with ZeRO have.
_ZERO_COLLECTIVES: Final = {"reduce_scatter", "unshard"}
# Costs of collectives that only programs without ZeRO have.
_NON_ZERO_COLLECTIVES: Final = {"reduce_grads"}
# Name of a cost, except `send` -> names of the sizes of the messages that have this cost and pass
# between neighbouring stages.  A cluster computes no costs of messages along skip connections.
_SIZES_BY_MESSAGE: Final = {
    row.cost: {
        VALUES[kind].size
        for other in INSTRUCTIONS
        if other.cost == row.cost
        for kind in (*other.needs, *other.gives)
    }
    for row in INSTRUCTIONS
    if row.peer in (PeerRule.NEXT, PeerRule.PREVIOUS) and row.cost not in ("", "send")
}
_GATHER_COSTS: Final = {row.cost for row in INSTRUCTIONS if row.op in BOUNDARY_GATHER_OPS}
_TRAFFIC_BY_COST: Final = {
    row.cost: row.traffic for row in INSTRUCTIONS if row.cost and row.traffic is not None
}
# Costs of instructions per microbatch.  ZeRO does not shard the values of a microbatch.
_MICROBATCH_COSTS: Final = {row.cost for row in INSTRUCTIONS if row.scope is Scope.MICROBATCH}
# Names of the sizes that ZeRO shards.  If an instruction uses such a size, and the size is missing,
# `Cluster.fill_costs` raises an error.
_MODEL_STATE_SIZES: Final = frozenset(OPTIMIZER_STEP_SIZES)
_EXAMPLE_SIZES: Final = {"params": "2GB", "grads": "2GB", "optimizer": "12GB"}
# An array of process numbers: the mesh, shape (dp, ranks, tp), or one process group.
Processes = NDArray[np.int64]
# A function that divides the processes of some ranks into process groups. Its argument is the ranks
# that have a replica of a stage. Its result is an array with one group in each row.
GroupFunction = Callable[[Processes], Processes]


class ClusterPrices(Protocol):
    """The fields and methods of `Cluster` that this module uses."""

    @property
    def gpus_per_node(self) -> int:
        """See `Cluster`."""
        ...

    @property
    def hbm_bandwidth(self) -> float:
        """See `Cluster`."""
        ...

    @property
    def nvlink_bandwidth(self) -> float:
        """See `Cluster`."""
        ...

    @property
    def network_bandwidth(self) -> float:
        """See `Cluster`."""
        ...

    @property
    def dram_bandwidth(self) -> float | None:
        """See `Cluster`."""
        ...

    @property
    def latency(self) -> float:
        """See `Cluster`."""
        ...

    @property
    def kernel_us(self) -> float:
        """See `Cluster`."""
        ...

    @property
    def max_latency(self) -> float:
        """See `Cluster.max_latency`."""
        ...

    def bandwidth(self, processes: Processes) -> float:
        """See `Cluster.bandwidth`."""

    def latency_of(self, processes: Processes) -> float:
        """See `Cluster.latency_of`."""

    def host_transfer_time(self, size: float) -> float:
        """See `Cluster.host_transfer_time`."""

    def disk_transfer_time(self, size: float) -> float:
        """See `Cluster.disk_transfer_time`."""

    def small_all_reduce_time(self, size: float, processes: Processes) -> float:
        """See `Cluster.small_all_reduce_time`."""

    def all_to_all_time(self, size: float, processes: Processes) -> float:
        """See `Cluster.all_to_all_time`."""


def fill_cluster_costs(
    cluster: ClusterPrices,
    shape: PipelineShape,
    sizes: Sizes,
    costs: Costs,
    mesh: Processes,
    zero: int,
    ep: int,
    *,
    checkpoint_snapshots: bool,
    optimizer_placement: str,
) -> Costs:
    """Fill the missing costs, except those of activation offload.

    Args:
        cluster: The cluster.
        shape: See `Cluster.fill_costs`.
        sizes: See `Cluster.fill_costs`.
        costs: See `Cluster.fill_costs`.
        mesh: See `Cluster.fill_costs`.
        zero: See `Cluster.fill_costs`.
        ep: See `Cluster.fill_costs`.
        checkpoint_snapshots: See `Cluster.fill_costs`.
        optimizer_placement: See `Cluster.fill_costs`.

    Returns:
        The costs, in seconds.

    Raises:
        UsageError: A size or a bandwidth that is needed is missing.
        CostsError: F is missing, none of B, I and W is given, or only one of I and W is given.
    """
    filled_costs = _split_backward_cost(costs)
    filler = _CostFiller(cluster, shape, sizes, mesh, zero, ep)
    attributes = {
        "checkpoint_snapshots": checkpoint_snapshots,
        "optimizer_placement": optimizer_placement,
    }
    for name, compute_cost in filler.get_cost_functions(attributes).items():
        if name not in costs.specified:
            filled_costs[name] = _to_cost(compute_cost())
    return replace(costs, **filled_costs)


def fill_offload_costs(
    cluster: ClusterPrices,
    shape: PipelineShape,
    sizes: Sizes,
    costs: Costs,
    tier: str,
    recomputed: Collection[tuple[int, int]],
) -> Costs:
    """Fill the missing costs of activation offload to one tier.

    Args:
        cluster: The cluster.
        shape: Shape of the pipeline.
        sizes: Bytes of values. Offload moves `saved`, or `recompute_inputs` of a recomputed
            forward.
        costs: The costs that are given, in seconds.
        tier: "host" for the copies between device and host, "disk" for those between host and disk.
        recomputed: Pairs of (stage, microbatch) whose forward saves only its inputs.

    Returns:
        The costs, in seconds.

    Raises:
        UsageError: `saved`, or the bandwidth of the tier, is missing.
    """
    tier_costs, compute_time = {
        "host": (("offload", "reload"), cluster.host_transfer_time),
        "disk": (("offload_to_disk", "reload_from_disk"), cluster.disk_transfer_time),
    }[tier]
    names = [name for name in tier_costs if name not in costs.specified]
    size = sizes.per_microbatch("saved", shape)
    if names and not size.any():
        raise _make_missing_size_error(names[0], "saved=1.2GB")
    if recomputed:
        is_recomputed = np.zeros((shape.stages, shape.microbatches), bool)
        is_recomputed[tuple(np.array([*recomputed]).T)] = True
        size = np.where(is_recomputed, sizes.per_microbatch("recompute_inputs", shape), size)
    cost = _to_cost(_compute_times(compute_time, size))
    return replace(costs, **dict.fromkeys(names, cost))


def _split_backward_cost(costs: Costs) -> dict[str, Cost]:
    """Return I and W, each half of B, if only B is given, or else an empty dictionary.

    Raises CostsError if F is missing, or if the backwards are incomplete.
    """
    specified = costs.specified
    halves = [name for name in ("I", "W") if name in specified]
    if "F" not in specified or not ("B" in specified or len(halves) == 2):
        raise CostsError(
            "a cluster does not determine the costs of F and B (or F, I and W): give them in "
            "seconds",
            hint=CommandHint("Costs(F=0.012, B=0.024)", "--costs F=0.012,B=0.024"),
        )
    if len(halves) == 1:
        raise CostsError(
            f"the costs have B and {halves[0]}: give both I and W, or neither",
            hint=CommandHint(
                "Costs(..., I=0.014, W=0.01)", "--costs F=0.012,B=0.024,I=0.014,W=0.01"
            ),
        )
    return {} if halves else dict.fromkeys(("I", "W"), from_grid(to_grid(specified["B"]) / 2))


class _CostFiller:
    """Computes costs of a pipeline shape on a cluster.

    The costs are seconds in arrays of shape (stages, microbatches). An axis along which all values
    are equal can have length 1.
    """

    def __init__(
        self,
        cluster: ClusterPrices,
        shape: PipelineShape,
        sizes: Sizes,
        mesh: Processes,
        zero: int,
        ep: int,
    ) -> None:
        self.cluster = cluster
        self.shape = shape
        self.sizes = sizes
        self.mesh = mesh
        self.zero = zero
        self.ep = ep
        self.dp = int(mesh.shape[0])
        self.tp = int(mesh.shape[2])

    def get_cost_functions(
        self, attributes: Mapping[str, object]
    ) -> dict[str, Callable[[], Floats]]:
        """Return the functions that compute the costs of programs with the given attributes.

        Args:
            attributes: The attributes `checkpoint_snapshots` and `optimizer_placement` of the
                programs.

        Returns:
            Name of a cost -> the function. Costs that these programs do not have are left out.
        """
        unused_rings = _NON_ZERO_COLLECTIVES if self.zero else _ZERO_COLLECTIVES
        ring_costs = [
            cost
            for cost, ring in _RING_BY_COST.items()
            if cost not in unused_rings
            and (ring.size in _MODEL_STATE_SIZES or self._has_sizes([ring.size]))
        ]
        message_costs = [
            cost for cost, names in _SIZES_BY_MESSAGE.items() if self._has_sizes(names)
        ]
        traffic_costs = [
            cost
            for cost, traffic in _TRAFFIC_BY_COST.items()
            if (
                attributes[traffic.program_attribute] in traffic.attribute_values
                if traffic.program_attribute
                else self._has_sizes(traffic.sizes)
            )
        ]
        # If the optimizer state is not on the device, each stage has a separate optimizer step
        # (`stage_step` or `host_step`), and OptimizerStep takes no time.
        has_stage_steps = attributes["optimizer_placement"] != "device"
        return {
            "send": self.compute_send,
            **{cost: partial(self.compute_message, cost) for cost in message_costs},
            **{cost: partial(self.compute_gather, cost) for cost in _GATHER_COSTS},
            **{cost: partial(self.compute_ring, cost) for cost in ring_costs},
            **{
                cost: partial(self.compute_all_to_all, cost)
                for cost in _ALL_TO_ALL_COSTS
                if self.ep > 1
            },
            "reduce_norm": self.compute_reduce_norm,
            "step": (lambda: np.zeros((1, 1))) if has_stage_steps else self.compute_step,
            **{cost: partial(self.compute_traffic, cost) for cost in traffic_costs},
        }

    # ------------------------------------------------------------ messages

    def compute_send(self) -> Floats:
        """Return the time of each stage's longer message: its activation or its gradient.

        If a stage has replicas, the time is that of the slowest of their links.

        Returns:
            Seconds, shape (stages, microbatches) or (stages, 1).
        """
        act, grad = self._find_sent_bytes("send")
        act, grad = (self._compute_messages(x / self.tp, self._find_links()) for x in (act, grad))
        return np.maximum(act, _shift_to_next_stage(grad))

    def compute_message(self, cost: str) -> Floats:
        """Return the time of each stage's longest message among the instructions with this cost.

        Args:
            cost: Name of the cost.

        Returns:
            Seconds, shape (stages, microbatches) or (stages, 1).
        """
        messages = []
        for row in INSTRUCTIONS:
            if row.cost == cost and row.peer is not None:
                (kind,) = row.needs or row.gives
                message_bytes = self.sizes.per_microbatch(VALUES[kind].size, self.shape)
                parts = self.tp if is_tp_split(row.op, kind) else 1
                seconds = self._compute_messages(
                    message_bytes / parts * self._is_sent_onward[:, None], self._find_links()
                )
                messages.append(
                    seconds if row.peer.is_downstream else _shift_to_next_stage(seconds)
                )
        return reduce(np.maximum, messages)

    def _find_links(self) -> tuple[Floats, Floats]:
        """Return bandwidth and latency of the slowest link from each stage to the next.

        Both arrays have shape (stages,).
        """
        bandwidth = np.full(self.shape.stages, inf)
        latency = np.full(self.shape.stages, self.cluster.latency)
        nodes = self.mesh // self.cluster.gpus_per_node
        within_node = self.cluster.nvlink_bandwidth
        between_nodes = min(within_node, self.cluster.network_bandwidth)
        for stage in np.flatnonzero(self._is_sent_onward).tolist():
            a, b = self.shape.replica_ranks[:, stage], self.shape.replica_ranks[:, stage + 1]
            leaves_node = (nodes[:, a] != nodes[:, b]).any()
            bandwidth[stage] = between_nodes if leaves_node else within_node
            latency[stage] = self.cluster.max_latency if leaves_node else self.cluster.latency
        return bandwidth, latency

    def compute_gather(self, cost: str) -> Floats:
        """Return the time of the tensor-parallel all-gather of a value that a stage receives.

        Args:
            cost: Name of the cost.

        Returns:
            Seconds, shape (stages, microbatches), (stages, 1) or (1, 1).
        """
        if self.tp == 1:
            return np.zeros((1, 1))
        links = self._find_slowest_links(lambda ranks: self.mesh[:, ranks].reshape(-1, self.tp))
        return (self.tp - 1) * self._compute_messages(
            self._find_changed_bytes(cost) / self.tp, links
        )

    def compute_all_to_all(self, cost: str) -> Floats:
        """Return the time of an all-to-all of the expert-parallel group.

        All experts get equally many tokens.

        Args:
            cost: Name of the cost.

        Returns:
            Seconds of the slowest group, shape (stages, microbatches) or (stages, 1).
        """
        size = self.sizes.per_microbatch("routed", self.shape)
        if not size.any():
            raise _make_missing_size_error(cost, "routed=32MB")
        groups = self.mesh.reshape(self.dp // self.ep, self.ep, -1, self.tp)
        rows = []
        for stage_bytes, ranks in zip(size, self.shape.replica_ranks.T, strict=True):
            stage_groups = groups[:, :, ranks].swapaxes(1, 3).reshape(-1, self.ep)
            seconds = [
                _compute_times(partial(self.cluster.all_to_all_time, processes=group), stage_bytes)
                for group in self._drop_equal_groups(stage_groups)
            ]
            rows.append(reduce(np.maximum, seconds))
        return np.array(rows)

    def _find_changed_bytes(self, cost: str) -> Floats:
        """Return, for each stage, the bytes of the value that instructions with this cost change.

        If these instructions change several values, the result is the size of the largest value.
        `Sizes` lists the bytes of a boundary under the earlier of its two stages.
        """
        act, grad = self._find_sent_bytes(cost)
        sizes = [
            stage_bytes if peer.is_downstream else _shift_to_next_stage(stage_bytes)
            for row in INSTRUCTIONS
            if row.cost == cost
            for kind in row.gives
            if (peer := VALUES[kind].peer) is not None
            for stage_bytes in [grad if kind in TRAINING_VALUES else act]
        ]
        # Shapes may differ: (stages, microbatches) and (stages, 1).
        return reduce(np.maximum, sizes)

    def _find_sent_bytes(self, cost: str) -> tuple[Floats, Floats]:
        """Return the bytes of each stage's activation and gradient; 0 if no rank sends them."""
        act, grad = (
            self.sizes.per_microbatch(name, self.shape)
            for name in ("activation", "activation_grad")
        )
        if self._is_sent_onward.any() and not act[self._is_sent_onward].all():
            raise _make_missing_size_error(cost, "activation=16MB")
        return act * self._is_sent_onward[:, None], grad * self._is_sent_onward[:, None]

    @property
    def _is_sent_onward(self) -> NDArray[np.bool_]:
        """Return a mask, shape (stages,), of the stages whose activation goes to another rank."""
        ranks = self.shape.replica_ranks
        return np.append((ranks[:, 1:] != ranks[:, :-1]).any(0), False)

    def _compute_messages(self, size: Floats, links: tuple[Floats, Floats]) -> Floats:
        """Return the seconds of one message of each stage. A message of 0 bytes takes no time."""
        bandwidth, latency = links
        return np.where(size > 0, latency[:, None] + size / bandwidth[:, None], 0.0)

    # ------------------------------------------------------------ collectives and memory traffic

    def compute_ring(self, cost: str) -> Floats:
        """Return the time of a collective on the weights or gradients of a stage.

        Args:
            cost: Name of the cost.

        Returns:
            Seconds, shape (stages, 1), or (1, 1) if the collective has one member.
        """
        ring, rows = _RING_BY_COST[cost], self.shape.placement_rows
        members = {"tp": self.tp, "dp": self.dp, "stage_replicas": rows}[ring.members]
        # With ZeRO, each rank reduces only its replica's shard of the gradient.
        shard_count = self.dp if ring.members == "stage_replicas" and self.zero else 1
        if members == 1:
            return np.zeros((1, 1))

        def get_groups(ranks: Processes) -> Processes:
            if ring.members == "stage_replicas":
                return self.mesh[:, ranks].swapaxes(1, 2).reshape(-1, rows)
            if ring.members == "tp":
                return self.mesh[:, ranks].reshape(-1, self.tp)
            return self.mesh[:, ranks].reshape(self.dp, -1).T

        state_bytes = self.sizes.per_microbatch(ring.size, self.shape)
        if not state_bytes.any():
            raise _make_missing_size_error(cost, f"{ring.size}=2GB")
        links = self._find_slowest_links(get_groups)
        message_time = self._compute_messages(state_bytes / shard_count / members, links)
        return ring.rounds * (members - 1) * message_time

    def _find_slowest_links(self, get_groups: GroupFunction) -> tuple[Floats, Floats]:
        """Return the lowest bandwidth and the highest mean latency of each stage's process groups.

        Both arrays have shape (stages,).
        """
        ranks_by_stage = [tuple(ranks) for ranks in self.shape.replica_ranks.T.tolist()]
        links: dict[tuple[int, ...], tuple[float, float]] = {}
        for ranks in {*ranks_by_stage}:
            groups = self._drop_equal_groups(get_groups(np.array(ranks)))
            links[ranks] = (
                min(map(self.cluster.bandwidth, groups)),
                max(map(self.cluster.latency_of, groups)),
            )
        columns = np.array([links[ranks] for ranks in ranks_by_stage])
        return columns[:, 0], columns[:, 1]

    def _drop_equal_groups(self, groups: Processes) -> Processes:
        """Drop each group whose node numbers differ from those of an earlier group by a constant.

        The links of both groups have the same speed.
        """
        nodes = groups // self.cluster.gpus_per_node
        _, unique_indices = np.unique(nodes - nodes[:, :1], axis=0, return_index=True)
        return groups[unique_indices]

    def compute_reduce_norm(self) -> Floats:
        """Return the time of an all-reduce of one float64 number over all processes of a replica.

        Returns:
            Seconds of the slowest replica, shape (1, 1).
        """
        times = [
            self.cluster.small_all_reduce_time(8, replica.reshape(-1)) for replica in self.mesh
        ]
        return np.full((1, 1), max(times))

    def compute_traffic(self, cost: str) -> Floats:
        """Return the time of an instruction that copies, reads or writes memory.

        Args:
            cost: Name of the cost.

        Returns:
            Seconds, shape (stages, microbatches) or (stages, 1).
        """
        traffic = _TRAFFIC_BY_COST[cost]
        if not traffic.sizes:
            return self._compute_form_change(cost, traffic.moves_per_byte)
        if cost in _MICROBATCH_COSTS:
            moved_bytes = self._sum_microbatch_sizes(cost, traffic.sizes)
        else:
            is_sharded = self.zero or traffic.is_always_sharded
            stage_bytes = self._sum_sizes(cost, traffic.sizes, self.dp if is_sharded else 1)
            moved_bytes = stage_bytes[:, None]
        moved_bytes = moved_bytes * traffic.moves_per_byte
        if traffic.link == "hbm":
            return moved_bytes / self.cluster.hbm_bandwidth
        if traffic.link == "dram":
            return moved_bytes / self._require_dram_bandwidth(cost)
        if traffic.link == "host":
            return _compute_times(self.cluster.host_transfer_time, moved_bytes)
        return _compute_times(self.cluster.disk_transfer_time, moved_bytes)

    def _sum_microbatch_sizes(self, cost: str, names: Collection[str]) -> Floats:
        """Return the sum of the named sizes that an instruction per microbatch moves.

        If the instructions with this cost use several values with the same size name, only the
        largest of these values is added.

        Returns:
            Bytes, shape (stages, microbatches) or (stages, 1).
        """
        size_by_name = {
            name: reduce(
                np.maximum,
                [
                    self._find_value_bytes(row, kind)
                    for row in INSTRUCTIONS
                    if row.cost == cost
                    for kind in {*row.needs, *row.gives}
                    if VALUES[kind].size == name
                ],
            )
            for name in names
        }
        return _sum_named_sizes(size_by_name, names)

    def _find_value_bytes(self, row: Row, kind: Value) -> Floats:
        """Return, for each stage, the bytes of a microbatch's value that an instruction uses.

        `Sizes` lists the bytes of a boundary under the earlier of its two stages. If both stages
        are on one rank, the tensor-parallel ranks do not split the value.
        """
        value_bytes = self.sizes.per_microbatch(VALUES[kind].size, self.shape)
        peer = VALUES[kind].peer
        if peer not in (PeerRule.NEXT, PeerRule.PREVIOUS):
            return value_bytes
        if is_tp_split(row.op, kind):
            value_bytes = value_bytes / np.where(self._is_sent_onward, self.tp, 1)[:, None]
        has_next_stage = np.arange(self.shape.stages) < self.shape.stages - 1
        value_bytes = value_bytes * has_next_stage[:, None]
        return value_bytes if peer.is_downstream else _shift_to_next_stage(value_bytes)

    def _has_sizes(self, names: Iterable[str]) -> bool:
        """Return whether all sizes with these names are given and not 0."""
        return all(self.sizes.for_stages(name, self.shape.stages).any() for name in names)

    def _compute_form_change(self, cost: str, moves_per_byte: float) -> Floats:
        """Return the seconds that a GPU needs to change the form of a value in its memory."""
        rows = [row for row in INSTRUCTIONS if row.cost == cost]
        if self.tp == 1 and all(row.op in TP_SPLIT_OPS for row in rows):
            return np.zeros((1, 1))
        moves_only_part = all(
            row.op in TP_SPLIT_OPS or is_tp_split(row.op, row.gives[0]) for row in rows
        )
        size = self._find_changed_bytes(cost) / (self.tp if moves_only_part else 1)
        seconds = np.maximum(
            moves_per_byte * size / self.cluster.hbm_bandwidth, self.cluster.kernel_us / 1e6
        )
        return np.where(size > 0, seconds, 0.0)

    def _sum_sizes(self, cost: str, names: Collection[str], shards: int = 1) -> Floats:
        """Return the sum of the named sizes of each stage, shape (stages,).

        The sizes of weights, gradients and optimizer states are divided by `shards`.
        """
        size_by_name = {name: self.sizes.for_stages(name, self.shape.stages) for name in names}
        # Some optimizers have no state, so a size of 0 is valid for `optimizer`.
        required_names = {*names} - {"optimizer"} or {*names}
        if not all(size_by_name[name].any() for name in required_names):
            raise _make_missing_size_error(
                cost, ",".join(f"{name}={_EXAMPLE_SIZES[name]}" for name in size_by_name)
            )
        state_names = [name for name in names if name in _MODEL_STATE_SIZES]
        other_names = [name for name in names if name not in _MODEL_STATE_SIZES]
        state_bytes = _sum_named_sizes(size_by_name, state_names)
        return state_bytes / shards + _sum_named_sizes(size_by_name, other_names)

    def _require_dram_bandwidth(self, cost: str) -> float:
        """Return the bandwidth of the host's memory. Raises UsageError if it is missing."""
        if self.cluster.dram_bandwidth is None:
            raise UsageError(
                "the cluster has no dram_bandwidth, the host memory bandwidth for each GPU in "
                "bytes per second",
                hint=f'dram_bandwidth = "100GB/s", or give the cost {cost}',
                fields=["dram_bandwidth"],
            )
        return self.cluster.dram_bandwidth

    def compute_step(self) -> Floats:
        """Return the time of the optimizer step of each rank.

        Returns:
            Seconds, shape (stages, 1): number k is for rank k. If there are more ranks than stages,
            the last number is the maximum of the remaining ranks.
        """
        moved_bytes = self._sum_sizes("step", OPTIMIZER_STEP_SIZES, self.dp if self.zero else 1)
        times = np.zeros(self.shape.stages)
        for rank, stages in enumerate(self.shape.stages_on_rank):
            # Each rank sets its entry and all later entries. The next rank overwrites them, and
            # nothing reads the entries after that of the last rank.
            entries = slice(min(rank, self.shape.stages - 1), None)
            previous = times[entries].max() if rank >= self.shape.stages else 0.0
            rank_bytes = moved_bytes[list(stages)].sum()
            times[entries] = max(previous, rank_bytes / self.cluster.hbm_bandwidth)
        return times[:, None]


def compute_step_bytes(params: Floats, grads: Floats, optimizer: Floats) -> Floats:
    """Return the bytes that an optimizer step reads and writes.

    Args:
        params: Bytes of the parameters.
        grads: Bytes of the gradients.
        optimizer: Bytes of the optimizer state.

    Returns:
        The sum of all reads and writes, in the shape of the arguments.
    """
    size_by_name = {"params": params, "grads": grads, "optimizer": optimizer}
    return _sum_named_sizes(size_by_name, OPTIMIZER_STEP_SIZES)


def _sum_named_sizes(size_by_name: Mapping[str, Floats], names: Collection[str]) -> Floats:
    """Return the sum of the named sizes. A size is added once for each occurrence of its name."""
    return np.asarray(sum(count * size_by_name[name] for name, count in Counter(names).items()))


def _compute_times(compute_time: Callable[[float], float], sizes: Floats) -> Floats:
    """Return the time of each size, in the shape of `sizes`.

    The function calls `compute_time` once for all equal sizes.
    """
    values, index = np.unique(sizes, return_inverse=True)
    return np.array([compute_time(float(value)) for value in values])[index].reshape(sizes.shape)


def _to_cost(times: Floats) -> Cost:
    """Convert an array of times to a cost: one number or row if all stages have equal times."""
    return from_grid(times[:1] if (times == times[:1]).all() else times)


def _shift_to_next_stage(rows: Floats) -> Floats:
    """Shift the rows by one stage: stage k gets the row of stage k - 1, and stage 0 gets zeros."""
    return np.concatenate([0 * rows[:1], rows[:-1]])


def _make_missing_size_error(cost: str, sizes: str) -> UsageError:
    names = [part.partition("=")[0] for part in sizes.split(",")]
    return UsageError(
        f"a cluster computes the cost {cost} from sizes that are missing: {', '.join(names)}",
        hint=CommandHint(
            f"Sizes({', '.join(f'{name}=...' for name in names)}), or give the cost {cost}",
            f"--sizes {sizes}, or give the cost {cost}",
        ),
        fields=names,
    )
