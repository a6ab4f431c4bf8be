"""A Llama model in pipeline stages, with tensor parallelism within each stage.

The model is the model of Touvron et al. (LLaMA, arXiv 2302.13971, section 2.2):

- RMSNorm before attention and feed-forward network (Zhang and Sennrich, arXiv 1910.07467).
- Rotary positions of queries and keys (Su et al., RoPE, arXiv 2104.09864, eq. 34), with pairs in
  the order of `transformers`.
- A feed-forward network with a SiLU gate (Shazeer, SwiGLU, arXiv 2002.05202, eq. 6).
- No biases.
- Query heads may share a head of keys and values (Ainslie et al., GQA, arXiv 2305.13245).

As in the GPT (`models/gpt.py`), the initial value of a parameter depends only on the seed and its
name. Shapes have the letters of the GPT: b sequences, T tokens, V vocabulary, t tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.models.attention import attention
from schedir.models.language_model import IGNORE_INDEX as IGNORE_INDEX
from schedir.models.language_model import ParameterPlacement, find_tied_weight
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.llama_config import LlamaConfig as LlamaConfig
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import find_stage_layers, split_heads
from schedir.models.window_config import get_windows
from schedir.tensor_parallel.mappings import tp_size


def build_stage(
    config: LlamaConfig,
    stage: int,
    stages: int,
    *,
    tp: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layers_per_stage: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Stage:
    """Build a pipeline stage of a Llama model, with the shard of this tensor-parallel rank.

    Each tensor-parallel rank has complete groups. A group is a head of keys and values with its
    query heads.

    Args:
        config: The configuration of the model.
        stage: The stage to build, from 0.
        stages: The number of stages.
        tp: The tensor-parallel group. None means one rank, without communication.
        sequence_parallel: True if tensor-parallel ranks also divide the tokens. The program must
            have `sequence_parallel yes`.
        layers_per_stage: The number of layers of each stage (`split_layers`). None means that the
            layers are divided evenly.
        device: The device of the parameters.
        dtype: The type of the parameters.

    Raises:
        UsageError: The stage does not exist, the layers do not fit the stages, or the groups or the
            feed-forward width cannot be divided among the tensor-parallel ranks.
    """
    layers = find_stage_layers(config.layers, stage, stages, layers_per_stage)
    split_heads(config.kv_groups, tp_size(tp), "heads of keys and values", "kv_heads")
    placement: ParameterPlacement = {"device": device, "dtype": dtype}
    weights = LayerParameters.from_config(
        config, 0, tp, placement, sequence_parallel=sequence_parallel
    )
    return Stage(config, layers, stage == 0, stage == stages - 1, weights)


class Stage(nn.Module):
    """Consecutive layers of a Llama. The first stage has the embedding, and the last has the head.

    The forward maps (b, T, hidden) to (b, T, hidden). With `sequence_parallel`, the input and the
    output have only the tokens of this rank, (b, T/t, hidden). The first stage takes int64 tokens
    of shape (b, T). The last stage returns the logits of this rank, of shape (b, T, ceil(V/t)).
    Parameters have the names that they have in a model of one stage.

    Args:
        config: The configuration of the model.
        layers: The indices of the stage's layers in the full model, from 0.
        is_first: True if the stage has the embedding.
        is_last: True if the stage has the head.
        weights: The factory of the parameters of all layers.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        weights: LayerParameters,
    ) -> None:
        super().__init__()
        self.config = config
        self.sequence_shards = tp_size(weights.tp) if weights.sequence_parallel else 1
        self.embedding, head = weights.make_embedding_and_head(
            config.vocab, is_first, is_last, is_tied=config.tied
        )
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, i, weights._replace(name=f"layers.{i}")) for i in layers}
        )
        self.norm: nn.RMSNorm | None = None
        if is_last:
            self.norm = _make_norm(config, weights)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of a weight that is tied across stages. See `find_tied_weight`."""
        return find_tied_weight(self.embedding, self.head, is_tied=self.config.tied)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage.

        Args:
            x: The input of the stage.

        Raises:
            UsageError: There are more tokens than the context of the model.
        """
        length = x.shape[1] * (1 if self.embedding is not None else self.sequence_shards)
        if length > self.config.context:
            raise UsageError(f"{length} tokens exceed the context of {self.config.context}")
        if self.embedding is not None:
            x = self.embedding(x)
        rotations = compute_rotations(
            length, self.config.hidden // self.config.heads, self.config.theta, x
        )
        for block in self.layers.values():
            x = block(x, rotations)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Layer(nn.Module):
    """A Llama layer. Tensor-parallel ranks divide its groups of heads and its feed-forward width.

    Args:
        config: The configuration of the model.
        index: The index of the layer in the model, from 0.
        weights: The factory of the layer's parameters.
    """

    def __init__(self, config: LlamaConfig, index: int, weights: LayerParameters) -> None:
        super().__init__()
        hidden, width = config.hidden, config.ffn_width
        self.head_width = hidden // config.heads
        self.queries_per_group = config.heads // config.kv_groups
        self.window = get_windows(config)[index]

        self.attention_norm = _make_norm(config, weights)
        # The rows of `qkv` are ordered by group. A group has the rows of its query heads, its key
        # head and its value head, in this order. So the slice of a tensor-parallel rank has
        # complete groups.
        self.qkv = weights.make_column_linear(
            "qkv", config.kv_groups * (self.queries_per_group + 2) * self.head_width, bias=False
        )
        self.proj = weights.make_row_linear("proj", hidden, bias=False)
        self.mlp_norm = _make_norm(config, weights)
        # The rows of `gate_up` are ordered by hidden unit. A unit has a gate row and an up row. So
        # the slice of a tensor-parallel rank has complete units.
        self.gate_up = weights.make_column_linear("gate_up", 2 * width, bias=False)
        self.down = weights.make_row_linear("down", width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            x: The residual stream before the layer.
            rotary: The rotations, from `compute_rotations`.
        """
        x = x + self.proj(self.attend(self.attention_norm(x), rotary))
        gate, up = self.gate_up(self.mlp_norm(x)).unflatten(-1, (-1, 2)).unbind(-1)
        x = x + self.down(F.silu(gate) * up)
        return x

    def attend(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Return the attention of this rank's heads, of shape (b, T, hidden/t).

        Args:
            x: The normalized residual stream.
            rotary: The rotations, from `compute_rotations`.
        """
        qkv = self.qkv(x)
        b, length, _ = qkv.shape
        qkv = qkv.view(b, length, -1, self.queries_per_group + 2, self.head_width)
        # Each part has the shape (b, T, groups/t, heads per group, width).
        parts = qkv.split((self.queries_per_group, 1, 1), 3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        q = apply_rotations(q, rotary)
        k = apply_rotations(k, rotary)
        heads = attention(q, k, v, self.window)
        return heads.transpose(1, 2).reshape(b, length, -1)


def _make_norm(config: LlamaConfig, weights: LayerParameters) -> nn.RMSNorm:
    norm = nn.RMSNorm(config.hidden, config.eps, **weights.placement)
    return weights.mark_replicated(norm)


def compute_rotations(length: int, width: int, theta: float, like: Tensor) -> Tensor:
    """Return the cosines and sines of the rotary angles, of shape (2, T, width).

    The angle of pair i at position p is p / theta^(2i / width) (2104.09864, eq. 15). Pair i
    consists of the elements i and i + width/2 of a head.

    Args:
        length: Number of tokens of the sequence, T.
        width: Width of a head.
        theta: The base of the angles.
        like: A tensor with the device and the type of the result.
    """
    pairs = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / theta ** (pairs / width)).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def apply_rotations(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the pairs of each head.

    Args:
        x: Heads, of shape (b, heads, T, width).
        rotary: The rotations, from `compute_rotations`.
    """
    low, high = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-high, low], -1) * rotary[1]
