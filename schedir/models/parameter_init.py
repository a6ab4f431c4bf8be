"""Initial values of the parameters of a layer, and the ranks that share them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.models.language_model import INIT_STD, ParameterPlacement, make_normal_init
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import mark_sequence_parallel


class LayerParameters(NamedTuple):
    """What makes the linear layers and norms of the layer `name`, `hidden` wide at its ends.

    As in GPT-2, what adds to the residual stream starts smaller, the more there is that
    `residual_adds`. With `sequence_parallel` tensor-parallel ranks share the tokens, too.
    """

    seed: int
    name: str
    hidden: int
    residual_adds: int
    tp: ProcessGroup | None
    placement: ParameterPlacement
    sequence_parallel: bool = False

    def make_column_linear(self, name: str, k: int, *, bias: bool = True) -> ColumnParallelLinear:
        """(..., hidden) to this rank's part of (..., k)."""
        weight = make_normal_init(
            self.seed, f"{self.name}.{name}.weight", k, self.hidden, self.placement
        )
        zeros = torch.zeros(k, **self.placement) if bias else None
        return ColumnParallelLinear(
            weight, zeros, self.tp, sequence_parallel=self.sequence_parallel
        )

    def make_row_linear(self, name: str, n: int, *, bias: bool = True) -> RowParallelLinear:
        """This rank's part of (..., n) to (..., hidden), the sum of all ranks'."""
        name, std = f"{self.name}.{name}.weight", INIT_STD / math.sqrt(self.residual_adds)
        weight = make_normal_init(self.seed, name, self.hidden, n, self.placement, 1, std)
        zeros = torch.zeros(self.hidden, **self.placement) if bias else None
        return RowParallelLinear(weight, zeros, self.tp, sequence_parallel=self.sequence_parallel)

    def make_norm(self) -> nn.LayerNorm:
        """A LayerNorm."""
        norm = nn.LayerNorm(self.hidden, **self.placement)
        return mark_sequence_parallel(norm, self.tp, sequence_parallel=self.sequence_parallel)
