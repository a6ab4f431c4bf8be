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
from schedir.models.language_model import IGNORE as IGNORE
from schedir.models.language_model import EmbeddingAndHead, ParameterPlacement, tied_copy
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.llama_config import LlamaConfig as LlamaConfig
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_heads, split_layers
from schedir.models.window_config import windows_of
from schedir.tensor_parallel.mappings import seen_in_parts, tp_size


def build_stage(
    config: LlamaConfig,
    stage: int,
    stages: int,
    *,
    tp: ProcessGroup | None = None,
    sequence: bool = False,
    division: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Stage:
    """Stage `stage` of `stages`, this rank's shard of it, in `dtype` on `device`.

    With `sequence` tensor-parallel ranks share the tokens, too: for a program that says `sequence
    yes`.  `division` is the number of layers of each stage (`split_layers`).  Tensor-parallel ranks
    share out whole groups: a head of keys and values, with its queries.  Raises UsageError if the
    layers do not fit the stages, or the groups or the feed-forward width the ranks.
    """
    counts = split_layers(config.layers, stages, division)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.groups, tp_size(tp), "heads of keys and values", "kv_heads")
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    where: ParameterPlacement = {"device": device, "dtype": dtype}
    sequence = sequence and tp_size(tp) > 1
    return Stage(config, layers, stage == 0, stage == stages - 1, tp, where, sequence=sequence)


class Stage(nn.Module):
    """Consecutive layers, with the embedding if first and the head if last.

    Maps (b, T, hidden) to (b, T, hidden), or with `sequence` (b, T/t, hidden) to the same, of the
    rank's own tokens. The first stage takes tokens instead, int64 (b, T); the last gives this
    rank's logits, (b, T, ceil(V/t)). Parameters bear the names that they have in the model of one
    stage.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: range,
        first: bool,
        last: bool,
        tp: ProcessGroup | None,
        where: ParameterPlacement,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.share = config, tp_size(tp) if sequence else 1
        self.embedding, head = EmbeddingAndHead.of(
            config, first, last, tp, where, sequence=sequence
        )
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, i, tp, where, sequence=sequence) for i in layers}
        )
        self.norm: nn.RMSNorm | None = None
        if last:
            norm = nn.RMSNorm(config.hidden, config.eps, **where)
            self.norm = seen_in_parts(norm, tp, sequence=sequence)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has one (`tied_copy`)."""
        return tied_copy(self.config, self.embedding, self.head)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] * (1 if self.embedding is not None else self.share)
        if length > self.config.context:
            raise UsageError(f"{length} tokens do not fit a context of {self.config.context}")
        if self.embedding is not None:
            x = self.embedding(x)
        turns = rotations(length, self.config.hidden // self.config.heads, self.config.theta, x)
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
        where: ParameterPlacement,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        hidden, width = config.hidden, config.width
        self.head_width, self.queries = hidden // config.heads, config.heads // config.groups
        self.window, adds = windows_of(config)[index], 2 * config.layers
        weights = LayerParameters(config.seed, f"layers.{index}", hidden, adds, tp, where, sequence)

        def norm() -> nn.RMSNorm:
            return seen_in_parts(nn.RMSNorm(hidden, config.eps, **where), tp, sequence=sequence)

        self.attention_norm = norm()
        # Rows in the order (group, its queries k v, width): a slice of them is whole groups.
        self.qkv = weights.column(
            "qkv", config.groups * (self.queries + 2) * self.head_width, bias=False
        )
        self.proj = weights.row("proj", hidden, bias=False)
        self.mlp_norm = norm()
        # Rows in the order (unit, gate up): a slice of them is whole units.
        self.gate_up = weights.column("gate_up", 2 * width, bias=False)
        self.down = weights.row("down", width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.proj(self.attend(self.attention_norm(x), turns))
        gate, up = self.gate_up(self.mlp_norm(x)).unflatten(-1, (-1, 2)).unbind(-1)
        x = x + self.down(F.silu(gate) * up)
        return x

    def attend(self, x: Tensor, turns: Tensor) -> Tensor:
        """What `qkv` takes to this rank's heads, (b, T, hidden / t)."""
        qkv = self.qkv(x)
        b, length, _ = qkv.shape
        qkv = qkv.view(b, length, -1, self.queries + 2, self.head_width)
        q, k, v = qkv.split((self.queries, 1, 1), 3)  # each (b, T, groups/t, heads of it, width)
        q, k, v = (one.flatten(2, 3).transpose(1, 2) for one in (q, k, v))
        q, k = rotated(q, turns), rotated(k, turns)
        heads = attention(q, k, v, self.window)
        return heads.transpose(1, 2).reshape(b, length, -1)


def rotations(length: int, width: int, theta: float, like: Tensor) -> Tensor:
    """Cosines and sines of each position's angles, (2, T, width), in the type of `like`.

    The angle of pair i of a head at position p is p / theta^(2i / width) (2104.09864, eq. 15); a
    pair is the numbers i and i + width / 2 of a head.
    """
    pairs = torch.arange(0, width, 2, device=like.device, dtype=torch.float32)
    at = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(at, 1.0 / theta ** (pairs / width)).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Heads (b, heads, T, width), their pairs turned by `rotations`."""
    low, high = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-high, low], -1) * turns[1]
