"""The kernel of `boundary`: copies from a tensor of up to three strides to a flat one."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


@triton.jit
def offset(i, size1, size2, stride0, stride1, stride2):
    """Where element i, counted in row-major order, of a strided tensor lies."""
    row = i // size2
    at = (row // size1).to(tl.int64) * stride0
    return at + (row % size1).to(tl.int64) * stride1 + (i % size2).to(tl.int64) * stride2


@triton.jit
def pack_kernel(
    value,
    wire,
    first,
    n,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """wire[i] = value[first + i], BLOCK of them a program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = first + i
    if not FLAT:
        at = offset(at, size1, size2, stride0, stride1, stride2)
    x = tl.load(value + at, mask=i < n)
    tl.store(wire + i, x.to(wire.dtype.element_ty), mask=i < n)


def pack(value: Tensor, layout: tuple[int, ...], rank: int, wire: Tensor) -> Tensor:
    n = wire.numel()
    pack_kernel[(triton.cdiv(n, BLOCK),)](
        value, wire, rank * n, n, *layout, FLAT=value.is_contiguous(), BLOCK=BLOCK, num_warps=WARPS
    )
    return wire
