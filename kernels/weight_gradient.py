"""Accumulate weight gradients in float32 within the matrix product: main += dy.T @ x.

A separate addition would move 12 bytes per weight and microbatch: it reads a float32 product and
the buffer, and writes the buffer. On an H100, the addition would take more than half of the time of
the product at 2048 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_DTYPES = torch.bfloat16, torch.float16


def accumulate_(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Add `dy`.T @ `x` to a gradient buffer, in the type of the buffer.

    Args:
        main_grad: The gradient buffer, of shape (k, n). It has the type of `dy`, or is float32 with
            bfloat16 or float16 `dy` and `x`.
        dy: The gradient of the output, of shape (T, k).
        x: The input, of shape (T, n).

    Returns:
        `main_grad`.
    """
    if main_grad.dtype == dy.dtype:
        return main_grad.add_(dy.t() @ x)
    if dy.is_cuda and main_grad.dtype == torch.float32 and dy.dtype in _HALF_DTYPES:
        # cuBLAS supports a float32 addend and result. torch before 2.11 does not expose this and
        # raises an error. There is no silent fallback to a slower operation.
        torch.ops.aten.addmm.dtype_out(main_grad, dy.t(), x, torch.float32, out=main_grad)
        return main_grad
    return accumulate_reference_(main_grad, dy, x)


def accumulate_reference_(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Do the same as `accumulate_`, in plain torch.

    The operands are first cast to the type of the buffer, which is exact.

    Args:
        main_grad: See `accumulate_`.
        dy: See `accumulate_`.
        x: See `accumulate_`.
    """
    return main_grad.add_(dy.to(main_grad.dtype).t() @ x.to(main_grad.dtype))
