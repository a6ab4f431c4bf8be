"""Stages that pass several tensors of all kinds, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from tests.cpu.tiny_stages import copy_gradients, have_same_bits

__all__ = ["copy_gradients", "draw_stages", "have_same_bits", "make_batch", "squared_error"]

ROWS, WIDTH = 3, 8
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
# The dtypes of tensors that a stage computes without trained weights.
TABLES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)


class Output(NamedTuple):
    """An output of a stage: `made` from all its tensors, a `table`, or an input `through`."""

    how: str
    boundary: Boundary
    of: int = 0  # which input


class MultiTensorStage(nn.Module):
    """Takes several tensors, uses some of them, and returns others."""

    def __init__(
        self, takes: list[Boundary], uses: list[int], gives: list[Output], again: bool
    ) -> None:
        super().__init__()
        self.uses, self.gives, self.again = uses, gives, again
        self.take = nn.ModuleDict(
            {str(k): nn.Linear(takes[k].shape[-1], WIDTH) for k in uses if takes[k].shape}
        )
        self.give = nn.ModuleDict(
            {str(k): nn.Linear(WIDTH, out.boundary.shape[-1]) for k, out in enumerate(gives)
             if out.how == "made" and out.boundary.shape}
        )  # fmt: skip

    def body(self, *xs: Tensor) -> Tensor:
        h = torch.zeros(ROWS, WIDTH)
        for k in self.uses:
            x = xs[k].float()
            h = h + (self.take[str(k)](x).reshape(-1, WIDTH).sum(0) if x.dim() else x)
        return torch.tanh(h)

    def forward(self, *xs: Tensor, shift: Tensor | None = None) -> Any:
        h = checkpoint(self.body, *xs, use_reentrant=False) if self.again else self.body(*xs)
        if shift is not None:
            h = h + shift
        out: list[Tensor] = []
        for k, (how, boundary, of) in enumerate(self.gives):
            if how == "through":  # autograd returns the gradient of a view unchanged
                out.append(xs[of].view_as(xs[of]) if k % 2 else xs[of])
                continue
            y = self.give[str(k)](h) if str(k) in self.give else h.sum()
            if how == "table":
                y = h.detach().mean() + torch.arange(boundary.nbytes // boundary.dtype.itemsize)
            out.append(_like(y * 3, boundary))
        return out[0] if len(out) == 1 else tuple(out)


def _like(y: Tensor, boundary: Boundary) -> Tensor:
    """Return a tensor with the shape and dtype of a boundary, computed from another tensor."""
    if not boundary.shape:
        return y.sum().to(boundary.dtype)
    rows = y.reshape(-1, boundary.shape[-1])[0].expand(boundary.shape)
    return (rows > 0) if boundary.dtype is torch.bool else rows.to(boundary.dtype)


def draw_stages(stages: int, seed: int, tensors: int = 4) -> tuple[list[nn.Module], dict[int, Any]]:
    """Draw stages and the boundaries between them, which depend only on the seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    takes = [
        Boundary((ROWS, 4), torch.int64),
        Boundary((2,), requires_grad=False),
        Boundary((ROWS, WIDTH), requires_grad=False),
    ]
    modules: list[nn.Module] = []
    boundaries = {}
    for s in range(stages):
        graded = (
            [k for k, one in enumerate(takes) if one.requires_grad] if s else [*range(len(takes))]
        )
        uses = sorted(
            {rng.choice(graded), *rng.sample(range(len(takes)), rng.randint(0, len(takes)))}
        )
        gives = [Output("made", Boundary(_shape(rng), rng.choice(FLOATS)))]
        for _ in range(rng.randint(0, tensors - 1)):
            how = rng.choice(("made", "table", "through"))
            of = rng.randrange(len(takes))
            if how == "through":
                gives.append(Output(how, takes[of], of))
            elif how == "made":
                gives.append(Output(how, Boundary(_shape(rng), rng.choice(FLOATS))))
            else:
                gives.append(Output(how, Boundary(_shape(rng), rng.choice(TABLES), False)))
        if s == stages - 1:
            gives = [Output("made", Boundary((ROWS, WIDTH)))]
        rng.shuffle(gives)
        modules.append(
            make_backward_splittable(MultiTensorStage(takes, uses, gives, rng.random() < 0.3))
        )
        takes = [out.boundary for out in gives]
        boundaries[s] = tuple(takes)
    del boundaries[stages - 1]
    return modules, boundaries


def _shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(0, 3)))


def make_batch(microbatches: int) -> tuple[list[Any], Tensor, list[dict[str, Tensor]]]:
    """Return inputs, targets and keywords."""
    draw = torch.Generator().manual_seed(microbatches)
    inputs = [
        (
            torch.randint(9, (ROWS, 4), generator=draw),
            torch.randn(2, generator=draw),
            torch.randn(ROWS, WIDTH, generator=draw),
        )
        for _ in range(microbatches)
    ]
    keywords = [{"shift": torch.randn(ROWS, WIDTH, generator=draw)} for _ in range(microbatches)]
    return inputs, torch.randn(microbatches, ROWS, WIDTH, generator=draw), keywords


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared errors."""
    return (y - target).square().sum()
