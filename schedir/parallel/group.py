"""What every tensor-parallel layer needs of its group: who am I, my shard, f and g.

A group is a `ProcessGroup`, or None for tensor parallelism of 1, where nothing is sent.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.runtime.split import Reduce
from schedir.transports.transport import Work


def tp_size(group: ProcessGroup | None) -> int:
    """How many ranks share each layer."""
    return 1 if group is None else group.size()


def tp_rank(group: ProcessGroup | None) -> int:
    """Which of them this one is: it holds slice number `tp_rank`."""
    return 0 if group is None else group.rank()


class Weight(Protocol):
    """A whole weight, of which a slice can be had: a Tensor, or a `Drawn`."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor: ...


def shard(
    full: Weight, dim: int, group: ProcessGroup | None, *, padded: bool = False
) -> nn.Parameter:
    """This rank's 1/t of `full`, cut along `dim`, as a parameter that knows it is a slice.

    Where t does not divide that dimension, zeros fill up the last slices if `padded`; else it
    raises UsageError.
    """
    t, size = tp_size(group), full.shape[dim]
    if size % t and not padded:
        raise UsageError(f"{t} tensor-parallel ranks cannot share {size} rows or columns evenly")
    each = -(-size // t)
    start = min(tp_rank(group) * each, size)
    there = min(each, size - start)
    own = full.narrow(dim, start, there)
    if there < each:
        sizes = list(own.shape)
        sizes[dim] = each
        own, part = own.new_zeros(sizes), own
        own.narrow(dim, 0, there).copy_(part)
    elif isinstance(full, Tensor):
        # A copy of its own, or the slice would keep the whole alive.
        own = own.clone(memory_format=torch.contiguous_format)
    param = nn.Parameter(own.detach())
    if t > 1:
        param.shard_dim = dim  # type: ignore[attr-defined]
        param.shard_size = size  # type: ignore[attr-defined]
    return param


def shard_dim(param: Tensor) -> int | None:
    """The dimension along which a parameter is cut, or None if every rank holds it whole."""
    return getattr(param, "shard_dim", None)


def f(group: ProcessGroup | None) -> Reduce | None:
    """Enter a sharded region: identity forward, all-reduce backward (1909.08053, section 3).

    For `split.linear(x, weight, reduce=f(group))`, which starts the all-reduce before it computes
    the weight's gradient; None where there is nobody to sum with.
    """
    return None if group is None or group.size() == 1 else partial(_start_sum, group)


def g(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave a sharded region: all-reduce forward, identity backward (1909.08053, section 3).

    The sum is written over x, which is to be what nobody else needs, as a product.
    """
    if tp_size(group) == 1:
        return x
    y: Tensor = _G.apply(x.contiguous(), group)  # type: ignore[no-untyped-call]
    return y


def all_gather(whole: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    """Make `whole` of the `shard` of each rank, one after the other; both are contiguous.

    NCCL writes it in its place; a list of parts it would copy.
    """
    # torch 2.13 has a new name for it and warns of the old one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole.view(-1), shard.view(-1), group=group)


def _start_sum(group: ProcessGroup, x: Tensor) -> Work:
    return cast(Work, dist.all_reduce(x, group=group, async_op=True))


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return dys[0], None
