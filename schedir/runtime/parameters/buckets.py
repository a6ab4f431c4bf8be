"""Bucket: parameters in one flat tensor, and the shard of it that a replica keeps.

A bucket is a run of parameters of one type whose numbers lie one behind the other in flat tensors:
one of weights, one of gradients, both cut in the same place into as many parts as there are
replicas.  Plain data parallelism has the same buckets: where in a buffer a number lies decides in
which order some libraries add it up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from schedir.ir.cost.zero_states import SHARDED_FROM_LEVEL

CPU_ALIGNMENT: Final = 64  # bytes: where torch lets memory of a CPU begin


class ShardSpec(NamedTuple):
    """Which replica this is, of how many, and what they keep in parts: a level of ZeRO."""

    replicas: int = 1
    replica: int = 0
    zero: int = 0

    @property
    def shard_indices(self) -> range:
        """The parts of a sum that this one keeps."""
        return range(self.replica, self.replica + 1) if self.zero else range(self.replicas)

    def shards_state(self, kind: str) -> bool:
        """Whether a replica has its own part only, at rest, of "params", "grads", "optimizer"."""
        return self.zero >= SHARDED_FROM_LEVEL[kind]


def is_summed_over_tp(parameter: Tensor) -> bool:
    """Whether tensor-parallel ranks, which hold it whole, each have its gradient of their own part
    of the sequence, which they sum."""
    return getattr(parameter, "summed_over_tp", None) is True


class Bucket:
    """Parameters, and where each begins in a flat tensor of `numel` numbers, cut into
    `shard_count`.

    Each begins where a line of a cache does, if `aligned`, as in memory of its own: by that, too,
    products round.  The end is padded, so that all parts are of one length.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], shard_count: int, *, aligned: bool
    ) -> None:
        self.parameters, self.shard_count = [*parameters], shard_count
        self.shapes = [p.shape for p in parameters]
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.grad_dtype = parameters[0].grad_dtype or self.dtype
        self.offsets: list[int] = []
        line, end = max(1, CPU_ALIGNMENT // self.dtype.itemsize) if aligned else 1, 0
        for p in parameters:
            begin = -(-end // line) * line
            self.offsets.append(begin)
            end = begin + p.numel()
        self.numel = -(-end // shard_count) * shard_count

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's numbers in a flat tensor, of its shape."""
        return [
            flat[begin : begin + shape.numel()].view(shape)
            for begin, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def get_shard(self, flat: Tensor, index: int) -> Tensor:
        """The part with the number k."""
        return flat.view(self.shard_count, -1)[index]

    def list_shard_ranges(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Of each parameter: which of its numbers are in part k, from and to; and where there."""
        size = self.numel // self.shard_count
        for begin, shape in zip(self.offsets, self.shapes, strict=True):
            low = min(max(index * size - begin, 0), shape.numel())
            high = min(max((index + 1) * size - begin, low), shape.numel())
            yield low, high, begin + low - index * size if high > low else 0

    def split_shard(self, shard: Tensor, index: int) -> list[Tensor]:
        """Each parameter's numbers in part k, 1-dim and perhaps none."""
        return [shard[at : at + high - low] for low, high, at in self.list_shard_ranges(index)]


def make_buckets(
    parameters: Sequence[nn.Parameter],
    max_bytes: float = math.inf,
    shard_count: int = 1,
    separate_parameters: Collection[nn.Parameter] = (),
    *,
    aligned: bool = False,
) -> list[Bucket]:
    """Buckets for parameters, by type, type of gradient and device; of gradients of at most
    `max_bytes` bytes, unless one parameter has more, cut from the last on.

    Each of `separate_parameters` has one of its own, as a weight that is tied: its parts are then
    those of the copies of other stages.  What tensor-parallel ranks sum lies apart from what they
    do not.
    """
    own = {id(p) for p in separate_parameters}
    kinds: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for p in parameters:
        one = id(p) if id(p) in own else 0
        key = (p.dtype, p.grad_dtype or p.dtype, p.device, one, is_summed_over_tp(p))
        kinds.setdefault(key, []).append(p)
    return [
        Bucket(run, shard_count, aligned=aligned)
        for (_, dtype, *_), alike in kinds.items()
        for run in _split_into_runs(
            alike, dtype.itemsize if isinstance(dtype, torch.dtype) else 1, max_bytes
        )
    ]


def _split_into_runs(
    parameters: list[nn.Parameter], itemsize: int, max_bytes: float
) -> list[list[nn.Parameter]]:
    """Runs of parameters, in their order, whose gradients have at most so many bytes."""
    runs: list[list[nn.Parameter]] = []
    room = 0.0
    for p in reversed(parameters):
        size = p.numel() * itemsize
        if not runs or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append(p)
        room = max(room - size, 0)
    return [run[::-1] for run in reversed(runs)]
