"""Compute the times of GEMMs, memory passes, collectives and host work on a Cluster."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lcm

from schedir.ir.cost.cluster import Cluster
from schedir.planner.hardware.software_constants import SoftwareConstants
from schedir.planner.parallel_plan import ParallelPlan, PhaseTimes
from schedir.planner.transformer.layer_ops import CollectiveOp, Gemm, MemoryPass

_HALF_OF_SCORES = 0.5  # tokens see none behind them, and flash attention skips blocks of these


class OpTimes:
    """Seconds of pieces on a cluster, for choices that differ in what `whole` is: whether a
    backward is one piece, in which collectives run beside products."""

    def __init__(
        self, cluster: Cluster, choice: ParallelPlan, constants: SoftwareConstants, whole: bool
    ) -> None:
        self.cluster, self.choice, self.constants, self.whole = cluster, choice, constants, whole
        self.beside = cluster.processors is None  # where something else carries collectives
        self.scale = cluster.itemsize / 2  # pieces count numbers of 16 bits

    # ------------------------------------------------------------ one GPU

    def gemm(self, gemm: Gemm) -> PhaseTimes:
        """A product: its forward, and those of both gradients.

        Flash attention reaches a share of the flops on half of the scores, and makes the scores
        once more in its backward (arXiv 2307.08691, sections 3.1 and 4.1).
        """
        m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
        if gemm.flash:
            flops = _HALF_OF_SCORES * gemm.flops / self.cluster.flops
            backward = (3 if gemm.what == "scores" else 2) * flops / self.constants.flash_backward
            return PhaseTimes(flops / self.constants.flash_forward, backward)
        forward = self._product(m, n, k, batch, gemm.shared)
        of_input = self._product(m, k, n, batch, gemm.shared)
        if gemm.weight:
            return PhaseTimes(forward, of_input, self._product(k, n, m, batch, written=8))
        return PhaseTimes(forward, of_input + self._product(k, n, m, batch))

    def _product(
        self, m: int, n: int, k: int, batch: int, shared: int = 1, written: float | None = None
    ) -> float:
        """Seconds of (m, k) x (k, n), so many times; each number of the result has `written` bytes.

        The longer of its tiles and its bytes (the roofline: Williams, Waterman and Patterson 2009).
        Each multiprocessor makes one tile at a time, so that the last wave of them takes as long as
        a full one.  Where tiles are few the inner dimension is split, and the sums of the parts are
        written and read once more, in 32 bits (arXiv 2301.03598, sections 2 and 3.2).
        """
        cluster, item = self.cluster, float(self.cluster.itemsize)
        written = item if written is None else written
        moved = batch * (item * m * k + item * k * n / shared + written * m * n) / cluster.hbm
        if not self.beside:  # processors fetch what they compute with
            return 2.0 * m * n * k * batch / cluster.flops + moved
        if cluster.sms is None:
            return max(2.0 * m * n * k * batch / cluster.flops, moved)
        short, long = self.constants.tile
        tiles = batch * min(ceil(m / short) * ceil(n / long), ceil(m / long) * ceil(n / short))
        column = 2.0 * short * long / (cluster.flops / cluster.sms)  # of a tile's inner dimension
        again = 8.0 * m * n * batch / cluster.hbm
        return min(
            max(ceil(tiles * parts / cluster.sms) * ceil(k / parts) * column, moved)
            + (parts * again if parts > 1 else 0.0)
            for parts in range(1, int(self.constants.most_splits) + 1)
        )

    def passed(self, one: MemoryPass) -> PhaseTimes:
        """Kernels that read and write."""
        hbm = self.cluster.hbm / self.scale * (self.constants.scores_hbm if one.core else 1.0)
        return PhaseTimes(*(size / hbm for size in (one.forward, one.inputs, one.weights)))

    # ------------------------------------------------------------ the host

    def issued(self, piece: Gemm | MemoryPass | CollectiveOp) -> PhaseTimes:
        """What the host takes to issue a piece: a time for each of its kernels.

        The gradient of a weight is a product, and what adds it to its sum.
        """
        each = self.cluster.kernel_us / 1e6
        if isinstance(piece, MemoryPass):
            kernels = piece.kernels
        elif isinstance(piece, CollectiveOp):
            kernels = (1, 0, 0) if piece.phase == "F" else (0, 1, 0)
        elif piece.flash:
            kernels = (1, 1, 0) if piece.what == "scores" else (0, 0, 0)
        else:
            kernels = (1, 1, 2) if piece.weight else (1, 2, 0)
        return PhaseTimes(*(each * number for number in kernels))

    # ------------------------------------------------------------ collectives

    def waited(self, one: CollectiveOp, beside: PhaseTimes, core: PhaseTimes) -> PhaseTimes:
        """What is waited for of a collective that may run beside a product's weight gradient.

        An exchange of keys and values runs beside the core of attention, as a ring (arXiv
        2310.01889, section 3).
        """
        seconds = self.collective(one)
        if one.kind == "exchange" and self.beside:
            seconds = max(0.0, seconds - (core.F if one.phase == "F" else core.I))
        elif one.under and self.whole and self.beside:
            seconds -= self.constants.tensor_hidden * min(seconds, beside.W)
        return PhaseTimes(F=seconds) if one.phase == "F" else PhaseTimes(I=seconds)

    def collective(self, one: CollectiveOp) -> float:
        """Seconds of a collective over the slowest group of its kind."""
        choice, cluster = self.choice, self.cluster
        t, c = choice.tp, choice.cp
        ranks = choice.pp if choice.rank_order == "tp-pp-dp" else 1
        stride, size = {
            "tensor": (1, t), "context": (t, c), "expert": (t * c * ranks, choice.ep),
        }[one.group]  # fmt: skip
        group, bytes_ = slowest(cluster, stride, size), one.size * self.scale
        if one.kind == "all_reduce":
            return summed(cluster, bytes_, group)
        if one.kind == "all_to_all":
            return cluster.all_to_all(bytes_, group)
        return cluster.all_gather(bytes_, group)  # as long as a scattered sum, or an exchange


def summed(cluster: Cluster, size: float, group: tuple[int, ...]) -> float:
    """Seconds of a sum: around a ring or through a tree, whichever is shorter; between processors
    around a ring, as Gloo has it."""
    ring = cluster.all_reduce(size, group)
    return ring if cluster.processors else min(ring, cluster.all_reduce_small(size, group))


@lru_cache(maxsize=4096)
def slowest(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Of the groups of `size` processes, each `stride` behind the last, one with the slowest links.

    >>> from schedir import planner
    >>> slowest(planner.cluster_preset("a100", nodes=3), 1, 6)
    (6, 7, 8, 9, 10, 11)
    """
    block = stride * size
    last = min(lcm(block, cluster.gpus_per_node), cluster.gpus - block + 1)
    starts = range(0, max(last, 1), block)
    groups = [tuple(range(start, start + block, stride)) for start in starts]
    return min(groups, key=cluster.bandwidth)
