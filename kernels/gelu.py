"""Bias and GELU in one pass, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.kernels.backend_choice import uses_triton


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x + bias), with the exact GELU (with erf).

    Args:
        x: The input, of shape (..., n).
        bias: The bias, of shape (n,).
    """
    if uses_triton(x):
        y: Tensor = _BiasGelu.apply(x, bias)  # type: ignore[no-untyped-call]
        return y
    return bias_gelu_reference(x, bias)


def bias_gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Return the same as `bias_gelu`, in plain torch.

    Args:
        x: See `bias_gelu`.
        bias: See `bias_gelu`.
    """
    return F.gelu(x + bias)


class _BiasGelu(torch.autograd.Function):
    """The fused operation. It saves x and the bias, not their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        from schedir.kernels import gelu_triton as kernels

        ctx.save_for_backward(x, bias)
        return kernels.forward(x, bias)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor]:
        from schedir.kernels import gelu_triton as kernels

        return kernels.backward(dys[0], *ctx.saved_tensors)
