"""The kernels of `boundary`: both copy between a flat tensor and one of up to three strides."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedir.kernels.boundary import pack_reference, unpack_reference

BLOCK, WARPS = 2048, 4
DIMENSIONS = 3


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


@triton.jit
def unpack_kernel(
    wire,
    out,
    n,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = wire[i], BLOCK of them a program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i
    if not FLAT:
        at = offset(i, size1, size2, stride0, stride1, stride2)
    x = tl.load(wire + i, mask=i < n)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=i < n)


def pack(value: Tensor, t: int, rank: int, dtype: torch.dtype) -> Tensor:
    layout = _layout(value)
    if layout is None:
        return pack_reference(value, t, rank, dtype)
    n = value.numel() // t
    wire = torch.empty(n, dtype=dtype, device=value.device)
    pack_kernel[(triton.cdiv(n, BLOCK),)](
        value, wire, rank * n, n, *layout, FLAT=value.is_contiguous(), BLOCK=BLOCK, num_warps=WARPS
    )
    return wire


def unpack(wire: Tensor, out: Tensor) -> Tensor:
    layout = _layout(out)
    if layout is None or not wire.is_contiguous():
        return unpack_reference(wire, out)
    n = out.numel()
    unpack_kernel[(triton.cdiv(n, BLOCK),)](
        wire, out, n, *layout, FLAT=out.is_contiguous(), BLOCK=BLOCK, num_warps=WARPS
    )
    return out


def _layout(x: Tensor) -> tuple[int, int, int, int, int] | None:
    """The two inner sizes and all three strides, with dimensions that lie in one piece joined.

    None where more than three are left, or more elements than an int32 counts.
    """
    if x.numel() >= 2**31:
        return None
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    missing = DIMENSIONS - len(sizes)
    if missing < 0:
        return None
    sizes, strides = [1] * missing + sizes, [0] * missing + strides
    return sizes[1], sizes[2], strides[0], strides[1], strides[2]
