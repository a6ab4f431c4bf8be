"""What a stage boundary looks like on the wire: cut, cast and laid out in one pass.

Tensor-parallel ranks hold a boundary in full; on the wire each sends its 1/t of it, the numbers
`rank * size / t` and following in row-major order (`ScatterGather` of docs/ir.md).  Behind it
there is nothing to unpack: each part is received, and gathered, where it lies in the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.choice import on_triton


def pack(value: Tensor, t: int, rank: int, out: Tensor | None = None) -> Tensor:
    """Slice `rank` of t of a tensor of any strides, into `out`, which is flat, contiguous and of
    any type, or into new memory.  t divides the number of elements."""
    if out is None:
        out = torch.empty(value.numel() // t, dtype=value.dtype, device=value.device)
    if on_triton(value) and (strides := layout(value)) is not None:
        from schedir.kernels import boundary_triton as kernels

        return kernels.pack(value, strides, rank, out)
    return pack_reference(value, t, rank, out)


def layout(x: Tensor) -> tuple[int, int, int, int, int] | None:
    """A tensor as the kernel takes it: three dimensions, of which the two inner sizes and all
    strides count.  Dimensions that lie in one piece are joined.

    None where more than three are left, or more elements than an int32 counts.

    >>> layout(torch.zeros(4, 5, 6, 7).transpose(0, 1))
    (4, 42, 42, 210, 1)
    """
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        elif size > 1:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 3 or x.numel() >= 2**31:
        return None
    sizes, strides = [1, 1, 1, *sizes], [0, 0, 0, *strides]
    return sizes[-2], sizes[-1], strides[-3], strides[-2], strides[-1]


def pack_reference(value: Tensor, t: int, rank: int, out: Tensor) -> Tensor:
    """As `pack`, in plain torch."""
    return out.copy_(value.reshape(t, -1)[rank])
