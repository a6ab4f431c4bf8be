"""A Llama-like GPT cut into pipeline stages, each shared by a tensor-parallel group.

The model is that of Touvron et al. (LLaMA, arXiv 2302.13971, section 2.2): RMSNorm before each half
of a layer (Zhang and Sennrich, arXiv 1910.07467), positions as rotations of queries and keys (Su et
al., RoPE, arXiv 2104.09864, eq. 34, in the order of pairs that `transformers` has), a feed-forward
gated by SiLU (Shazeer, SwiGLU, arXiv 2002.05202, eq. 6), no biases; and heads of queries may share
those of keys and values (Ainslie et al., GQA, arXiv 2305.13245).  As in the GPT (`models/gpt.py`)
what a parameter starts as depends on the seed and its name alone.
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
from schedir.models.language_model import EmbeddingAndHead, ParameterPlacement, find_tied_weight
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.llama_config import LlamaConfig as LlamaConfig
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_heads, split_layers
from schedir.models.window_config import get_windows
from schedir.tensor_parallel.mappings import mark_sequence_parallel, tp_size


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
    """Stage `stage` of `stages`, this rank's shard of it, in `dtype` on `device`.

    With `sequence_parallel` tensor-parallel ranks share the tokens, too: for a program that says
    `sequence yes`.  `layers_per_stage` is the number of layers of each stage (`split_layers`).
    Tensor-parallel ranks share out whole groups: a head of keys and values, with its queries.
    Raises UsageError if the layers do not fit the stages, or the groups or the feed-forward width
    the ranks.
    """
    counts = split_layers(config.layers, stages, layers_per_stage)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.kv_groups, tp_size(tp), "heads of keys and values", "kv_heads")
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    where: ParameterPlacement = {"device": device, "dtype": dtype}
    sequence_parallel = sequence_parallel and tp_size(tp) > 1
    return Stage(
        config,
        layers,
        stage == 0,
        stage == stages - 1,
        tp,
        where,
        sequence_parallel=sequence_parallel,
    )


class Stage(nn.Module):
    """Consecutive layers, with the embedding if first and the head if last.

    Maps (b, T, hidden) to (b, T, hidden), or with `sequence_parallel` (b, T/t, hidden) to the same,
    of the rank's own tokens. The first stage takes tokens instead, int64 (b, T); the last gives
    this rank's logits, (b, T, ceil(V/t)). Parameters bear the names that they have in the model of
    one stage.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        tp: ProcessGroup | None,
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.sequence_shards = config, tp_size(tp) if sequence_parallel else 1
        self.embedding, head = EmbeddingAndHead.for_stage(
            config, is_first, is_last, tp, placement, sequence_parallel=sequence_parallel
        )
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, i, tp, placement, sequence_parallel=sequence_parallel)
                for i in layers
            }
        )
        self.norm: nn.RMSNorm | None = None
        if is_last:
            norm = nn.RMSNorm(config.hidden, config.eps, **placement)
            self.norm = mark_sequence_parallel(norm, tp, sequence_parallel=sequence_parallel)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has one (`find_tied_weight`)."""
        return find_tied_weight(self.config, self.embedding, self.head)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] * (1 if self.embedding is not None else self.sequence_shards)
        if length > self.config.context:
            raise UsageError(f"{length} tokens do not fit a context of {self.config.context}")
        if self.embedding is not None:
            x = self.embedding(x)
        turns = compute_rotations(
            length, self.config.hidden // self.config.heads, self.config.theta, x
        )
        for block in self.layers.values():
            x = block(x, turns)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Layer(nn.Module):
    """One layer; tensor-parallel ranks share its groups of heads and its feed-forward width."""

    def __init__(
        self,
        config: LlamaConfig,
        index: int,
        tp: ProcessGroup | None,
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        hidden, width = config.hidden, config.ffn_width
        self.head_width, self.queries_per_group = (
            hidden // config.heads,
            config.heads // config.kv_groups,
        )
        self.window, adds = get_windows(config)[index], 2 * config.layers
        weights = LayerParameters(
            config.seed, f"layers.{index}", hidden, adds, tp, placement, sequence_parallel
        )

        def norm() -> nn.RMSNorm:
            return mark_sequence_parallel(
                nn.RMSNorm(hidden, config.eps, **placement), tp, sequence_parallel=sequence_parallel
            )

        self.attention_norm = norm()
        # Rows in the order (group, its queries k v, width): a slice of them is whole groups.
        self.qkv = weights.make_column_linear(
            "qkv", config.kv_groups * (self.queries_per_group + 2) * self.head_width, bias=False
        )
        self.proj = weights.make_row_linear("proj", hidden, bias=False)
        self.mlp_norm = norm()
        # Rows in the order (unit, gate up): a slice of them is whole units.
        self.gate_up = weights.make_column_linear("gate_up", 2 * width, bias=False)
        self.down = weights.make_row_linear("down", width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.proj(self.attend(self.attention_norm(x), rotary))
        gate, up = self.gate_up(self.mlp_norm(x)).unflatten(-1, (-1, 2)).unbind(-1)
        x = x + self.down(F.silu(gate) * up)
        return x

    def attend(self, x: Tensor, rotary: Tensor) -> Tensor:
        """What `qkv` takes to this rank's heads, (b, T, hidden / t)."""
        qkv = self.qkv(x)
        b, length, _ = qkv.shape
        qkv = qkv.view(b, length, -1, self.queries_per_group + 2, self.head_width)
        q, k, v = qkv.split(
            (self.queries_per_group, 1, 1), 3
        )  # each (b, T, groups/t, heads of it, width)
        q, k, v = (one.flatten(2, 3).transpose(1, 2) for one in (q, k, v))
        q, k = apply_rotations(q, rotary), apply_rotations(k, rotary)
        heads = attention(q, k, v, self.window)
        return heads.transpose(1, 2).reshape(b, length, -1)


def compute_rotations(length: int, width: int, theta: float, like: Tensor) -> Tensor:
    """Cosines and sines of each position's angles, (2, T, width), in the type of `like`.

    The angle of pair i of a head at position p is p / theta^(2i / width) (2104.09864, eq. 15); a
    pair is the numbers i and i + width / 2 of a head.
    """
    pairs = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    at = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(at, 1.0 / theta ** (pairs / width)).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def apply_rotations(x: Tensor, rotary: Tensor) -> Tensor:
    """Heads (b, heads, T, width), their pairs turned by `compute_rotations`."""
    low, high = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-high, low], -1) * rotary[1]
