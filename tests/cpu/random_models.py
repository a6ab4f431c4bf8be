"""A model with drawn traits, its boundaries and batches, for the numeric law."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedir.ir.program import Program
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.microbatch_boundaries import PerMicrobatchBoundary
from schedir.runtime.parameters.mixed_precision import use_float32_gradients

WIDTH = 6


class Traits(NamedTuple):
    """The properties of a drawn model and of its batches."""

    rows: tuple[int, ...]  # the rows of each microbatch
    dropout: bool
    batch_norm: bool
    writes_to_input: bool
    second_tensor: bool
    keywords: bool
    bfloat16: bool
    tied_copies: bool  # each stage has a copy of a tied weight, not the same Parameter

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 else torch.float32


class Stage(nn.Module):
    """A linear layer and a norm, with tied layers, skip connections and other traits."""

    def __init__(self, s: int, program: Program, traits: Traits, tied: list[nn.Linear]) -> None:
        super().__init__()
        self.traits, self.is_last = traits, s == program.shape.stages - 1
        self.gives_skip = any(begin == s for begin, _ in program.skips)
        self.takes_skip = any(end == s for _, end in program.skips)
        self.activation = nn.ELU(inplace=traits.writes_to_input)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if traits.batch_norm else nn.LayerNorm(WIDTH)
        self.tied = nn.ModuleList(tied)

    def forward(self, x: Tensor, *others: Any, factor: Tensor | None = None) -> Any:
        y = self.layer(self.activation(x))
        for layer in self.tied:
            y = y + layer(y)
        if self.takes_skip:
            skip: Any = others[-1]
            if self.traits.second_tensor:
                skip, numbers = skip
                y = y.roll(int(numbers), -1)
            y = y * torch.sigmoid(skip)
        if factor is not None:
            y = y * factor
        y = torch.tanh(self.norm(y))
        if self.traits.dropout:
            y = nn.functional.dropout(y, 0.25, self.training)
        if self.is_last:
            return y
        out: list[Any] = [y]
        if self.traits.second_tensor:
            out = [y.roll(int(others[0]), 0), others[0]]
        if self.gives_skip:
            skip = torch.relu(y)
            out.append((skip, others[0]) if self.traits.second_tensor else skip)
        return tuple(out) if len(out) > 1 else y


def make_stages(program: Program, traits: Traits, *, copies: bool = False) -> list[Any]:
    """Return the stages of the model, which share the Parameters of their tied layers.

    Args:
        program: The program.
        traits: The traits of the model.
        copies: True to give each stage a copy of each tied Parameter.
    """
    torch.manual_seed(0)
    tied = {stages: nn.Linear(WIDTH, WIDTH, bias=False) for stages in program.tied_weights}
    stages: list[Any] = []
    for s in range(program.shape.stages):
        stage: nn.Module = Stage(
            s, program, traits, [layer for own, layer in tied.items() if s in own]
        )
        if traits.bfloat16:
            stage = stage.bfloat16()
        if s < program.frozen_stages:
            stage.requires_grad_(False)
        stages.append(make_backward_splittable(deepcopy(stage) if copies else stage))
    for stage in stages if traits.bfloat16 else ():
        use_float32_gradients(stage)
    return stages


def make_boundary(program: Program, traits: Traits) -> Any:
    """Return the boundaries of all edges, for each microbatch if these differ."""

    def boundaries(rows: int) -> dict[Any, Any]:
        one: Any = Boundary((rows, WIDTH), traits.dtype)
        two = (one, Boundary((1,), torch.int64)) if traits.second_tensor else one
        neighbours: dict[Any, Any] = {s: two for s in range(program.shape.stages - 1)}
        return neighbours | {skip: two for skip in program.skips}

    if len({*traits.rows}) == 1:
        return boundaries(traits.rows[0]) or (1,)
    return PerMicrobatchBoundary([boundaries(rows) for rows in traits.rows])


class Batch(NamedTuple):
    """The batch of one step."""

    inputs: list[Any]
    targets: list[Tensor]
    keywords: list[dict[str, Tensor]]

    def select(self, part: slice) -> Batch:
        return Batch(self.inputs[part], self.targets[part], self.keywords[part])


def make_batch(traits: Traits, step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)

    def tensors(*last: int) -> list[Tensor]:
        return [torch.randn(rows, *last, generator=draw).to(traits.dtype) for rows in traits.rows]

    inputs: list[Any] = tensors(WIDTH)
    if traits.second_tensor:
        inputs = [(x, torch.tensor([mb])) for mb, x in enumerate(inputs)]
    keywords = [{"factor": 1 + 0.1 * x} for x in tensors(1)] if traits.keywords else []
    return Batch(inputs, tensors(WIDTH), keywords)


def squared_error(y: Tensor, target: Tensor) -> Tensor:
    return (y.float() - target.float()).square().sum()
