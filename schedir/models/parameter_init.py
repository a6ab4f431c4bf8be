"""Factories of the linear layers and norms of a transformer layer, with their initial values."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from schedir.models.gpt_config import GPTConfig
from schedir.models.language_model import (
    INIT_STD,
    ParameterPlacement,
    make_normal_init,
)
from schedir.models.llama_config import LlamaConfig
from schedir.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.tensor_parallel.mappings import mark_sequence_parallel, tp_size
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    shard_vocab,
)

_Replicated = TypeVar("_Replicated", bound=nn.Parameter | nn.Module)


class LayerParameters(NamedTuple):
    """A factory of the linear layers and norms of one transformer layer, or of a stage.

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
        """Return the factory of a layer. For another layer, replace the `name` of the result.

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
            sequence_parallel and tp_size(tp) > 1,
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
        return self.mark_replicated(nn.LayerNorm(self.hidden, **self.placement))

    def mark_replicated(self, replicated: _Replicated) -> _Replicated:
        """Mark parameters that each tensor-parallel rank applies to its own tokens.

        Args:
            replicated: A parameter or a module that all tensor-parallel ranks have.
        """
        return mark_sequence_parallel(replicated, self.tp, sequence_parallel=self.sequence_parallel)

    def make_embedding_and_head(
        self, vocab: int, is_first: bool, is_last: bool, *, is_tied: bool
    ) -> tuple[VocabParallelEmbedding | None, VocabParallelHead | None]:
        """Return the embedding and the head that a stage has, with the shards of this rank.

        If the weight is tied and one stage has embedding and head, both use one Parameter. If the
        embedding and the head are in two stages, each of these stages has a copy of the weight.

        Args:
            vocab: The size of the vocabulary.
            is_first: True if the stage is the first. Only the first stage has the embedding.
            is_last: True if the stage is the last. Only the last stage has the head.
            is_tied: True if the head uses the weight of the embedding.
        """

        def make_weight(name: str) -> nn.Parameter:
            full = make_normal_init(self.seed, name, vocab, self.hidden, self.placement)
            return shard_vocab(full, self.tp)

        embedding = head = embedding_weight = None
        if is_first or (is_last and is_tied):
            embedding_weight = make_weight("embedding.weight")
        if is_first and embedding_weight is not None:
            embedding = VocabParallelEmbedding(
                embedding_weight, self.tp, sequence_parallel=self.sequence_parallel
            )
        if is_last:
            weight = embedding_weight if is_tied else make_weight("head.weight")
            assert weight is not None
            head = VocabParallelHead(
                weight, vocab, self.tp, sequence_parallel=self.sequence_parallel
            )
        return embedding, head
