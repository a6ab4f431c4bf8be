"""Factories of the linear layers and norms of a transformer layer, with their initial values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.models.gpt_config import GPTConfig
from schedir.models.language_model import INIT_STD, ParameterPlacement, make_normal_init
from schedir.models.llama_config import LlamaConfig
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import mark_sequence_parallel


class LayerParameters(NamedTuple):
    """A factory of the linear layers and norms of one transformer layer.

    As in GPT-2, weights whose output is added to the residual stream have a smaller initial
    standard deviation: `INIT_STD` / sqrt(`residual_adds`).

    Args:
        seed: The seed of the model.
        name: The name of the layer, which begins the names of its parameters.
        hidden: Hidden size.
        residual_adds: The number of outputs that the full model adds to the residual stream.
        tp: The tensor-parallel group. None means one rank, without communication.
        placement: The device and the type of the parameters.
        sequence_parallel: True if tensor-parallel ranks also divide the tokens.
    """

    seed: int
    name: str
    hidden: int
    residual_adds: int
    tp: ProcessGroup | None
    placement: ParameterPlacement
    sequence_parallel: bool = False

    @staticmethod
    def from_config(
        config: GPTConfig | LlamaConfig,
        index: int,
        tp: ProcessGroup | None,
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> LayerParameters:
        """Return the factory of a layer.

        Args:
            config: The configuration of the model.
            index: The index of the layer in the model, from 0.
            tp: See `LayerParameters`.
            placement: See `LayerParameters`.
            sequence_parallel: See `LayerParameters`.
        """
        return LayerParameters(
            config.seed,
            f"layers.{index}",
            config.hidden,
            2 * config.layers,
            tp,
            placement,
            sequence_parallel,
        )

    def make_column_linear(self, name: str, k: int, *, bias: bool = True) -> ColumnParallelLinear:
        """Return a linear layer from (..., hidden) to this rank's shard of (..., k).

        Args:
            name: The name of the weight within the layer.
            k: The number of output features of all ranks together.
            bias: True if the layer has a bias.
        """
        weight = make_normal_init(
            self.seed, f"{self.name}.{name}.weight", k, self.hidden, self.placement
        )
        zeros = torch.zeros(k, **self.placement) if bias else None
        return ColumnParallelLinear(
            weight, zeros, self.tp, sequence_parallel=self.sequence_parallel
        )

    def make_row_linear(self, name: str, n: int, *, bias: bool = True) -> RowParallelLinear:
        """Return a linear layer from this rank's shard of (..., n) to (..., hidden).

        The output is the sum over all ranks.

        Args:
            name: The name of the weight within the layer.
            n: The number of input features of all ranks together.
            bias: True if the layer has a bias.
        """
        name, std = f"{self.name}.{name}.weight", INIT_STD / math.sqrt(self.residual_adds)
        weight = make_normal_init(self.seed, name, self.hidden, n, self.placement, 1, std)
        zeros = torch.zeros(self.hidden, **self.placement) if bias else None
        return RowParallelLinear(weight, zeros, self.tp, sequence_parallel=self.sequence_parallel)

    def make_norm(self) -> nn.LayerNorm:
        """Return a LayerNorm."""
        norm = nn.LayerNorm(self.hidden, **self.placement)
        return mark_sequence_parallel(norm, self.tp, sequence_parallel=self.sequence_parallel)
