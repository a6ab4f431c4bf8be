"""Weight gradients summed up in float32: main += dy.T @ x, in the product itself.

With bfloat16 weights and float32 gradients, a product and then a sum move 12 bytes per weight
and microbatch beside the product's own: more than half of its time at 2048 tokens on an H100.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_DTYPES = torch.bfloat16, torch.float16


def accumulate_(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """`main_grad` (k, n) += `dy` (T, k).T @ `x` (T, n), summed up in float32; main may be float32
    where the others are bfloat16 or float16."""
    if main_grad.dtype == dy.dtype:
        return main_grad.add_(dy.t() @ x)
    if dy.is_cuda and main_grad.dtype == torch.float32 and dy.dtype in _HALF_DTYPES:
        # cuBLAS takes a float32 addend and result. A torch that does not offer it (before 2.11)
        # says so: nothing slower takes its place unseen.
        torch.ops.aten.addmm.dtype_out(main_grad, dy.t(), x, torch.float32, out=main_grad)
        return main_grad
    return accumulate_reference_(main_grad, dy, x)


def accumulate_reference_(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """As `accumulate_`, in plain torch: the operands are cast first, and nothing is rounded."""
    return main_grad.add_(dy.to(main_grad.dtype).t() @ x.to(main_grad.dtype))
