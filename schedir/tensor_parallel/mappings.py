"""The tensor-parallel group, its shards, and the mappings f and g of Megatron-LM.

A group is a `ProcessGroup`, or None for a tensor-parallel size of 1 without communication.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2), each rank has 1/t
of the tokens outside of the tensor-parallel layers. The tokens are the second to last dimension, of
size s. Rank r has the tokens from r * s / t to (r + 1) * s / t - 1. An all-reduce then becomes a
reduce-scatter where the tokens are divided, and an all-gather where all ranks need all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.runtime.autograd.weight_gradient_formulas import PendingTensor, SharedInputRule
from schedir.runtime.boundaries.sequence_shards import (
    join_sequence,
    require_even_split,
    split_by_rank,
)
from schedir.tensor_parallel.sliced_init import SlicedInit

_Replicated = TypeVar("_Replicated", bound=nn.Parameter | nn.Module)


def tp_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in a tensor-parallel group.

    Args:
        group: The group. None means one rank.
    """
    return 1 if group is None else group.size()


def tp_rank(group: ProcessGroup | None) -> int:
    """Return the index of this rank in the group, which is also the index of its shard.

    Args:
        group: The group. None means one rank.
    """
    return 0 if group is None else group.rank()


ShardableWeight = Tensor | SlicedInit  # a full weight that can return slices


def shard(
    full: ShardableWeight, dim: int, group: ProcessGroup | None, *, padded: bool = False
) -> nn.Parameter:
    """Return this rank's 1/t of a weight, as a parameter in new memory.

    If t > 1, the parameter has two attributes: `shard_dim`, the divided dimension, and
    `shard_size`, the size of this dimension in the full weight.

    Args:
        full: The full weight.
        dim: The dimension to divide.
        group: The tensor-parallel group. None means one rank, without communication.
        padded: True to pad the last shards with zeros if t does not divide the dimension.

    Raises:
        UsageError: t does not divide the dimension, and `padded` is False.
    """
    t, size = tp_size(group), full.shape[dim]
    if size % t and not padded:
        raise UsageError(f"{t} tensor-parallel ranks cannot share {size} rows or columns evenly")
    shard_size = -(-size // t)
    start = min(tp_rank(group) * shard_size, size)
    length = min(shard_size, size - start)
    local = full.narrow(dim, start, length)
    if length < shard_size:
        sizes = list(local.shape)
        sizes[dim] = shard_size
        local, part = local.new_zeros(sizes), local
        local.narrow(dim, 0, length).copy_(part)
    elif isinstance(full, Tensor):
        # A view would keep the memory of the full weight alive.
        local = local.clone(memory_format=torch.contiguous_format)
    param = nn.Parameter(local.detach())
    if t > 1:
        param.shard_dim = dim  # type: ignore[attr-defined]
        param.shard_size = size  # type: ignore[attr-defined]
    return param


def get_shard_dim(param: Tensor) -> int | None:
    """Return the dimension along which a parameter is sharded, or None.

    Args:
        param: The parameter.
    """
    return getattr(param, "shard_dim", None)


def mark_sequence_parallel(
    replicated: _Replicated,
    group: ProcessGroup | None,
    *,
    sequence_parallel: bool,
    has_local_tokens: bool = True,
) -> _Replicated:
    """Mark replicated parameters whose gradients must be summed over sequence-parallel ranks.

    With sequence parallelism, a replicated parameter receives only 1/t of the tokens on each rank,
    so its gradient is a partial sum. A program with `sequence_parallel=True` sums the gradients of
    marked parameters. Without sequence parallelism, the function marks nothing.

    Args:
        replicated: A parameter, or a module with parameters, that each rank has unsharded.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens.
        has_local_tokens: True if the parameter receives different tokens on each rank. False if
            its gradient is the same on all ranks.

    Returns:
        `replicated`.
    """
    for parameter in (
        replicated.parameters() if isinstance(replicated, nn.Module) else (replicated,)
    ):
        if sequence_parallel and tp_size(group) > 1:
            parameter.summed_over_tp = has_local_tokens  # type: ignore[attr-defined]
    return replicated


def enter_tp_region(
    group: ProcessGroup | None, *, sequence_parallel: bool = False
) -> SharedInputRule | None:
    """Return the rule for the input of a sharded layer: f of arXiv 1909.08053, section 3.

    The forward of f is the identity, and its backward is an all-reduce. With `sequence_parallel`,
    the forward is an all-gather, and the backward is a reduce-scatter. Pass the rule to
    `split_backward.linear(x, weight, input_rule=...)`, which starts the reduction before it
    computes the weight gradient.

    Args:
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens of the input.

    Returns:
        The rule. It is None for a single rank, where no communication is needed.
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
    """Reduce the partial outputs of a sharded layer: g of arXiv 1909.08053, section 3.

    The forward is an all-reduce, and the backward is the identity. With `sequence_parallel`, the
    forward is a reduce-scatter from (..., s, n) to (..., s / t, n), and the backward is an
    all-gather.

    Args:
        x: The partial output of this rank. The all-reduce overwrites it if it is contiguous, so no
            other operation may need `x`.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens of the output.

    Raises:
        UsageError: The number of tokens is not a multiple of t.
    """
    if tp_size(group) == 1:
        return x
    y: Tensor = (_ScatterSequence if sequence_parallel else _G).apply(x.contiguous(), group)  # type: ignore[no-untyped-call]
    return y


def select_local_tokens(
    x: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool = True
) -> Tensor:
    """Return the tokens of this rank: (..., s / t, n) of (..., s, n).

    Args:
        x: All tokens.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens. If False, the result has all tokens.

    Raises:
        UsageError: The number of tokens is not a multiple of t.
    """
    t = tp_size(group) if sequence_parallel else 1
    require_even_split(x.shape[-2], t)
    return x.chunk(t, -2)[tp_rank(group) if t > 1 else 0]


def get_first_token(x: Tensor, group: ProcessGroup | None, *, sequence_parallel: bool) -> Tensor:
    """Return the first token, (b, n) of (b, s, n), on all ranks.

    With sequence parallelism, all ranks receive the token from rank 0. All ranks must then compute
    the same values from it, so that each rank has the full gradient of the token. Only rank 0 uses
    this gradient.

    Args:
        x: The tokens of this rank, or all tokens without sequence parallelism.
        group: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if the ranks divide the tokens.
    """
    if not sequence_parallel or group is None or group.size() == 1:
        return x[:, 0]
    first: Tensor = _First.apply(x, group)  # type: ignore[no-untyped-call]
    return first


def all_gather(output: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    """Gather the shards of all ranks into one tensor, in the order of ranks.

    NCCL writes directly to `output`. `dist.all_gather` takes a list of outputs, and would copy the
    shards.

    Args:
        output: The gathered tensor. It is contiguous, with t times the size of `shard`.
        shard: The shard of this rank, contiguous.
        group: The group.
    """
    # torch 2.13 renames this function, and warns of the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.view(-1), shard.view(-1), group=group)


def _start_all_reduce(group: ProcessGroup, x: Tensor) -> PendingTensor:
    work: Any = dist.all_reduce(x, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return x

    return wait


def _start_all_gather(group: ProcessGroup, part: Tensor) -> PendingTensor:
    """Start to gather (..., s / t, n) of each rank to (..., s, n) on all ranks."""
    part = part.contiguous()
    parts = part.new_empty(group.size(), *part.shape)
    # torch 2.13 renames this function, and warns of the old name.
    start: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = start(parts.view(-1), part.view(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return join_sequence(parts)

    return wait


def _start_reduce_scatter(group: ProcessGroup, x: Tensor) -> PendingTensor:
    """Start to sum (..., s, n) over the ranks, and to scatter the sum as (..., s / t, n)."""
    parts = split_by_rank(x, group.size())
    local = torch.empty_like(parts[0])
    start: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = start(local.view(-1), parts.view(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return local

    return wait


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.shape = x.shape
        ctx.first = group.rank() == 0
        first_token = x[:, 0].contiguous()
        gathered = first_token.new_empty(group.size(), *first_token.shape)
        all_gather(gathered, first_token, group)
        return gathered[0].clone()

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
