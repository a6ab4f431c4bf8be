"""The Triton kernels of `cross_entropy`: one reads the logits, and the other overwrites them.

In this module, a program is an instance of a Triton kernel.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedir.kernels import launch_grid

MAX_BLOCK_COLUMNS, NUM_WARPS = 4096, 8


def choose_block_size(k: int) -> int:
    """Return the number of columns that a program processes at once.

    Args:
        k: The number of columns of the logits.
    """
    return min(MAX_BLOCK_COLUMNS, launch_grid.next_power_of_2(k))


@triton.jit
def statistics_kernel(logits, targets, out, first, n, k, stride, BLOCK: tl.constexpr):
    """Compute the statistics of one token per program."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    top = -float("inf")
    total = 0.0
    for start in range(0, k, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < k, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        # If all columns so far are padding, exp(-inf - -inf) would be NaN. Base 0 avoids this.
        base_value = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - base_value) + tl.sum(tl.exp(x - base_value), axis=0)
        top = higher
    column = tl.load(targets + row) - first
    is_local = (column >= 0) & (column < k)
    hit = tl.load(base + tl.where(is_local, column, 0)).to(tl.float32)
    tl.store(out + row, top)
    tl.store(out + n + row, total)
    tl.store(out + 2 * n + row, tl.where(is_local, hit, 0.0))


@triton.jit
def gradient_kernel(
    logits,
    targets,
    parts,
    dloss,
    first,
    ignore,
    n,
    k,
    stride,
    t,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of BLOCK logits of one token per program.

    T is the number of ranks t, rounded up to a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, T)
    rank_parts = parts + ranks.to(tl.int64) * 3 * n + row
    tops = tl.load(rank_parts, mask=ranks < t, other=-float("inf"))
    sums = tl.load(rank_parts + n, mask=ranks < t, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(sums * tl.exp(tops - top), axis=0)
    target = tl.load(targets + row)
    factor = tl.where(target == ignore, 0.0, tl.load(dloss).to(tl.float32))

    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits + row * stride + columns
    x = tl.load(pointers, mask=columns < k, other=-float("inf")).to(tl.float32)
    one_hot = tl.where(columns == target - first, factor, 0.0)
    gradient = tl.exp(x - top) * (factor / total) - one_hot
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=columns < k)


def compute_statistics(logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
    """Return the same as `cross_entropy.compute_statistics`, from the kernel.

    Args:
        logits: See `cross_entropy.compute_statistics`. The last dimension is contiguous.
        targets: See `cross_entropy.compute_statistics`. They are contiguous.
        first_column: See `cross_entropy.compute_statistics`.
    """
    n, k = logits.shape
    assert logits.stride(1) == 1 and targets.is_contiguous()
    out = torch.empty(3, n, dtype=torch.float32, device=logits.device)
    statistics_kernel[(n,)](
        logits,
        targets,
        out,
        first_column,
        n,
        k,
        logits.stride(0),
        BLOCK=choose_block_size(k),
        num_warps=NUM_WARPS,
    )
    return out


def write_gradient_(
    logits: Tensor,
    targets: Tensor,
    all_statistics: Tensor,
    dloss: Tensor,
    first_column: int,
    ignore_index: int,
) -> Tensor:
    """Do the same as `cross_entropy.write_gradient_`, with the kernel.

    Args:
        logits: See `cross_entropy.write_gradient_`. The last dimension is contiguous.
        targets: See `cross_entropy.write_gradient_`. They are contiguous.
        all_statistics: See `cross_entropy.write_gradient_`. They are contiguous.
        dloss: See `cross_entropy.write_gradient_`.
        first_column: See `cross_entropy.write_gradient_`.
        ignore_index: See `cross_entropy.write_gradient_`.
    """
    n, k = logits.shape
    t = len(all_statistics)
    assert logits.stride(1) == 1 and targets.is_contiguous() and all_statistics.is_contiguous()
    gradient_kernel[(n, launch_grid.count_blocks(k, choose_block_size(k)))](
        logits,
        targets,
        all_statistics,
        dloss,
        first_column,
        ignore_index,
        n,
        k,
        logits.stride(0),
        t,
        T=launch_grid.next_power_of_2(t),
        BLOCK=choose_block_size(k),
        num_warps=NUM_WARPS,
    )
    return logits
