"""A small model for gradient comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from schedir.runtime.autograd.split_backward import linear

WIDTH = 4  # features of each layer; small, so that tests are fast


class _TinyLayer(nn.Module):
    """A layer in float64 whose backward can be split into I and W."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(_draw_tensor(generator, WIDTH, WIDTH))
        self.bias = nn.Parameter(_draw_tensor(generator, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight) + self.bias)


def make_tiny_stages(stages: int, seed: int = 0) -> list[nn.Module]:
    """Return the stages of a small model in float64.

    Args:
        stages: The number of stages.
        seed: The seed of the parameters.  The same seed gives the same parameters.

    Returns:
        One module per stage.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_TinyLayer(generator) for _ in range(stages)]


def make_batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets in float64.

    Args:
        microbatches: The number of microbatches.
        seed: The seed.  The same seed gives the same numbers.

    Returns:
        Inputs and targets, each of shape (microbatches, 2, WIDTH).
    """
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = _draw_tensor(generator, microbatches, 2, WIDTH)
    targets = _draw_tensor(generator, microbatches, 2, WIDTH)
    return inputs, targets


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared errors.

    Args:
        y: The output of the model.
        target: The targets, of the shape of `y`.
    """
    return (y - target).square().sum()


def _draw_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
