"""Weight gradients summed up in float32: main += dy.T @ x, in the product itself.

With bfloat16 weights and float32 gradients, a product and then a sum move 12 bytes per weight
and microbatch beside the product's own: more than half of its time at 2048 tokens on an H100.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedir.kernels.choice import on_triton


def accumulate_(main: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """`main` (k, n) += `dy` (T, k).T @ `x` (T, n), summed up in float32; main may be float32
    where the others are bfloat16 or float16."""
    if main.dtype == dy.dtype:
        return main.add_(dy.t() @ x)
    if dy.is_cuda and main.dtype == torch.float32:
        try:  # cuBLAS takes a float32 addend and result
            torch.ops.aten.addmm.dtype_out(main, dy.t(), x, torch.float32, out=main)
            return main
        except (AttributeError, NotImplementedError):  # an older torch does not offer it
            if on_triton(dy) and main.is_contiguous():
                from schedir.kernels import weight_gradient_triton as kernels

                return kernels.accumulate_(main, dy, x)
    return accumulate_reference_(main, dy, x)


def accumulate_reference_(main: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """As `accumulate_`, in plain torch: the operands are cast first, and nothing is rounded."""
    return main.add_(dy.to(main.dtype).t() @ x.to(main.dtype))
