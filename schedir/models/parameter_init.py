"""Initial values of the parameters of a layer, and the ranks that share them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.models.language_model import STD, ParameterPlacement, drawn
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import seen_in_parts


class LayerParameters(NamedTuple):
    """What makes the linear layers and norms of the layer `name`, `hidden` wide at its ends.

    As in GPT-2, what adds to the residual stream starts smaller, the more there is that `adds`.
    With `sequence` tensor-parallel ranks share the tokens, too.
    """

    seed: int
    name: str
    hidden: int
    adds: int
    tp: ProcessGroup | None
    where: ParameterPlacement
    sequence: bool = False

    def column(self, name: str, k: int, *, bias: bool = True) -> ColumnParallelLinear:
        """(..., hidden) to this rank's part of (..., k)."""
        weight = drawn(self.seed, f"{self.name}.{name}.weight", k, self.hidden, self.where)
        zeros = torch.zeros(k, **self.where) if bias else None
        return ColumnParallelLinear(weight, zeros, self.tp, sequence=self.sequence)

    def row(self, name: str, n: int, *, bias: bool = True) -> RowParallelLinear:
        """This rank's part of (..., n) to (..., hidden), the sum of all ranks'."""
        name, std = f"{self.name}.{name}.weight", STD / math.sqrt(self.adds)
        weight = drawn(self.seed, name, self.hidden, n, self.where, 1, std)
        zeros = torch.zeros(self.hidden, **self.where) if bias else None
        return RowParallelLinear(weight, zeros, self.tp, sequence=self.sequence)

    def norm(self) -> nn.LayerNorm:
        """A LayerNorm."""
        norm = nn.LayerNorm(self.hidden, **self.where)
        return seen_in_parts(norm, self.tp, sequence=self.sequence)
