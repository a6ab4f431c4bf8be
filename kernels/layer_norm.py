"""Residual addition and LayerNorm in one pass, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.kernels.backend_choice import uses_triton


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return the sum h = x + residual, and LayerNorm(h).

    Args:
        x: The input, of shape (..., n).
        residual: The residual stream, of shape (..., n).
        weight: The gain, of shape (n,).
        bias: The shift, of shape (n,).
        eps: The epsilon of the norm.
    """
    if uses_triton(x):
        h, y = _AddLayerNorm.apply(x, residual, weight, bias, eps)  # type: ignore[no-untyped-call]
        return h, y
    return add_layer_norm_reference(x, residual, weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return the same as `add_layer_norm`, in plain torch.

    Args:
        x: See `add_layer_norm`.
        residual: See `add_layer_norm`.
        weight: See `add_layer_norm`.
        bias: See `add_layer_norm`.
        eps: See `add_layer_norm`.
    """
    h = x + residual
    return h, F.layer_norm(h, weight.shape, weight, bias, eps)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from schedir.kernels import layer_norm_triton as kernels

        h, y, moments = kernels.forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(h, weight, moments)
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        from schedir.kernels import layer_norm_triton as kernels

        (dh, dy), (h, weight, moments) = grads, ctx.saved_tensors
        dx, dweight, dbias = kernels.backward(dh, dy, h, weight, moments)
        return dx, dx, dweight, dbias, None
