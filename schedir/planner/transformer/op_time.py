"""Compute the times of GEMMs, memory passes, collectives and host work on a Cluster."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lcm

from schedir.ir.cost.cluster import Cluster
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PhaseTimes
from schedir.planner.transformer.layer_ops import CollectiveOp, Gemm, MemoryPass

_CAUSAL_SCORE_SHARE = 0.5  # tokens see none behind them, and flash attention skips blocks of these


class OpTimes:
    """Seconds of pieces on a cluster, for choices that differ in what `has_full_backward` is:
    whether a backward is one piece, in which collectives run beside products."""

    def __init__(
        self,
        cluster: Cluster,
        plan: ParallelPlan,
        constants: SoftwareConstants,
        has_full_backward: bool,
    ) -> None:
        self.cluster, self.plan, self.constants, self.has_full_backward = (
            cluster,
            plan,
            constants,
            has_full_backward,
        )
        self.has_gpu = cluster.processors is None  # where something else carries collectives
        self.byte_scale = cluster.itemsize / 2  # pieces count numbers of 16 bits

    # ------------------------------------------------------------ one GPU

    def time_gemm(self, gemm: Gemm) -> PhaseTimes:
        """A product: its forward, and those of both gradients.

        Flash attention reaches a share of the flops on half of the scores, and makes the scores
        once more in its backward (arXiv 2307.08691, sections 3.1 and 4.1).
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
            return PhaseTimes(
                forward, of_input, self._time_product(k, n, m, batch, written_bytes=8)
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
        """Seconds of (m, k) x (k, n), so many times; each number of the result has `written_bytes`
        bytes.

        The longer of its tiles and its bytes (the roofline: Williams, Waterman and Patterson 2009).
        Each multiprocessor makes one tile at a time, so that the last wave of them takes as long as
        a full one.  Where tiles are few the inner dimension is split, and the sums of the parts are
        written and read once more, in 32 bits (arXiv 2301.03598, sections 2 and 3.2).
        """
        cluster, item = self.cluster, float(self.cluster.itemsize)
        written_bytes = item if written_bytes is None else written_bytes
        moved = (
            batch
            * (item * m * k + item * k * n / second_factor_uses + written_bytes * m * n)
            / cluster.hbm_bandwidth
        )
        if not self.has_gpu:  # processors fetch what they compute with
            return 2.0 * m * n * k * batch / cluster.flops + moved
        if cluster.num_sms is None:
            return max(2.0 * m * n * k * batch / cluster.flops, moved)
        short, long = self.constants.tile_sides
        tiles = batch * min(ceil(m / short) * ceil(n / long), ceil(m / long) * ceil(n / short))
        column = (
            2.0 * short * long / (cluster.flops / cluster.num_sms)
        )  # of a tile's inner dimension
        again = 8.0 * m * n * batch / cluster.hbm_bandwidth
        return min(
            max(ceil(tiles * parts / cluster.num_sms) * ceil(k / parts) * column, moved)
            + (parts * again if parts > 1 else 0.0)
            for parts in range(1, int(self.constants.max_splits) + 1)
        )

    def time_memory_pass(self, memory_pass: MemoryPass) -> PhaseTimes:
        """Kernels that read and write."""
        hbm = (
            self.cluster.hbm_bandwidth
            / self.byte_scale
            * (self.constants.scores_bandwidth_share if memory_pass.is_attention_core else 1.0)
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
        """What the host takes to issue a piece: a time for each of its kernels.

        The gradient of a weight is a product, and what adds it to its sum.
        """
        each = self.cluster.kernel_us / 1e6
        if isinstance(layer_op, MemoryPass):
            kernels = layer_op.kernel_counts
        elif isinstance(layer_op, CollectiveOp):
            kernels = (1, 0, 0) if layer_op.phase == "F" else (0, 1, 0)
        elif layer_op.is_flash:
            kernels = (1, 1, 0) if layer_op.name == "scores" else (0, 0, 0)
        else:
            kernels = (1, 1, 2) if layer_op.has_weight else (1, 2, 0)
        return PhaseTimes(*(each * number for number in kernels))

    # ------------------------------------------------------------ collectives

    def time_exposed_collective(
        self, collective: CollectiveOp, gemm_times: PhaseTimes, core_times: PhaseTimes
    ) -> PhaseTimes:
        """What is waited for of a collective that may run beside a product's weight gradient.

        An exchange of keys and values runs beside the core of attention, as a ring (arXiv
        2310.01889, section 3).
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
        """Seconds of a collective over the slowest group of its kind."""
        choice, cluster = self.plan, self.cluster
        t, c = choice.tp, choice.cp
        ranks = choice.pp if choice.rank_order == "tp-pp-dp" else 1
        stride, size = {
            "tensor": (1, t), "context": (t, c), "expert": (t * c * ranks, choice.ep),
        }[collective.group]  # fmt: skip
        group, bytes_ = find_slowest_group(cluster, stride, size), collective.size * self.byte_scale
        if collective.kind == "all_reduce":
            return time_all_reduce(cluster, bytes_, group)
        if collective.kind == "all_to_all":
            return cluster.all_to_all_time(bytes_, group)
        return cluster.all_gather_time(bytes_, group)  # as long as a scattered sum, or an exchange


def time_all_reduce(cluster: Cluster, size: float, group: tuple[int, ...]) -> float:
    """Seconds of a sum: around a ring or through a tree, whichever is shorter; between processors
    around a ring, as Gloo has it."""
    ring = cluster.all_reduce_time(size, group)
    return ring if cluster.processors else min(ring, cluster.small_all_reduce_time(size, group))


@lru_cache(maxsize=4096)
def find_slowest_group(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Of the groups of `size` processes, each `stride` behind the last, one with the slowest links.

    >>> from schedir import planner
    >>> find_slowest_group(planner.cluster_preset("a100", nodes=3), 1, 6)
    (6, 7, 8, 9, 10, 11)
    """
    block = stride * size
    last = min(lcm(block, cluster.gpus_per_node), cluster.gpu_count - block + 1)
    starts = range(0, max(last, 1), block)
    groups = [tuple(range(start, start + block, stride)) for start in starts]
    return min(groups, key=cluster.bandwidth)
