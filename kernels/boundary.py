"""What a stage boundary looks like on the wire: cut, cast and laid out in one pass.

Tensor-parallel ranks hold a boundary in full; on the wire each sends its 1/t of it, the numbers
`rank * size / t` and following in row-major order (`ScatterGather` of docs/ir.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.choice import on_triton


def pack(value: Tensor, t: int, rank: int, dtype: torch.dtype | None = None) -> Tensor:
    """Slice `rank` of t of a tensor of any strides: flat, contiguous, of `dtype` (its own unless
    told), in memory of its own.  t divides the number of elements."""
    if on_triton(value):
        from schedir.kernels import boundary_triton as kernels

        return kernels.pack(value, t, rank, dtype or value.dtype)
    return pack_reference(value, t, rank, dtype)


def unpack(wire: Tensor, out: Tensor) -> Tensor:
    """The slices of all ranks, one after the other, into `out`, of any strides and type."""
    if on_triton(wire):
        from schedir.kernels import boundary_triton as kernels

        return kernels.unpack(wire, out)
    return unpack_reference(wire, out)


def pack_reference(value: Tensor, t: int, rank: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `pack`, in plain torch."""
    return value.reshape(t, -1)[rank].to(dtype or value.dtype, copy=True)


def unpack_reference(wire: Tensor, out: Tensor) -> Tensor:
    """As `unpack`, in plain torch."""
    return out.copy_(wire.view(out.shape))
