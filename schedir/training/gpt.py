"""A GPT cut into pipeline stages, each shared by a tensor-parallel group.

The model is GPT-2's (pre-LayerNorm, GELU, learned positions), parallel within a layer as in
Megatron-LM (arXiv 1909.08053). What a parameter starts as depends on the seed and its name
alone: any number of stages and tensor-parallel ranks starts from the same model. What dropout
leaves out depends on the layer, whatever its stage; tensor-parallel ranks leave out the same of
what each holds whole, and each its own of its attention heads, as in Megatron-LM (appendix B.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.kernels.gelu import bias_gelu
from schedir.kernels.layer_norm import add_layer_norm
from schedir.models.language import IGNORE as IGNORE
from schedir.models.language import STD, Ends, Where, drawn, tied_copy
from schedir.models.language import count_tokens as count_tokens
from schedir.models.language import loss as loss
from schedir.models.shape import split_heads, split_layers
from schedir.parallel.drawn import Drawn
from schedir.parallel.group import shard, tp_rank, tp_size
from schedir.parallel.layers import ColumnParallelLinear, RowParallelLinear
from schedir.runtime.random import layer
from schedir.training.attention import attention
from schedir.training.gpt_config import GPTConfig as GPTConfig


def build_stage(
    config: GPTConfig,
    stage: int,
    stages: int,
    *,
    tp: ProcessGroup | None = None,
    division: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Stage:
    """Stage `stage` of `stages`, this rank's shard of it, in `dtype` on `device`.

    To make it takes the shard's own memory, and on the CPU one block of a weight (`Drawn`).  Its
    numbers are the same on any device, but rounded to `dtype`.  `division` is the number of layers
    of each stage (`split_layers`). Raises UsageError if the layers do not fit the stages, or the
    heads the tensor-parallel ranks.
    """
    counts = split_layers(config.layers, stages, division)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.heads, tp_size(tp))
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    where: Where = {"device": device, "dtype": dtype}
    return Stage(config, layers, stage == 0, stage == stages - 1, tp, where)


class Stage(nn.Module):
    """Consecutive layers of a GPT, with the embedding if first and the head if last.

    Maps (b, T, hidden) to (b, T, hidden). The first stage takes tokens instead, int64 (b, T);
    the last gives this rank's logits, (b, T, ceil(V/t)). Parameters bear the names that they
    have in the model of one stage.
    """

    def __init__(
        self,
        config: GPTConfig,
        layers: range,
        first: bool,
        last: bool,
        tp: ProcessGroup | None,
        where: Where,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding, head = Ends.of(config, first, last, tp, where)
        self.positions: nn.Parameter | None = None
        self.norm: nn.LayerNorm | None = None
        if first:
            positions = drawn(config.seed, "positions", config.context, config.hidden, where)
            self.positions = shard(positions, 0, None)
        self.layers = nn.ModuleDict({str(i): Layer(config, i, tp, where) for i in layers})
        if last:
            self.norm = nn.LayerNorm(config.hidden, **where)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has one (`tied_copy`)."""
        return tied_copy(self.config, self.embedding, self.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.layers.values():
            x = block(x)
        return self.end(x)

    def begin(self, x: Tensor) -> Tensor:
        """The embedding of tokens; what is none, as it is."""
        if self.embedding is not None and self.positions is not None:
            length = x.shape[-1]
            if length > self.config.context:
                raise UsageError(f"{length} tokens do not fit a context of {self.config.context}")
            x = self.embedding(x) + self.positions[:length]
            if self.training and self.config.dropout:
                with layer(0):
                    x = F.dropout(x, self.config.dropout)
        return x

    def end(self, x: Tensor) -> Tensor:
        """Logits, if this is the last stage; else x as it is."""
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Layer(nn.Module):
    """One transformer layer; tensor-parallel ranks share its heads and its feed-forward width."""

    def __init__(
        self, config: GPTConfig, index: int, tp: ProcessGroup | None, where: Where
    ) -> None:
        super().__init__()
        hidden, self.head_width = config.hidden, config.hidden // config.heads
        self.number, self.dropout, self.slice = 1 + index, config.dropout, tp_rank(tp)
        self.window = config.windows[index]
        # GPT-2: what adds to the residual stream starts smaller, the more of it there is.
        residual_std = STD / math.sqrt(2 * config.layers)

        def full(name: str, k: int, n: int, dim: int = 0, std: float = STD) -> tuple[Drawn, Tensor]:
            weight = drawn(config.seed, f"layers.{index}.{name}.weight", k, n, where, dim, std)
            return weight, torch.zeros(k, **where)

        self.attention_norm = nn.LayerNorm(hidden, **where)
        # Rows in the order (head, q k v, width): a slice of them is whole heads.
        self.qkv = ColumnParallelLinear(*full("qkv", 3 * hidden, hidden), tp)
        self.proj = RowParallelLinear(*full("proj", hidden, hidden, 1, residual_std), tp)
        self.mlp_norm = nn.LayerNorm(hidden, **where)
        self.up = ColumnParallelLinear(*full("up", 4 * hidden, hidden), tp)
        self.down = RowParallelLinear(*full("down", hidden, 4 * hidden, 1, residual_std), tp)

    def forward(self, x: Tensor) -> Tensor:
        with self.drawing():
            attended = self.proj(self.heads(self.qkv(self.attention_norm(x))))
            x, normed = self.between(attended, x)
            return self.add(self.down(self.widened(self.up.product(normed))), x)

    def drawing(self) -> AbstractContextManager[None]:
        """Within this the layer draws: what is dropped of what attention adds comes first."""
        return layer(self.number) if self.share else nullcontext()

    @property
    def share(self) -> float:
        """The share of dropout, 0 where it does not train."""
        return self.dropout if self.training else 0.0

    def heads(self, qkv: Tensor) -> Tensor:
        """Attention of this rank's heads: (b, T, 3 * hidden/t) to (b, T, hidden/t)."""
        b, length, _ = qkv.shape
        q, k, v = qkv.view(b, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        with layer(self.number, self.slice) if self.share else nullcontext():
            heads = attention(q, k, v, self.window, self.share)  # (b, heads/t, T, width)
        return heads.transpose(1, 2).reshape(b, length, -1)

    def between(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with what attention adds to it, and its norm."""
        norm = self.mlp_norm
        return add_layer_norm(self.dropped(attended), x, norm.weight, norm.bias, norm.eps)

    def widened(self, product: Tensor) -> Tensor:
        """What the feed-forward makes of its first product."""
        assert self.up.bias is not None
        return bias_gelu(product, self.up.bias)

    def add(self, down: Tensor, x: Tensor) -> Tensor:
        """The residual stream with what the feed-forward adds to it."""
        return x + self.dropped(down)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.share) if self.share else x
