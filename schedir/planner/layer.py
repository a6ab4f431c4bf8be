"""Layers: what a microbatch takes in a layer, an embedding, a head and a stage, on one GPU."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lcm
from typing import NamedTuple

import numpy as np

from schedir.ir.cluster import Cluster
from schedir.planner.choice import Choice, Phases, Times
from schedir.planner.constants import Constants
from schedir.planner.model import Model
from schedir.planner.pieces import (
    Collective,
    Gemm,
    Pass,
    Pieces,
    embedding_pieces,
    head_pieces,
    layer_pieces,
)

SPLIT_BACKWARD = ("zb_h1", "zb_h2", "zb_v", "interleaved_zb", "v_half", "v_min", "dualpipe_v")


class Work(NamedTuple):
    """Seconds of a GPU's own work, of what it waits for in collectives, and of its host, which
    issues kernels ahead of it."""

    gpu: Phases = Phases()
    tensor: Phases = Phases()
    host: Phases = Phases()

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """The sum with another, so many times."""
        return Work(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))

    @property
    def times(self) -> Times:
        """The longer of GPU and host, by forward and backward; of numbers, or of arrays.

        Where the host is slower the GPU waits for it: that counts as compute, by halves of the
        backward as the host has work in them.
        """
        gpu, tensor, host = self
        busy = gpu.plus(tensor)
        most, halves = np.maximum, host.I + host.W
        wait = most(0.0, halves - busy.I - busy.W) / np.where(halves > 0, halves, 1.0)
        waits = Phases(
            most(0.0, host.F - busy.F), host.I * wait, host.W * wait, most(0.0, host.R - busy.R)
        )
        return Times(gpu.plus(waits), tensor)


def layer(
    model: Model, cluster: Cluster, choice: Choice, constants: Constants | None = None
) -> Times:
    """Seconds of one microbatch in one layer, on one GPU.

    Forward and backward each take what is longer: the GPU's work, or what the host takes to issue
    it.  A product takes what its tiles take, or its bytes; all else its bytes; collectives the
    shorter of ring and tree, over the links that they cross.  `R` is what runs again.

    Raises UsageError where the layer cannot be divided so.

    >>> from schedir import planner
    >>> gpt = planner.Model(layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048)
    >>> node = planner.cluster("a100", nodes=1)
    >>> whole, cut = (planner.layer(gpt, node, planner.Choice(t=t, b=4)) for t in (1, 8))
    >>> cut.compute.F < whole.compute.F, whole.tensor.F, cut.tensor.F > 0
    (True, 0.0, True)
    """
    return _plain(work_of("layer", model, cluster, choice, constants))


def embedding(
    model: Model, cluster: Cluster, choice: Choice, constants: Constants | None = None
) -> Times:
    """The same of the embedding: rows of tokens and positions, a dropout, and their gradients."""
    return _plain(work_of("embedding", model, cluster, choice, constants))


def head(
    model: Model, cluster: Cluster, choice: Choice, constants: Constants | None = None
) -> Times:
    """The same of what is behind the last layer: a norm, logits, and the loss."""
    return _plain(work_of("head", model, cluster, choice, constants))


def stage(
    model: Model,
    cluster: Cluster,
    choice: Choice,
    layers: int,
    first: bool = False,
    last: bool = False,
    constants: Constants | None = None,
) -> Times:
    """The same of a stage of so many layers; the first has the embedding, the last the head.

    The host runs ahead over the whole stage: it takes max(sum of GPU, sum of host), which may be
    less than its layers one by one.
    """
    work = Work().plus(work_of("layer", model, cluster, choice, constants), layers)
    for here, part in ((first, "embedding"), (last, "head")):
        if here:
            work = work.plus(work_of(part, model, cluster, choice, constants))
    return _plain(work)


_PIECES = {"layer": layer_pieces, "embedding": embedding_pieces, "head": head_pieces}


def _plain(work: Work) -> Times:
    """Its times, as Python's own numbers."""
    return Times(*(Phases(*map(float, each)) for each in work.times))


def work_of(
    part: str, model: Model, cluster: Cluster, choice: Choice, constants: Constants | None
) -> Work:
    """The work of a part, which many choices share."""
    whole = choice.schedule not in SPLIT_BACKWARD
    few = Choice(
        p=choice.p if choice.e > 1 else 1, t=choice.t, d=choice.e, b=choice.b,
        recompute=choice.recompute, sequence_parallel=choice.sequence_parallel, c=choice.c,
        e=choice.e, attention=choice.attention,
    )  # fmt: skip
    return _known(part, model, cluster, few, constants or Constants(), whole)


@lru_cache(maxsize=4096)
def _known(
    part: str, model: Model, cluster: Cluster, choice: Choice, constants: Constants, whole: bool
) -> Work:
    pieces = _PIECES[part](model, choice)
    return _Pricer(cluster, choice, constants, whole).work(pieces, again=part == "layer")


class _Pricer:
    """What pieces take on a cluster."""

    def __init__(self, cluster: Cluster, choice: Choice, constants: Constants, whole: bool) -> None:
        self.cluster, self.choice, self.constants = cluster, choice, constants
        self.whole = whole  # a backward of one piece, in which collectives hide
        self.beside = cluster.processors is None  # where something else carries them
        self.scale = cluster.itemsize / 2  # pieces count numbers of 16 bits

    def work(self, pieces: Pieces, *, again: bool) -> Work:
        """All phases; `again` where recomputation is of these."""
        products = {gemm.what: self.gemm(gemm) for gemm in pieces.gemms}
        passes = [self.passed(one) for one in pieces.passes]
        gpu, host = Phases(), Phases()
        for gemm in pieces.gemms:
            gpu, host = gpu.plus(products[gemm.what]), host.plus(self._issued(gemm))
        for one, taken in zip(pieces.passes, passes, strict=True):
            gpu = gpu.plus(taken)
            late = int(one.late > 0)
            forward, backward = one.kernels
            host = host.plus(self._host(forward, backward - late, late))
        core = Phases()
        for gemm in pieces.gemms:
            if gemm.core:
                core = core.plus(products[gemm.what])
        tensor = Phases()
        for collective in pieces.collectives:
            tensor = tensor.plus(self._exposed(collective, products, core))
            first = collective.phase == "F"
            host = host.plus(self._host(int(first), int(not first), 0))
        if again and self.choice.recompute == "full":
            gpu, tensor, host = (x._replace(R=x.F) for x in (gpu, tensor, host))
        elif again and self.choice.recompute == "selective":
            gpu = gpu._replace(
                R=core.F
                + sum(x.F for one, x in zip(pieces.passes, passes, strict=True) if one.core)
            )
            host = host._replace(
                R=sum(self._issued(gemm).F for gemm in pieces.gemms if gemm.core)
                + sum(self._host(one.kernels[0], 0, 0).F for one in pieces.passes if one.core)
            )
        if not self.beside:  # the host is what computes
            return Work(gpu.plus(host), tensor)
        return Work(gpu, tensor, host)

    # ------------------------------------------------------------ one GPU

    def gemm(self, gemm: Gemm) -> Phases:
        """Seconds of a product: its forward, and of both gradients."""
        m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
        if gemm.flash:
            # Only half of the scores are there to be made, as tokens see none behind them; the
            # backward makes the scores once more (arXiv 2307.08691, section 3.1.1, 4.1).
            flops, of = gemm.flops / 2 / self.cluster.flops, self.constants
            products = 3 if gemm.what == "scores" else 2
            return Phases(flops / of.flash_forward, products * flops / of.flash_backward)
        forward = self._product(m, n, k, batch, gemm.shared)
        into = self._product(m, k, n, batch, gemm.shared)
        if gemm.weight:
            return Phases(forward, into, self._product(k, n, m, batch, 1, written=8))
        return Phases(forward, into + self._product(k, n, m, batch, 1))

    def _product(
        self, m: int, n: int, k: int, batch: int, shared: int = 1, written: float | None = None
    ) -> float:
        """Seconds of (m, k) x (k, n), so many times: its tiles in waves, or its bytes.

        Multiprocessors make one tile each, wave by wave, the last wave in whole; where tiles are
        few, the inner dimension is split, and the sums are written and read once more (arXiv
        2301.03598, sections 2 and 3.2).
        """
        constants, hbm, item = self.constants, self.cluster.hbm, float(self.cluster.itemsize)
        written = item if written is None else written
        moved = batch * (item * m * k + item * k * n / shared + written * m * n)
        if not self.beside:  # processors fetch what they compute with
            return 2.0 * m * n * k * batch / self.cluster.flops + moved / hbm
        if self.cluster.sms is None:
            return max(2.0 * m * n * k * batch / self.cluster.flops, moved / hbm)
        short, long = constants.tile_rows, constants.tile_columns
        tiles = batch * min(ceil(m / short) * ceil(n / long), ceil(m / long) * ceil(n / short))
        each = 2.0 * short * long / (self.cluster.flops / self.cluster.sms)
        return min(
            max(
                ceil(tiles * parts / self.cluster.sms) * each * ceil(k / parts),
                (moved + (8.0 * parts * m * n * batch if parts > 1 else 0.0)) / hbm,
            )
            for parts in range(1, int(constants.most_splits) + 1)
        )

    def passed(self, one: Pass) -> Phases:
        """Seconds of kernels that read and write."""
        rate = self.cluster.hbm / self.scale
        return Phases(*(x / rate for x in (one.forward, one.backward, one.late)))

    def _issued(self, gemm: Gemm) -> Phases:
        if gemm.flash:
            return self._host(1, 1, 0) if gemm.what == "scores" else Phases()
        return self._host(1, 1, 1) if gemm.weight else self._host(1, 2, 0)

    def _host(self, forward: int, inputs: int, weights: int) -> Phases:
        each = self.cluster.kernel_us / 1e6
        return Phases(forward * each, inputs * each, weights * each)

    # ------------------------------------------------------------ collectives

    def _exposed(self, one: Collective, products: dict[str, Phases], core: Phases) -> Phases:
        """What is waited for of a collective."""
        seconds = self._collective(one)
        if one.kind == "exchange" and self.beside:
            seconds = max(0.0, seconds - (core.F if one.phase == "F" else core.I))
        elif one.under and self.whole and self.beside:
            seconds -= min(seconds, self.constants.tensor_hidden * products[one.under].W)
        return Phases(F=seconds) if one.phase == "F" else Phases(I=seconds)

    def _collective(self, one: Collective) -> float:
        t, c, p, e = self.choice.t, self.choice.c, self.choice.p, self.choice.e
        one = one._replace(size=one.size * self.scale)
        stride, size = {"tensor": (1, t), "context": (t, c), "expert": (t * c * p, e)}[one.group]
        group = _worst(self.cluster, stride, size)
        if one.kind == "all_reduce":
            return min(
                self.cluster.all_reduce(one.size, group),
                self.cluster.all_reduce_small(one.size, group),
            )
        if one.kind == "all_gather" or one.kind == "exchange":
            return self.cluster.all_gather(one.size, group)
        if one.kind == "reduce_scatter":
            return self.cluster.reduce_scatter(one.size, group)
        return self.cluster.all_to_all(one.size, group)


@lru_cache(maxsize=4096)
def _worst(cluster: Cluster, stride: int, size: int) -> tuple[int, ...]:
    """Of the groups of `size` processes, each `stride` behind the last, one with slow links."""
    block = stride * size
    starts = range(
        0, max(min(lcm(block, cluster.gpus_per_node), cluster.gpus - block + 1), 1), block
    )
    groups = [tuple(range(start, start + block, stride)) for start in starts]
    return min(groups, key=cluster.bandwidth)
