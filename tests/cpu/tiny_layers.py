"""Layers for tests of split backwards: Hugging Face's Conv1D, and two with split rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from schedir.runtime import register_splittable_layer

WIDTH = 6


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, like Hugging Face's."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Square(nn.Module):
    """Multiplies by the square of a weight, so that its gradient needs the weight."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.square()


class Conv(nn.Conv2d):
    """A convolution of (..., n) with one channel."""

    def __init__(self, bias: bool) -> None:
        super().__init__(1, 1, 3, padding=1, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(-1, 1, *input.shape[-2:])
        return super().forward(x).view(input.shape)


def _dx(layer: Conv, x: Tensor, dy: Tensor) -> Tensor:
    shape, back = _pixels(layer, x).shape, _pixels(layer, dy)
    dx: Tensor = conv2d_input(shape, layer.weight, back, padding=1)
    return dx.view(x.shape)


def _dw(layer: Conv, x: Tensor, dy: Tensor) -> Tensor:
    dw: Tensor = conv2d_weight(_pixels(layer, x), layer.weight.shape, _pixels(layer, dy), padding=1)
    return dw


def _pixels(layer: Conv, x: Tensor) -> Tensor:
    return x.reshape(-1, 1, *x.shape[-2:])


register_splittable_layer(
    Square,
    input_grad=lambda layer, x, dy: dy * layer.weight.square(),
    deferred_grads={
        "weight": lambda layer, x, dy: (x * dy).sum_to_size(WIDTH) * (2 * layer.weight)
    },
)
register_splittable_layer(
    Conv,
    input_grad=_dx,
    deferred_grads={"weight": _dw},
    immediate_grads={"bias": lambda layer, x, dy: dy.sum().view(1)},
)

LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "linear": lambda bias: nn.Linear(WIDTH, WIDTH, bias),
    "conv1d": lambda bias: Conv1D(WIDTH, WIDTH),
    "norm": lambda bias: nn.LayerNorm(WIDTH, bias=bias),
    "conv2d": lambda bias: Conv(bias),
    "square": lambda bias: Square(WIDTH),
}
