"""Cluster: speeds and memory of machines, and the times of messages, collectives and copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError, describe, require_type
from schedir.ir.cost.cluster_costs import fill_cluster_costs, fill_offload_costs
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.number_parsing import MAX_GPUS
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.units import parse_cluster_field
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.process_mesh import make_process_mesh

Processes = NDArray[np.int64]
# The processes of a group.  An integer n means the processes 0 to n - 1.
GroupProcesses = int | Sequence[int] | Processes


class _Ring(NamedTuple):
    """The properties of a process group that determine the time of a collective.

    Attributes:
        size: The number of processes.
        min_per_node: The smallest number of processes on a node of the group.
        max_per_node: The largest number of processes on a node of the group.
        latency: The latency of the slowest link, in seconds.
        mean_latency: The mean latency of the links, in seconds.
        bandwidth: The bandwidth of the slowest link, in bytes per second.
    """

    size: int
    min_per_node: int
    max_per_node: int
    latency: float
    mean_latency: float
    bandwidth: float


@explain_wrong_calls(
    "Cluster(nodes=2, gpus_per_node=8, flops='312TFLOP/s', memory='80GB', hbm_bandwidth='2TB/s', "
    "nvlink_bandwidth='300GB/s', network_bandwidth='25GB/s')"
)
@dataclass(frozen=True)
class Cluster:
    """Equal machines (nodes): their number, and the speeds and memory of their GPUs.

    Processes are numbered node by node: first all processes of node 0, then those of node 1. A
    group within one node communicates over NVLink. A ring across nodes is as fast as its slowest
    link. A node has one link to other nodes for each member of the group on this node. Each of
    these links has `network_bandwidth`.

    Give the speeds that your programs reach, not those of a data sheet: predictions use them
    unchanged. Only `peak`, `fp8_peak` and `fp4_peak` are numbers of the data sheet. Numbers can be
    texts with units: "80GB", "300GB/s", "312TFLOP/s", "5us".

    A machine without GPUs has `processors` instead. Each "GPU" is then a process that computes on
    the processors. This process also issues the kernels, so nothing runs in parallel to its
    compute. If a node has more processes than processors, the processes share the processors. All
    rates are the rates of one process while all processes of its node compute. A process that
    computes alone is `solo_speedup` times as fast.

    Args:
        nodes: Number of nodes.
        gpus_per_node: Number of GPUs of each node.
        flops: Floating-point operations per second of a GPU, in the data type of the training.
        memory: Memory of a GPU, in bytes.
        hbm_bandwidth: Bytes per second that a GPU reads from or writes to its memory.
        nvlink_bandwidth: Bytes per second that a GPU sends to GPUs of its node, while it receives
            at the same rate.
        network_bandwidth: Bytes per second that a GPU sends to other nodes, while it receives at
            the same rate. This is the GPU's share of the network of its node.
        host_bandwidth: Bytes per second between a GPU and the memory of its host. Offload needs
            this rate.
        disk_bandwidth: Bytes per second between the host and its disk, for one GPU. Offload to the
            disk needs this rate.
        dram_bandwidth: Bytes per second that the processors of the host read and write in its
            memory, for one GPU. The CPU optimizer needs this rate.
        latency: Seconds that each message takes in addition to the transfer of its bytes.
        network_latency: The latency of a message between nodes, in seconds. The default is
            `latency`.
        jitter: Standard deviation of the step time of one replica, as a share of the mean step
            time. The planner adds the time for which replicas wait for the slowest replica.
        kernel_us: Time to issue a kernel, in microseconds.
        data_loading_us: Time for which a replica waits for a sequence of training data, in
            microseconds. Loading that runs in parallel with compute does not count.
        uncertainty: Standard deviation of the error of predicted step times, as a share of the
            prediction. A calibration sets this number.
        calibrated_gpus: Number of GPUs of the largest run that a calibration measured.
        peak: Floating-point operations per second of a GPU in its data sheet. The model FLOPs
            utilization (MFU) is a share of this number. The default is `flops`.
        fp8_peak: Floating-point operations per second of a GPU in FP8, in its data sheet. Leave
            this out if the GPU cannot train in FP8.
        fp4_peak: Floating-point operations per second of a GPU in FP4, in its data sheet. Leave
            this out if the GPU cannot train in FP4.
        num_sms: Number of multiprocessors of a GPU. A matrix product distributes its tiles over
            them. By default, all multiprocessors get equal parts of a product.
        itemsize: Bytes of a number in the data type of the training.
        processors: Number of processors of a node without GPUs.
        host_memory: Bytes of the host's memory that the process of one GPU may use.

    Raises:
        UsageError: A value is not a number, is out of range, or has a wrong unit. There are too
            many GPUs, `flops` is more than `peak`, or `peak` is more than `fp8_peak` or `fp4_peak`.

    Example:
        >>> from schedir import Cluster
        >>> a100 = Cluster(nodes=2, gpus_per_node=8, flops="312TFLOP/s", memory="80GB",
        ...                hbm_bandwidth="2TB/s", nvlink_bandwidth="300GB/s",
        ...                network_bandwidth="25GB/s", latency="5us")
        >>> f"{a100.all_reduce_time(1e9, 8):.6f} {a100.all_reduce_time(1e9, 16):.6f}"
        '0.005903 0.009525'
        >>> f"{a100.send_time(1e9, 0, 8):.6f}"
        '0.040005'
    """

    nodes: int
    gpus_per_node: int
    _: KW_ONLY
    flops: float
    memory: float
    hbm_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None
    dram_bandwidth: float | None = None
    latency: float = 0.0
    network_latency: float | None = None
    jitter: float = 0.0
    kernel_us: float = 0.0
    data_loading_us: float = 0.0
    peak: float | None = None
    fp8_peak: float | None = None
    fp4_peak: float | None = None
    num_sms: int | None = None
    itemsize: int = 2
    processors: int | None = None
    host_memory: float | None = None
    uncertainty: float = 0.0
    calibrated_gpus: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            number = parse_cluster_field(f.name, value)
            if f.name in (
                "nodes",
                "gpus_per_node",
                "num_sms",
                "itemsize",
                "processors",
                "calibrated_gpus",
            ):
                if number != int(number):
                    raise UsageError(
                        f"cluster: {f.name} must be an integer, not {describe(value)}",
                        fields=[f.name],
                    )
                number = int(number)
                if number > MAX_GPUS:
                    raise UsageError(
                        f"cluster: {f.name} must be at most {MAX_GPUS}, not {number}",
                        fields=[f.name],
                    )
            object.__setattr__(self, f.name, number)
        if self.gpu_count > MAX_GPUS:
            raise UsageError(
                f"cluster: {self.nodes} nodes x {self.gpus_per_node} GPUs are {self.gpu_count} "
                f"GPUs; the limit is {MAX_GPUS}", fields=["nodes", "gpus_per_node"],
            )  # fmt: skip
        if self.peak is not None and self.peak < self.flops:
            raise UsageError(
                f"cluster: flops must be at most peak ({self.peak:g}), not {self.flops:g}: a GPU "
                "reaches flops, and cannot be faster than peak", fields=["flops", "peak"],
            )  # fmt: skip
        for name in ("fp8_peak", "fp4_peak"):
            low_precision_peak = getattr(self, name)
            if low_precision_peak is not None and low_precision_peak < self.peak_flops:
                raise UsageError(
                    f"cluster: {name} must be at least peak ({self.peak_flops:g}), not "
                    f"{low_precision_peak:g}", fields=[name, "peak"],
                )  # fmt: skip

    @property
    def peak_flops(self) -> float:
        """The highest floating-point operations per second of a GPU: `peak`, or else `flops`."""
        return self.flops if self.peak is None else self.peak

    @property
    def solo_speedup(self) -> float:
        """The speed of a process while the rest of its node is idle, divided by its usual speed."""
        if self.processors is None:
            return 1.0
        return max(1.0, self.gpus_per_node / self.processors)

    @property
    def gpu_count(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    # ------------------------------------------------------------ messages and collectives

    def bandwidth(self, processes: GroupProcesses) -> float:
        """Return the bandwidth of the slowest link of a ring of processes.

        Args:
            processes: The processes of the ring, or a number n for the processes 0 to n - 1.

        Returns:
            Bytes per second. The bandwidth is infinite for one process.

        Raises:
            UsageError: The group is empty, names a process twice, or has a process that does not
                exist.
        """
        return self._find_ring(processes).bandwidth

    def _find_ring(self, processes: GroupProcesses) -> _Ring:
        """Return the ring of a group. Raises UsageError if the group is invalid."""
        # The planner asks for the same few groups many thousand times.
        if isinstance(processes, int | tuple):
            return _find_ring_cached(self, processes)
        return self._build_ring(processes)

    def _build_ring(self, processes: GroupProcesses) -> _Ring:
        group = np.arange(processes) if isinstance(processes, int) else np.array(processes)
        all_processes = range(self.gpu_count)
        if not 0 < sum(process in all_processes for process in {*group.tolist()}) == len(group):
            raise UsageError(
                f"processes must be different numbers from 0 to {self.gpu_count - 1}, not "
                f"{describe(processes)}",
                fields=["processes"],
            )
        _, node_sizes = np.unique(group // self.gpus_per_node, return_counts=True)
        min_per_node, max_per_node = int(node_sizes.min()), int(node_sizes.max())
        is_on_one_node = len(node_sizes) == 1
        bandwidth = min(self.nvlink_bandwidth, self.network_bandwidth * min_per_node)
        if is_on_one_node:
            bandwidth = inf if len(group) == 1 else self.nvlink_bandwidth
        latency = self.latency if is_on_one_node else self.max_latency
        mean_latency = self.compute_mean_latency(len(group), len(node_sizes))
        return _Ring(len(group), min_per_node, max_per_node, latency, mean_latency, bandwidth)

    def compute_mean_latency(self, size: int, nodes: int) -> float:
        """Return the mean latency of the links of a ring, in seconds.

        A ring leaves each of its nodes once. Its other links are within nodes.

        Args:
            size: The number of processes of the ring.
            nodes: The number of nodes of the ring.
        """
        if nodes == 1:
            return self.latency
        return (nodes * self.max_latency + (size - nodes) * self.latency) / size

    def latency_of(self, processes: GroupProcesses) -> float:
        """Return the mean latency of the links of a ring of processes.

        Args:
            processes: The processes of the ring, or a number n for the processes 0 to n - 1.

        Returns:
            Seconds: `latency` within a node, and `compute_mean_latency` on several nodes.

        Raises:
            UsageError: See `bandwidth`.
        """
        return self._find_ring(processes).mean_latency

    @property
    def max_latency(self) -> float:
        """The latency of a message between nodes: `network_latency`, or else `latency`."""
        return self.latency if self.network_latency is None else self.network_latency

    def send_time(self, size: float, source: int, target: int) -> float:
        """Return the time of a message between two processes, in seconds.

        Args:
            size: Bytes of the message.
            source: Process that sends.
            target: Process that receives.

        Returns:
            latency + size/bandwidth. The time is 0 for a message to the same process and for 0
            bytes.

        Raises:
            UsageError: A process does not exist, or `size` is negative or not finite.

        References:
            Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
            MPICH" (2005), section 3: alpha + n beta.
        """
        link = self._find_ring([*{source, target}])
        return _message_time(size, link.latency, link.bandwidth)

    def all_gather_time(self, size: float, processes: GroupProcesses) -> float:
        """Return the time of an all-gather over a ring, in seconds.

        Args:
            size: Bytes of the gathered tensor. Each of the g processes contributes 1/g of it.
            processes: The processes of the group, or a number n for the processes 0 to n - 1.

        Returns:
            (g-1) latency + (g-1)/g size/bandwidth. The latency is the mean over the links of the
            ring.

        Raises:
            UsageError: See `bandwidth` and `send_time`.

        References:
            Thakur et al. (2005), section 4.1: (p-1) alpha + (p-1)/p n beta.
        """
        ring = self._find_ring(processes)
        message_time = _message_time(size / ring.size, ring.mean_latency, ring.bandwidth)
        return (ring.size - 1) * message_time

    def reduce_scatter_time(self, size: float, processes: GroupProcesses) -> float:
        """Return the time of a reduce-scatter over a ring, in seconds.

        A reduce-scatter takes the time of an all-gather, with the messages in the other direction.
        The time of the additions is ignored.

        Args:
            size: Bytes of the tensor that each process contributes.
            processes: The processes of the group, or a number n for the processes 0 to n - 1.

        Returns:
            The time until each process has its part of the sum.

        Raises:
            UsageError: See `bandwidth` and `send_time`.

        References:
            Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
            workstations" (2009), section 3.
        """
        return self.all_gather_time(size, processes)

    def all_reduce_time(self, size: float, processes: GroupProcesses) -> float:
        """Return the time of an all-reduce over a ring, in seconds.

        An all-reduce is a reduce-scatter followed by an all-gather.

        Args:
            size: Bytes of the tensor that each process contributes.
            processes: The processes of the group, or a number n for the processes 0 to n - 1.

        Returns:
            2(g-1) latency + 2(g-1)/g size/bandwidth for g processes.

        Raises:
            UsageError: See `bandwidth` and `send_time`.

        References:
            Patarasuk and Yuan (2009), section 3; arXiv 1910.02054, section 7.1.
        """
        return self.reduce_scatter_time(size, processes) + self.all_gather_time(size, processes)

    def small_all_reduce_time(self, size: float, processes: GroupProcesses) -> float:
        """Return the time of an all-reduce of a few bytes by recursive doubling, in seconds.

        Use this time for tensors that are so small that the latency dominates.

        Args:
            size: Bytes of the tensor that each process contributes.
            processes: The processes of the group, or a number n for the processes 0 to n - 1.

        Returns:
            ceil(log2 g) (latency + size/bandwidth) for g processes.

        Raises:
            UsageError: See `bandwidth` and `send_time`.

        References:
            Thakur et al. (2005), section 4.4: lg p (alpha + n beta).
        """
        ring = self._find_ring(processes)
        return ceil(log2(ring.size)) * _message_time(size, ring.latency, ring.bandwidth)

    def all_to_all_time(self, size: float, processes: GroupProcesses) -> float:
        """Return the time of an all-to-all by pairwise exchange, in seconds.

        Messages within the node and to other nodes use separate links at the same time. The slower
        of the two transfers determines the time. Each process uses its own share of the network.

        Args:
            size: Bytes that each of g processes sends, 1/g of them to each process.
            processes: The processes of the group, or a number n for the processes 0 to n - 1.

        Returns:
            (g-1) latency plus the longer of the two transfer times. The time is 0 for one process.

        Raises:
            UsageError: See `bandwidth` and `send_time`.

        References:
            Thakur et al. (2005), section 4.3.

        Example:
            >>> from schedir import Cluster
            >>> c = Cluster(2, 2, flops=1e12, memory="80GB", hbm_bandwidth="1TB/s",
            ...             nvlink_bandwidth="100GB/s", network_bandwidth="10GB/s")
            >>> f"{c.all_to_all_time(4e9, 2):.2f} {c.all_to_all_time(4e9, 4):.2f}"
            '0.02 0.20'
        """
        ring = self._find_ring(processes)
        if ring.size < 2:
            return 0.0
        # A process on the node with the most group members sends the most bytes within its node. A
        # process on the node with the fewest group members sends the most bytes to other nodes.
        message_bytes = _message_time(size / ring.size, 0.0, 1.0)
        transfer_time = max(
            message_bytes * (ring.max_per_node - 1) / self.nvlink_bandwidth,
            message_bytes * (ring.size - ring.min_per_node) / self.network_bandwidth,
        )
        return (ring.size - 1) * ring.latency + transfer_time

    # ------------------------------------------------------------ host and disk

    def host_transfer_time(self, size: float) -> float:
        """Return the time of a copy between a GPU and the memory of its host, in seconds.

        Args:
            size: Bytes of the copy.

        Returns:
            latency + size/host_bandwidth.

        Raises:
            UsageError: The cluster has no `host_bandwidth`, or `size` is negative or not finite.

        References:
            arXiv 2104.07857, section 4: data/bandwidth.
        """
        return self._transfer_time(size, "host")

    def disk_transfer_time(self, size: float) -> float:
        """Return the time of a copy between the host and its disk, in seconds.

        Args:
            size: Bytes of the copy.

        Returns:
            latency + size/disk_bandwidth.

        Raises:
            UsageError: The cluster has no `disk_bandwidth`, or `size` is negative or not finite.
        """
        return self._transfer_time(size, "disk")

    def _transfer_time(self, size: float, link: str) -> float:
        name = f"{link}_bandwidth"
        bandwidth = getattr(self, name)
        if bandwidth is None:
            raise UsageError(
                f"cluster: {name} is missing: the bytes per second to and from the {link}",
                hint=f'{name} = "12GB/s"',
                fields=[name],
            )
        return _message_time(size, self.latency, bandwidth)

    # ------------------------------------------------------------ costs of a shape

    def fill_costs(
        self,
        shape: PipelineShape,
        sizes: Sizes | None = None,
        costs: Costs | None = None,
        *,
        tp: int = 1,
        dp: int = 1,
        zero: int = 0,
        ep: int = 1,
        checkpoint_snapshots: bool = False,
        optimizer_placement: str = "device",
        offload: bool = False,
        offload_to_disk: bool = False,
        recomputed: Collection[tuple[int, int]] = (),
        mesh: Processes | None = None,
    ) -> Costs:
        """Compute missing costs from bytes and the speeds of links, in seconds.

        Costs that are given in `costs` stay unchanged. The method fills these costs if they are
        missing:

        - `send`: a message with an activation or a gradient. With tp > 1, each process of the
          tensor-parallel group sends its part. If a stage sends in both directions, the cost is
          that of the longer message.
        - `tp_scatter` and `tp_gather`: splitting an activation or a gradient into the parts of the
          tensor-parallel ranks, and gathering these parts. `activation` in `sizes` has the bytes of
          the full tensor. For a sharded boundary, give tp times the bytes of one rank's part.
        - `reduce_grads`: an all-reduce over the replicas, as a ring. Executors start this
          all-reduce during the last backward, so the time that remains after this backward is
          shorter than the cost.
        - `reduce_replicated_stages`: an all-reduce over the ranks that have a replica of the stage.
        - With `zero` from 1 on, instead of `reduce_grads`: `reduce_scatter`, a reduce-scatter of
          the stage's `grads`, and `unshard`, an all-gather of its `params`. Both collectives are
          rings over the replicas, with the speed of their slowest link. Each of the two takes half
          the time of an all-reduce of the same bytes.
        - With `ep` above 1: `dispatch` and `combine`, all-to-alls of `routed` bytes among `ep`
          replicas, within nodes or between them (`all_to_all_time`).
        - `reduce_norm`: an all-reduce of 8 bytes over all processes of a replica.
        - `step`: the optimizer step reads and writes `params` and `optimizer`, and reads `grads`,
          at `hbm_bandwidth`. With `zero` from 1 on, the step moves 1/dp of these bytes.
        - With `checkpoint_snapshots`: `snapshot`, a copy of the replica's part of a stage's
          `params` and `optimizer` to the host (`host_transfer_time`).
        - With `optimizer_placement` "host" or "disk": `reload_state` and `offload_state`, copies of
          the replica's part of a stage's `optimizer` (`host_transfer_time`). `stage_step` is then
          the time of the step of each stage, and `step` is 0.
        - With `optimizer_placement` "disk": also `read_state_from_disk` and `write_state_to_disk`,
          copies of the same part (`disk_transfer_time`).
        - With `optimizer_placement` "cpu_step": `offload_grads` and `reload_weights`, copies of the
          replica's part of a stage's `grads` and `params` (`host_transfer_time`). `host_step` is
          the time of the step of each stage at `dram_bandwidth`, and `step` is 0. An optimizer
          without main parameters also copies the weights to the host, together with the gradients.
          `offload_grads` does not include the bytes of the weights.
        - With `offload`: `offload` and `reload`, copies of the `saved` bytes of a microbatch
          (`host_transfer_time`). A pair of stage and microbatch in `recomputed` has copies of its
          `recompute_inputs` bytes instead.
        - With `offload_to_disk`: `offload_to_disk` and `reload_from_disk`, copies of the same bytes
          to the disk and back (`disk_transfer_time`).
        - `I` and `W`: half of B each, if only B is given.

        You must give F, and either B or both I and W, in seconds. A cluster cannot derive these
        costs without the model. The method does not compute `R`, `FB`, `tp_reduce`, `reduce_tied`,
        `reduce_norm_after_step`, `reduce_sequence_parallel_grads` and `check_grads_finite`. `send`
        does not include the messages of skip connections.

        Args:
            shape: Shape of the pipeline.
            sizes: Bytes of values: `activation`, and `params`, `grads` and `optimizer` of one
                process.
            costs: The costs that are given, in seconds.
            tp: Size of the tensor-parallel groups.
            dp: Number of data-parallel replicas.
            zero: ZeRO level, 0 to 3.
            ep: Number of replicas that share the experts. `dp` is a multiple of `ep`.
            checkpoint_snapshots: If True, programs copy snapshots to the host.
            optimizer_placement: Place of the optimizer state: "device", "host", "disk" or
                "cpu_step".
            offload: If True, activations are offloaded to the host.
            offload_to_disk: If True, activations are offloaded to the disk.
            recomputed: Pairs of (stage, microbatch) whose forward saves only its inputs.
            mesh: The number of each process, shape (dp, ranks, tp). By default, the process of
                replica d, rank r and tensor-parallel rank t has the number (d ranks + r) tp + t.

        Returns:
            The costs. A cost is one number, one per stage, or one per stage and microbatch.

        Raises:
            UsageError: shape.ranks x tp x dp is not the number of GPUs, `mesh` has another shape,
                or `dp` is not a multiple of `ep`. Or a required size or bandwidth is missing.
            CostsError: F is missing, none of B, I and W is given, or only one of I and W is given.

        Example:
            >>> from schedir import Cluster, Costs, PipelineShape, Sizes
            >>> node = Cluster(nodes=1, gpus_per_node=4, flops="312TFLOP/s", memory="80GB",
            ...                hbm_bandwidth="2TB/s", nvlink_bandwidth="300GB/s",
            ...                network_bandwidth="25GB/s", latency="10us")
            >>> sizes = Sizes(activation=3e6, params=2e9, grads=2e9, optimizer=12e9)
            >>> compute = Costs(F=0.01, I=0.01, W=0.01)
            >>> costs = node.fill_costs(PipelineShape(4, 8), sizes, compute)
            >>> costs.send, costs.step
            (2e-05, 0.015)
        """
        costs = Costs() if costs is None else costs
        sizes = Sizes() if sizes is None else sizes
        require_type(shape, "shape", PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
        require_type(sizes, "sizes", Sizes, "Sizes(activation=16e6)")
        require_type(costs, "costs", Costs, "Costs(F=0.012, B=0.024)")
        processes = shape.ranks * tp * dp
        if processes != self.gpu_count:
            raise UsageError(
                f"ranks {shape.ranks} x tp {tp} x dp {dp} are {processes} processes, but the "
                f"cluster has {self.nodes} x {self.gpus_per_node} = {self.gpu_count} GPUs",
                fields=["nodes", "gpus_per_node", "ranks", "tp", "dp"],
            )
        if dp % ep:
            raise UsageError(f"dp must be a multiple of ep ({ep}), not {dp}", fields=["ep", "dp"])
        mesh = make_process_mesh(shape.ranks, tp, dp) if mesh is None else mesh
        if mesh.shape != (dp, shape.ranks, tp):
            raise UsageError(
                f"mesh must have the shape {(dp, shape.ranks, tp)}, for dp, ranks and tp, not "
                f"{mesh.shape}",
                fields=["mesh"],
            )
        filled_costs = fill_cluster_costs(
            self,
            shape,
            sizes,
            costs,
            mesh,
            zero,
            ep,
            checkpoint_snapshots=checkpoint_snapshots,
            optimizer_placement=optimizer_placement,
        )
        for tier, enabled in (("host", offload), ("disk", offload_to_disk)):
            if enabled:
                filled_costs = fill_offload_costs(
                    self, shape, sizes, filled_costs, tier, recomputed
                )
        return filled_costs


def _message_time(size: float, latency: float, bandwidth: float) -> float:
    if not 0 <= size < inf:
        raise UsageError(
            f"size must be a finite number of bytes, 0 or more, not {describe(size)}",
            fields=["size"],
        )
    return latency + size / bandwidth if bandwidth < inf and size else 0.0


@lru_cache(maxsize=1024)
def _find_ring_cached(cluster: Cluster, processes: int | tuple[int, ...]) -> _Ring:
    return cluster._build_ring(processes)
