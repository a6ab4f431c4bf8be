"""The tensor-parallel group, its shards, and the mappings f and g of Megatron-LM.

A group is a `ProcessGroup`, or None for tensor parallelism of 1, where nothing is sent.

With sequence parallelism ("Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, section 4.2.2) each rank of it has 1/t of the tokens wherever layers are not
shared out: rank r those from r * s / t on, of the last dimension but one.  An all-reduce is then
cut in its two halves: a reduce-scatter where ranks go apart, and an all-gather where they meet.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.runtime.autograd.weight_gradient_rules import PendingTensor, SharedInputRule
from schedir.runtime.parameters.sequence_layout import (
    join_sequence,
    require_even_split,
    split_by_rank,
)

_Replicated = TypeVar("_Replicated", bound=nn.Parameter | nn.Module)


def tp_size(group: ProcessGroup | None) -> int:
    """How many ranks share each layer."""
    return 1 if group is None else group.size()


def tp_rank(group: ProcessGroup | None) -> int:
    """Which of them this one is: it holds slice number `tp_rank`."""
    return 0 if group is None else group.rank()


class ShardableWeight(Protocol):
    """A whole weight, of which a slice can be had: a Tensor, or a `Drawn`."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int, /) -> Tensor: ...


def shard(
    full: ShardableWeight, dim: int, group: ProcessGroup | None, *, padded: bool = False
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


def get_shard_dim(param: Tensor) -> int | None:
    """The dimension along which a parameter is cut, or None if every rank holds it whole."""
    return getattr(param, "shard_dim", None)


def mark_sequence_parallel(
    replicated: _Replicated,
    group: ProcessGroup | None,
    *,
    sequence_parallel: bool,
    has_local_tokens: bool = True,
) -> _Replicated:
    """A parameter, or a module with its own, that each rank holds whole, and that sees 1/t of the
    tokens if they share the `sequence_parallel`: then each parameter says that its gradients are to
    be summed over them, which a program with `sequence_parallel yes` does.  With own=False it sees
    the same on all ranks nevertheless, and says so."""
    for parameter in (
        replicated.parameters() if isinstance(replicated, nn.Module) else (replicated,)
    ):
        if sequence_parallel and tp_size(group) > 1:
            parameter.summed_over_tp = has_local_tokens  # type: ignore[attr-defined]
    return replicated


def enter_tp_region(
    group: ProcessGroup | None, *, sequence_parallel: bool = False
) -> SharedInputRule | None:
    """Enter a sharded region: identity forward, all-reduce backward (1909.08053, section 3); with
    `sequence_parallel`, all-gather forward, reduce-scatter backward.

    For `split.linear(x, weight, entry=f(group))`, which starts the sum before it computes the
    weight's gradient; None where there is nobody to sum with.
    """
    if group is None or group.size() == 1:
        return None
    if sequence_parallel:
        return SharedInputRule(
            partial(_start_reduce_scatter, group), partial(_start_all_gather, group)
        )
    return SharedInputRule(partial(_start_all_reduce, group))


def leave_tp_region(
    x: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool = False
) -> Tensor:
    """Leave a sharded region: all-reduce forward, identity backward (1909.08053, section 3); with
    `sequence_parallel`, reduce-scatter forward, all-gather backward: (..., s, n) to (..., s / t,
    n).

    A sum of all may be written over x, which is to be what nobody else needs, as a product.
    Raises UsageError for tokens that ranks cannot share evenly.
    """
    if tp_size(group) == 1:
        return x
    y: Tensor = (_ScatterSequence if sequence_parallel else _G).apply(x.contiguous(), group)  # type: ignore[no-untyped-call]
    return y


def select_local_tokens(
    x: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool = True
) -> Tensor:
    """Of (..., s, n) the rank's own tokens, (..., s / t, n); all, if they do not share the
    `sequence_parallel`.  Raises UsageError for tokens that cannot be shared evenly."""
    t = tp_size(group) if sequence_parallel else 1
    require_even_split(x.shape[-2], t)
    return x.chunk(t, -2)[tp_rank(group) if t > 1 else 0]


def get_first_token(x: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool) -> Tensor:
    """Of (b, s, n) the first token, (b, n), the same on all ranks, also where they share the
    `sequence_parallel`, and the first has it.

    All are to compute the same with it: then each has its whole gradient, and the first keeps it.
    """
    if not sequence_parallel or group is None or group.size() == 1:
        return x[:, 0]
    first: Tensor = _First.apply(x, group)  # type: ignore[no-untyped-call]
    return first


def all_gather(output: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    """Make `output` of the `shard` of each rank, one after the other; both are contiguous.

    NCCL writes it in its place; a list of parts it would copy.
    """
    # torch 2.13 has a new name for it and warns of the old one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.view(-1), shard.view(-1), group=group)


def _start_all_reduce(group: ProcessGroup, x: Tensor) -> PendingTensor:
    work: Any = dist.all_reduce(x, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def _start_all_gather(group: ProcessGroup, part: Tensor) -> PendingTensor:
    """Of (..., s / t, n) of each rank what all have, (..., s, n)."""
    part = part.contiguous()
    parts = part.new_empty(group.size(), *part.shape)
    # torch 2.13 has a new name for it and warns of the old one.
    start: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = start(parts.view(-1), part.view(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return join_sequence(parts)

    return wait


def _start_reduce_scatter(group: ProcessGroup, x: Tensor) -> PendingTensor:
    """Of (..., s, n) of each rank the sum of the own tokens, (..., s / t, n)."""
    parts = split_by_rank(x, group.size())
    own = torch.empty_like(parts[0])
    start: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = start(own.view(-1), parts.view(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return own

    return wait


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.shape, ctx.first = x.shape, group.rank() == 0
        own = x[:, 0].contiguous()
        each = own.new_empty(group.size(), *own.shape)
        all_gather(each, own, group)
        return each[0].clone()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        dx = dys[0].new_zeros(ctx.shape)
        if ctx.first:
            dx[:, 0] = dys[0]
        return dx, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _start_reduce_scatter(group, x)()

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return _start_all_gather(ctx.group, dys[0])(), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return dys[0], None
