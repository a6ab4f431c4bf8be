"""Compute the times of GEMMs, memory passes, collectives and host work on a cluster."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lcm

from schedir.ir.cost.cluster import Cluster
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PhaseTimes
from schedir.planner.transformer.layer_ops import CollectiveOp, Gemm, MemoryPass

# The causal mask removes half of the scores, and flash attention skips blocks without scores.
_CAUSAL_SCORE_SHARE = 0.5


class OpTimes:
    """Computes the times of operations on a cluster, in seconds.

    Args:
        cluster: The cluster.
        plan: The plan. Its degrees and rank order decide the groups of collectives.
        constants: Constants of the software.
        has_full_backward: True if backwards are not split. Collectives then overlap with weight
            gradients.
        crosses_nodes: True if boundaries of stages cross nodes (`SoftwareConstants.crossing_us`).
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: ParallelPlan,
        constants: SoftwareConstants,
        has_full_backward: bool,
        crosses_nodes: bool = False,
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.constants = constants
        self.has_full_backward = has_full_backward
        self.crosses_nodes = crosses_nodes
        self.has_gpu = cluster.processors is None  # On CPUs, compute does not hide collectives.
        self.byte_scale = cluster.itemsize / 2  # Operations count bytes of 16-bit elements.

    # ------------------------------------------------------------ one GPU

    def time_gemm(self, gemm: Gemm) -> PhaseTimes:
        """Return the times of a matrix product and of its two gradients.

        Flash attention reaches only a share of the FLOP/s of other products. It computes half of
        the scores, and computes them again in its backward (arXiv 2307.08691, sections 3.1 and
        4.1).

        Args:
            gemm: The product.
        """
        m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
        if gemm.is_flash:
            flops = _CAUSAL_SCORE_SHARE * gemm.forward_flops / self.cluster.flops
            backward = (
                (3 if gemm.name == "scores" else 2)
                * flops
                / self.constants.flash_backward_efficiency
            )
            return PhaseTimes(flops / self.constants.flash_forward_efficiency, backward)
        forward = self._time_product(m, n, k, batch, gemm.second_factor_uses)
        of_input = self._time_product(m, k, n, batch, gemm.second_factor_uses)
        if gemm.has_weight:
            of_weight = self._time_product(k, n, m, batch, written_bytes=8)
            accumulated_bytes = self.constants.accumulation_bytes * n * k * batch
            speedup = self.constants.low_precision_speedup if gemm.may_use_low_precision else 1.0
            return PhaseTimes(
                forward / speedup,
                of_input / speedup,
                of_weight / speedup + accumulated_bytes / self.cluster.hbm_bandwidth,
            )
        return PhaseTimes(forward, of_input + self._time_product(k, n, m, batch))

    def _time_product(
        self,
        m: int,
        n: int,
        k: int,
        batch: int,
        second_factor_uses: int = 1,
        written_bytes: float | None = None,
    ) -> float:
        """Return the seconds of `batch` products (m, k) x (k, n).

        Each element of the result has `written_bytes` bytes. The time is the time to compute the
        tiles or the time to move the bytes, whichever is longer (roofline model: Williams, Waterman
        and Patterson 2009).
        Each multiprocessor computes one tile at a time, so the last wave of tiles takes as long as
        a full wave. If there are few tiles, the inner dimension is split. The partial sums are then
        written and read once more, in 32 bits (arXiv 2301.03598, sections 2 and 3.2).
        """
        cluster, item = self.cluster, float(self.cluster.itemsize)
        written_bytes = item if written_bytes is None else written_bytes
        moved = (
            batch
            * (item * m * k + item * k * n / second_factor_uses + written_bytes * m * n)
            / cluster.hbm_bandwidth
        )
        if not self.has_gpu:  # The same CPU cores load and compute, so the times add up.
            return 2.0 * m * n * k * batch / cluster.flops + moved
        if cluster.num_sms is None:
            return max(2.0 * m * n * k * batch / cluster.flops, moved)
        short_side, long_side = self.constants.tile_sides
        tiles = batch * min(
            ceil(m / short_side) * ceil(n / long_side), ceil(m / long_side) * ceil(n / short_side)
        )
        # Seconds of one step along the inner dimension of a tile.
        column = 2.0 * short_side * long_side / (cluster.flops / cluster.num_sms)
        reload_time = 8.0 * m * n * batch / cluster.hbm_bandwidth
        return min(
            max(ceil(tiles * parts / cluster.num_sms) * ceil(k / parts) * column, moved)
            + (parts * reload_time if parts > 1 else 0.0)
            for parts in range(1, int(self.constants.max_splits) + 1)
        )

    def time_memory_pass(self, memory_pass: MemoryPass) -> PhaseTimes:
        """Return the times of kernels that are limited by the bytes that they read and write.

        Args:
            memory_pass: The memory pass.
        """
        hbm = (
            self.cluster.hbm_bandwidth
            / self.byte_scale
            * (self.constants.scores_bandwidth_share if memory_pass.is_attention_core else 1.0)
            / (self.constants.loss_share if memory_pass.name == "loss" else 1.0)
        )
        return PhaseTimes(
            *(
                size / hbm
                for size in (
                    memory_pass.forward_bytes,
                    memory_pass.input_grad_bytes,
                    memory_pass.weight_grad_bytes,
                )
            )
        )

    # ------------------------------------------------------------ the host

    def time_issue(self, layer_op: Gemm | MemoryPass | CollectiveOp) -> PhaseTimes:
        """Return the times that the host takes to issue the kernels of an operation.

        A weight gradient has two kernels: the product, and its addition to the gradient buffer.

        Args:
            layer_op: The operation.
        """
        kernel_time = self.cluster.kernel_us / 1e6 * self.constants.kernels_per_op
        if isinstance(layer_op, MemoryPass):
            kernels = layer_op.kernel_counts
        elif isinstance(layer_op, CollectiveOp):
            kernels = (1, 0, 0) if layer_op.phase == "F" else (0, 1, 0)
            if layer_op.group == "tensor" and self.crosses_nodes:
                kernel_time += self.plan.tp * self.constants.crossing_us / 1e6
        elif layer_op.is_flash:
            kernels = (1, 1, 0) if layer_op.name == "scores" else (0, 0, 0)
        else:
            kernels = (1, 1, 2) if layer_op.has_weight else (1, 2, 0)
        return PhaseTimes(*(kernel_time * number for number in kernels))

    # ------------------------------------------------------------ collectives

    def time_exposed_collective(
        self, collective: CollectiveOp, gemm_times: PhaseTimes, core_times: PhaseTimes
    ) -> PhaseTimes:
        """Return the part of the time of a collective that compute does not hide.

        A collective may overlap with the weight gradient of a product. The exchange of keys and
        values in a ring overlaps with the core of attention (arXiv 2310.01889, section 3).

        Args:
            collective: The collective.
            gemm_times: The times of the product with which the collective overlaps.
            core_times: The times of the core of attention.
        """
        seconds = self.time_collective(collective)
        if collective.kind == "exchange" and self.has_gpu:
            seconds = max(
                0.0, seconds - (core_times.F if collective.phase == "F" else core_times.I)
            )
        elif collective.overlapped_gemm and self.has_full_backward and self.has_gpu:
            seconds -= self.constants.tensor_overlap_share * min(seconds, gemm_times.W)
        return PhaseTimes(F=seconds) if collective.phase == "F" else PhaseTimes(I=seconds)

    def time_collective(self, collective: CollectiveOp) -> float:
        """Return the seconds of a collective over the slowest of its groups.

        Args:
            collective: The collective.
        """
        plan, cluster = self.plan, self.cluster
        t, c = plan.tp, plan.cp
        ranks = plan.pp if plan.rank_order == "tp-pp-dp" else 1
        stride, size = {
            "tensor": (1, t), "context": (t, c), "expert": (t * c * ranks, plan.ep),
        }[collective.group]  # fmt: skip
        group = find_slowest_group(cluster, stride, size)
        bytes_ = collective.size * self.byte_scale
        if collective.kind == "all_reduce":
            return time_all_reduce(cluster, bytes_, group)
        if collective.kind == "all_to_all":
            return cluster.all_to_all_time(bytes_, group)
        # A reduce-scatter and an exchange take as long as an all-gather.
        return cluster.all_gather_time(bytes_, group)


def time_all_reduce(cluster: Cluster, size: float, group: tuple[int, ...]) -> float:
    """Return the seconds of an all-reduce in a ring or a tree, whichever is faster.

    CPU processes always use a ring, as in Gloo.

    Args:
        cluster: The cluster.
        size: Bytes of the tensor.
        group: The global ranks of the group.
    """
    ring = cluster.all_reduce_time(size, group)
    return ring if cluster.processors else min(ring, cluster.small_all_reduce_time(size, group))


@lru_cache(maxsize=4096)
def find_slowest_group(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Return the group of processes with the slowest links.

    Args:
        cluster: The cluster.
        stride: The difference between consecutive global ranks of a group.
        size: The number of processes in a group.

    Returns:
        The global ranks of the group.

    Example:
        >>> from schedir import planner
        >>> find_slowest_group(planner.cluster_preset("a100", nodes=3), 1, 6)
        (6, 7, 8, 9, 10, 11)
    """
    block = stride * size
    last_start = min(lcm(block, cluster.gpus_per_node), cluster.gpu_count - block + 1)
    starts = range(0, max(last_start, 1), block)
    groups = [tuple(range(start, start + block, stride)) for start in starts]
    return min(groups, key=cluster.bandwidth)
