"""A small model for gradient comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from schedir.runtime.autograd.split_backward import linear

WIDTH = 4


class _TinyLayer(nn.Module):
    """A layer, splittable into dI and dW; in double precision."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(_draw_tensor(generator, WIDTH, WIDTH))
        self.bias = nn.Parameter(_draw_tensor(generator, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight) + self.bias)


def make_tiny_stages(stages: int, seed: int = 0) -> list[nn.Module]:
    """A model of that many stages: the same seed gives the same parameters."""
    numbers = torch.Generator().manual_seed(seed)
    return [_TinyLayer(numbers) for _ in range(stages)]


def make_batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (microbatches, 2, WIDTH)."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return _draw_tensor(numbers, microbatches, 2, WIDTH), _draw_tensor(
        numbers, microbatches, 2, WIDTH
    )


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors."""
    return (y - target).square().sum()


def _draw_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
