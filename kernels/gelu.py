"""Bias and GELU in one pass, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.kernels.backend_choice import uses_triton


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), the exact one (with erf): (..., n) and (n,) to (..., n)."""
    if uses_triton(x):
        y: Tensor = _BiasGelu.apply(x, bias)  # type: ignore[no-untyped-call]
        return y
    return bias_gelu_reference(x, bias)


def bias_gelu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """As `bias_gelu`, in plain torch."""
    return F.gelu(x + bias)


def backward_reference(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias, in plain torch: what autograd makes of the reference."""
    with torch.enable_grad():
        x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
        dx, dbias = torch.autograd.grad(bias_gelu_reference(x, bias), (x, bias), dy)
    return dx, dbias


class _BiasGelu(torch.autograd.Function):
    """Keeps x and the bias, not their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        from schedir.kernels import gelu_triton as kernels

        ctx.save_for_backward(x, bias)
        return kernels.forward(x, bias)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, Tensor]:
        from schedir.kernels import gelu_triton as kernels

        return kernels.backward(dys[0], *ctx.saved_tensors)
