"""Cluster: speeds and memory of machines, and the times of messages, reductions and copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from math import ceil, inf, log2

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, describe, require_type
from schedir.ir.cost.cluster_costs import fill_cluster_costs, fill_offload_costs
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.number_parsing import MAX_GPUS
from schedir.ir.cost.sizes import Sizes
from schedir.ir.cost.units import parse_cluster_field
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.process_mesh import make_process_mesh

Processes = NDArray[np.int64]
GroupProcesses = int | Sequence[int] | Processes  # a number is that of the first ones


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike: how many, and what each of their GPUs does in a second.

    `nodes` have `gpus_per_node` each.  Of one GPU are `flops`, floating-point operations per second
    in the type that trains, and `memory`, in bytes.  In bytes per second are `hbm_bandwidth`, its
    own memory;
    `nvlink_bandwidth`, what it sends to GPUs of its node while as much comes in;
    `network_bandwidth`, the same to other nodes, a GPU's share of its node's; `host_bandwidth` and
    `disk_bandwidth`, to and from its host's memory, and a disk, where they are told, and
    `dram_bandwidth`, what the host's processors read and write of its memory for a GPU.
    `host_memory` is the share of its host's memory that a GPU's process may fill, in bytes.
    `latency` is what a message takes beside its bytes, in seconds, and
    `kernel_us` what a kernel takes to be issued, in microseconds.  Say what is reached, not what a
    data sheet has: nothing is taken off.  Only `peak` is the data sheet's: floating-point
    operations per second, of which a share of the peak (MFU) is.  `num_sms` are the multiprocessors
    of a GPU, over which a product's tiles are dealt; where they are not told, its work is divided
    as finely as one likes.  `itemsize` are the bytes of a number of the type that trains.  Texts
    have
    units: "80GB", "300GB/s", "312TFLOP/s", "5us".

    What has no GPUs but `processors`, so many in a node, computes on these: a "GPU" is a process
    then, which issues what it computes itself, and nothing runs beside that.  Where a node has more
    processes than processors they share them.  Rates are those of a process while all of its node
    compute; one that computes alone is `solo_speedup` times as fast.

    Processes are numbered as they are placed: those of one node side by side, then the next node's.
    A group of them within a node talks over nvlink.  A ring across nodes is as fast as its slowest
    link: each node has as many ways out as it has members of the group, each of
    `network_bandwidth`.

    Raises UsageError for what is no number, not positive, or has another unit.

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
    flops: float
    memory: float
    hbm_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None
    dram_bandwidth: float | None = None
    latency: float = 0.0
    kernel_us: float = 0.0
    peak: float | None = None
    num_sms: int | None = None
    itemsize: int = 2
    processors: int | None = None
    host_memory: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            number = parse_cluster_field(f.name, value)
            if f.name in ("nodes", "gpus_per_node", "num_sms", "itemsize", "processors"):
                if number != int(number):
                    raise UsageError(
                        f"cluster: {f.name} is a whole number, not {describe(value)}",
                        fields=[f.name],
                    )
                number = int(number)
                if number > MAX_GPUS:
                    raise UsageError(
                        f"cluster: {f.name} is {number}; it must be at most {MAX_GPUS}",
                        fields=[f.name],
                    )
            object.__setattr__(self, f.name, number)
        if self.gpu_count > MAX_GPUS:
            raise UsageError(
                f"cluster: {self.nodes} nodes x {self.gpus_per_node} GPUs are "
                f"{self.gpu_count}; there "
                f"must be at most {MAX_GPUS}", fields=["nodes", "gpus_per_node"],
            )  # fmt: skip
        if self.peak is not None and self.peak < self.flops:
            raise UsageError(
                f"cluster: flops {self.flops:g} are more than the peak {self.peak:g}: `flops` are "
                "what is reached of it", fields=["flops", "peak"],
            )  # fmt: skip

    @property
    def peak_flops(self) -> float:
        """Floating-point operations per second that nothing exceeds: `peak`, or else `flops`."""
        return self.flops if self.peak is None else self.peak

    @property
    def solo_speedup(self) -> float:
        """By how much a process is faster while no other of its node computes."""
        if self.processors is None:
            return 1.0
        return max(1.0, self.gpus_per_node / self.processors)

    @property
    def gpu_count(self) -> int:
        """How many there are."""
        return self.nodes * self.gpus_per_node

    # ------------------------------------------------------------ messages and sums

    def bandwidth(self, processes: GroupProcesses) -> float:
        """Bytes per second on the slowest link of a ring of processes; infinite for one alone.

        Raises UsageError, as all that takes processes, for those that are none of the cluster's.
        """
        group = self._require_group(processes)
        if len(group) < 2:
            return inf
        _, members = np.unique(group // self.gpus_per_node, return_counts=True)
        if len(members) == 1:
            return self.nvlink_bandwidth
        return min(self.nvlink_bandwidth, self.network_bandwidth * int(members.min()))

    def _require_group(self, processes: GroupProcesses) -> Processes:
        """The processes of a group, of which there is one at least, and each once."""
        group = np.arange(processes) if isinstance(processes, int) else np.array(processes)
        everyone = range(self.gpu_count)
        if not 0 < sum(process in everyone for process in {*group.tolist()}) == len(group):
            raise UsageError(
                f"a group has different processes of 0 to {self.gpu_count - 1}, not "
                f"{describe(processes)}",
                fields=["processes"],
            )
        return group

    def send_time(self, size: float, source: int, target: int) -> float:
        """Seconds that a message of `size` bytes takes from one process to another.

        latency + size/bandwidth: the cost model of Thakur, Rabenseifner and Gropp, "Optimization
        of Collective Communication Operations in MPICH" (2005), section 3: alpha + n beta.
        """
        return _message_time(size, self.latency, self.bandwidth([*{source, target}]))

    def all_gather_time(self, size: float, processes: GroupProcesses) -> float:
        """Seconds until each of g processes has all of `size` bytes, of which it had a part.

        (g-1) latency + (g-1)/g size/bandwidth: by a ring, as Thakur et al. (2005), section 4.1:
        (p-1) alpha + (p-1)/p n beta.
        """
        group = len(self._require_group(processes))
        return (group - 1) * _message_time(size / group, self.latency, self.bandwidth(processes))

    def reduce_scatter_time(self, size: float, processes: GroupProcesses) -> float:
        """Seconds until each of g processes has its part of the sum of `size` bytes of each.

        As long as an all-gather, whose messages go the other way: Patarasuk and Yuan, "Bandwidth
        optimal all-reduce algorithms for clusters of workstations" (2009), section 3.  To add is
        free.
        """
        return self.all_gather_time(size, processes)

    def all_reduce_time(self, size: float, processes: GroupProcesses) -> float:
        """Seconds until each of g processes has the sum of `size` bytes of each.

        2(g-1) latency + 2(g-1)/g size/bandwidth: a reduce-scatter and an all-gather (Patarasuk and
        Yuan 2009, section 3; arXiv 1910.02054, section 7.1).
        """
        return self.reduce_scatter_time(size, processes) + self.all_gather_time(size, processes)

    def small_all_reduce_time(self, size: float, processes: GroupProcesses) -> float:
        """The same of so few bytes that latency decides: by doubling, ceil(log2 g) messages.

        ceil(log2 g) (latency + size/bandwidth): Thakur et al. (2005), section 4.4: lg p (alpha + n
        beta).
        """
        steps = ceil(log2(len(self._require_group(processes))))
        return steps * _message_time(size, self.latency, self.bandwidth(processes))

    def all_to_all_time(self, size: float, processes: GroupProcesses) -> float:
        """Seconds until each of g processes has sent `size` bytes, 1/g of them to each.

        (g-1) latency, and the bytes to other nodes over the process's own share of the network or
        those within its node over nvlink, whichever takes longer: pairwise exchange, Thakur et al.
        (2005), section 4.3, with its two kinds of links side by side.

        >>> from schedir import Cluster
        >>> c = Cluster(2, 2, flops=1e12, memory="80GB", hbm_bandwidth="1TB/s",
        ...             nvlink_bandwidth="100GB/s", network_bandwidth="10GB/s")
        >>> f"{c.all_to_all_time(4e9, 2):.2f} {c.all_to_all_time(4e9, 4):.2f}"
        '0.02 0.20'
        """
        group = self._require_group(processes)
        if len(group) < 2:
            return 0.0
        _, members = np.unique(group // self.gpus_per_node, return_counts=True)
        inside, own = int(members.max()) - 1, int(members.min())  # the worst of each
        part = _message_time(size / len(group), 0.0, 1.0)
        carried = max(
            part * inside / self.nvlink_bandwidth,
            part * (len(group) - own) / self.network_bandwidth,
        )
        return (len(group) - 1) * self.latency + carried

    # ------------------------------------------------------------ one GPU

    def gemm_time(self, m: int, n: int, k: int, *, itemsize: int | None = None) -> float:
        """Seconds that (m, k) x (k, n) takes, of numbers of `itemsize` bytes, the cluster's own
        unless told.

        max(2mnk/flops, itemsize (mk + kn + mn)/hbm): the roofline (Williams, Waterman and Patterson
        2009); no less than a kernel takes to be issued.
        """
        return max(
            2.0 * m * n * k / self.flops,
            (itemsize or self.itemsize) * (m * k + k * n + m * n) / self.hbm_bandwidth,
            self.kernel_us / 1e6,
        )

    def elementwise_time(self, size: float) -> float:
        """Seconds that a kernel takes which reads and writes `size` bytes in all, and computes next
        to nothing: size/hbm, the flat roof of Williams et al. (2009); no less than a kernel takes
        to be issued."""
        return max(size / self.hbm_bandwidth, self.kernel_us / 1e6)

    def host_transfer_time(self, size: float) -> float:
        """Seconds that `size` bytes take to or from the host's memory: latency + size/host, as
        data/bandwidth in arXiv 2104.07857, section 4.  Raises UsageError where none is told."""
        return self._transfer_time(size, "host")

    def disk_transfer_time(self, size: float) -> float:
        """The same to or from the disk."""
        return self._transfer_time(size, "disk")

    def _transfer_time(self, size: float, link: str) -> float:
        name = f"{link}_bandwidth"
        bandwidth = getattr(self, name)
        if bandwidth is None:
            raise UsageError(
                f"cluster: nobody tells {name}, the bytes per second to and from the {link}",
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
        checkpoint_snapshots: bool = False,
        optimizer_placement: str = "device",
        offload: bool = False,
        offload_to_disk: bool = False,
        recomputed: Collection[tuple[int, int]] = (),
        mesh: Processes | None = None,
    ) -> Costs:
        """Costs in seconds: those that are told stay, and these are filled, unless told:

        - `send_time`: a message of an activation, or of a gradient,
        of which each slice is sent by its
          own process where tp > 1; `tp_scatter` cuts these, and `tp_gather` makes them whole.  Here
          an activation is whole, also of a sharded boundary: tp times its `Sizes`.  A stage that
          sends both ways has one cost, that of the longer message.
        - `reduce_grads`: a ring over replicas, as a whole.  Executors begin it under the last
          backward, so that what is left of it at its turn is less.  `reduce_replicated_stages`: a
          ring over the ranks that hold a stage.
        - With `zero` from 1 on, in its place: `reduce_scatter_time`,
        a ring for the stage's `grads`,
          and `unshard`, an all-gather of its `params`, both over replicas, by the slowest link of
          their ring: each is half of what an all-reduce of as many bytes takes.
        - `reduce_norm`: 8 bytes over all processes of a replica.
        - `step`: `params` and `optimizer` read and written, `grads` read,
        at `hbm_bandwidth`; 1/dp of it with
          `zero` from 1 on.
        - With `checkpoint_snapshots`: `snapshot`, the replica's part of a stage's `params` and
          `optimizer`, to the host (`host_transfer_time`).
        - With `optimizer_placement` "host": `reload_state` and `offload_state`, the replica's part
          of a stage's `optimizer` (`host_transfer_time`), and `stage_step`, of each stage what
          `step` else is of all; `step` then takes nothing.  With "disk" also `read_state_from_disk`
          and
          `write_state_to_disk`, the same part (`disk_transfer_time`).
        - With `optimizer_placement` "cpu_step": `offload_grads` and `reload_weights`, the replica's
          part of a stage's `grads` and `params` (`host_transfer_time`), and `host_step`, what
          `step` else reads and writes of the stage, at `dram_bandwidth`.  An optimizer without
          copies of its own of 16-bit weights moves the weights with the gradients, too; that is not
          in it.
        - With `offload`: `offload` and `reload`, what is `saved` of a microbatch, or of one that is
          `recomputed`, by (stage, microbatch), its `checkpoint` (`host_transfer_time`).  With
          `offload_to_disk`: `offload_to_disk` and `reload_from_disk`, the same to the disk and back
          (`disk_transfer_time`).
        - `I` and `W` where only B is told: half of it each.

        F, and B or I and W, are for who knows the model to tell, in seconds.  Bytes are those of
        `sizes`: `activation`, and of one process `params`, `grads` and `optimizer`.  `reduce_tied`
        and what skips cost more than other messages is not known, and stays as it is.

        Process (d, r, t), of replica d, rank r and slice t, is number (d ranks + r) tp + t, or what
        a `mesh` of shape (dp, ranks, tp) says.

        Raises UsageError where shape.ranks x tp x dp is not the number of GPUs, and for sizes that
        are needed and not told; CostsError where F, or backwards, are not told.

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
        require_type(shape, PipelineShape, "PipelineShape(ranks=4, microbatches=8)")
        require_type(sizes, Sizes, "Sizes(activation=16e6)")
        require_type(costs, Costs, "Costs(F=0.012, B=0.024)")
        processes = shape.ranks * tp * dp
        if processes != self.gpu_count:
            raise UsageError(
                f"pp {shape.ranks} x tp {tp} x dp {dp} = {processes} processes are not the "
                f"{self.gpu_count} GPUs of {self.nodes} x {self.gpus_per_node}",
                fields=["nodes", "gpus_per_node", "ranks", "tp", "dp"],
            )
        mesh = make_process_mesh(shape.ranks, tp, dp) if mesh is None else mesh
        if mesh.shape != (dp, shape.ranks, tp):
            raise UsageError(
                f"a mesh of {dp} replicas, {shape.ranks} ranks and {tp} slices has this shape, not "
                f"{mesh.shape}",
                fields=["mesh"],
            )
        found = fill_cluster_costs(
            self,
            shape,
            sizes,
            costs,
            mesh,
            zero,
            checkpoint_snapshots=checkpoint_snapshots,
            optimizer_placement=optimizer_placement,
        )
        for there, asked in (("host", offload), ("disk", offload_to_disk)):
            if asked:
                found = fill_offload_costs(self, shape, sizes, found, there, recomputed)
        return found


def _message_time(size: float, latency: float, bandwidth: float) -> float:
    if not 0 <= size < inf:
        raise UsageError(f"a message has bytes, from 0 on, not {describe(size)}", fields=["size"])
    return latency + size / bandwidth if bandwidth < inf and size else 0.0
