"""A small model for gradient comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from schedir.runtime.autograd.split_backward import linear

WIDTH = 4


class _TinyLayer(nn.Module):
    """A layer, splittable into dI and dW; in double precision."""

    def __init__(self, numbers: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(_numbers(numbers, WIDTH, WIDTH))
        self.bias = nn.Parameter(_numbers(numbers, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight) + self.bias)


def tiny_stages(stages: int, seed: int = 0) -> list[nn.Module]:
    """A model of that many stages: the same seed gives the same parameters."""
    numbers = torch.Generator().manual_seed(seed)
    return [_TinyLayer(numbers) for _ in range(stages)]


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (microbatches, 2, WIDTH)."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return _numbers(numbers, microbatches, 2, WIDTH), _numbers(numbers, microbatches, 2, WIDTH)


def loss(y: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors."""
    return (y - target).square().sum()


def _numbers(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=numbers, dtype=torch.float64)
