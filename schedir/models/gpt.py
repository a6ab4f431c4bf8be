"""A GPT cut into pipeline stages, each shared by a tensor-parallel group.

The model is GPT-2's (pre-LayerNorm, GELU, learned positions), parallel within a layer as in
Megatron-LM (arXiv 1909.08053). What a parameter starts as depends on the seed and its name
alone: any number of stages and tensor-parallel ranks starts from the same model. What dropout
leaves out depends on the layer, whatever its stage; tensor-parallel ranks leave out the same of
what each holds whole, and each its own of its attention heads, as in Megatron-LM (appendix B.2),
and of its tokens, where they share the sequence (arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.kernels.gelu import bias_gelu
from schedir.kernels.layer_norm import add_layer_norm
from schedir.models.attention import attention
from schedir.models.gpt_config import GPTConfig as GPTConfig
from schedir.models.language_model import IGNORE as IGNORE
from schedir.models.language_model import EmbeddingAndHead, ParameterPlacement, drawn, tied_copy
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_heads, split_layers
from schedir.models.window_config import windows_of
from schedir.runtime.autograd.random_streams import layer
from schedir.tensor_parallel.mappings import own_tokens, seen_in_parts, shard, tp_rank, tp_size


def build_stage(
    config: GPTConfig,
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

    To make it takes the shard's own memory, and on the CPU one block of a weight (`Drawn`).  Its
    numbers are the same on any device, but rounded to `dtype`.  With `sequence` tensor-parallel
    ranks share the tokens, too: for a program with `sequence_parallel yes`.  `division` is the
    number of layers of each stage (`split_layers`).  Raises UsageError if the layers do not fit the
    stages, or the heads the tensor-parallel ranks.
    """
    counts = split_layers(config.layers, stages, division)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.heads, tp_size(tp))
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    where: ParameterPlacement = {"device": device, "dtype": dtype}
    sequence = sequence and tp_size(tp) > 1
    return Stage(config, layers, stage == 0, stage == stages - 1, tp, where, sequence=sequence)


class Stage(nn.Module):
    """Consecutive layers of a GPT, with the embedding if first and the head if last.

    Maps (b, T, hidden) to (b, T, hidden), or with `sequence` (b, T/t, hidden) to the same, of the
    rank's own tokens. The first stage takes tokens instead, int64 (b, T);
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
        where: ParameterPlacement,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence = config, tp, sequence
        self.embedding, head = EmbeddingAndHead.of(
            config, first, last, tp, where, sequence=sequence
        )
        self.positions: nn.Parameter | None = None
        self.norm: nn.LayerNorm | None = None
        if first:
            positions = drawn(config.seed, "positions", config.context, config.hidden, where)
            self.positions = seen_in_parts(shard(positions, 0, None), tp, sequence=sequence)
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, i, tp, where, sequence=sequence) for i in layers}
        )
        if last:
            norm = nn.LayerNorm(config.hidden, **where)
            self.norm = seen_in_parts(norm, tp, sequence=sequence)
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
            positions = own_tokens(self.positions[:length], self.tp, sequence=self.sequence)
            x = self.embedding(x) + positions
            if self.training and self.config.dropout:
                with layer(0, tp_rank(self.tp) if self.sequence else None):
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
        self,
        config: GPTConfig,
        index: int,
        tp: ProcessGroup | None,
        where: ParameterPlacement,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        hidden, self.head_width = config.hidden, config.hidden // config.heads
        self.number, self.dropout, self.slice = 1 + index, config.dropout, tp_rank(tp)
        # What is drawn for its heads: where it has its own tokens, too, for these it draws apart.
        self.own_heads = self.slice + tp_size(tp) * sequence
        self.window, self.sequence = windows_of(config)[index], sequence
        weights = LayerParameters(
            config.seed, f"layers.{index}", hidden, 2 * config.layers, tp, where, sequence
        )
        self.attention_norm = weights.norm()
        # Rows in the order (head, q k v, width): a slice of them is whole heads.
        self.qkv = weights.column("qkv", 3 * hidden)
        self.proj = weights.row("proj", hidden)
        self.mlp_norm = weights.norm()
        self.up = weights.column("up", 4 * hidden)
        self.down = weights.row("down", 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        with self.drawing():
            attended = self.proj(self.heads(self.qkv(self.attention_norm(x))))
            x, normed = self.between(attended, x)
            return self.add(self.down(self.widened(self.up.product(normed))), x)

    def drawing(self) -> AbstractContextManager[None]:
        """Within this the layer draws: what is dropped of what attention adds comes first."""
        own = self.slice if self.sequence else None
        return layer(self.number, own) if self.share else nullcontext()

    @property
    def share(self) -> float:
        """The share of dropout, 0 where it does not train."""
        return self.dropout if self.training else 0.0

    def heads(self, qkv: Tensor) -> Tensor:
        """Attention of this rank's heads: (b, T, 3 * hidden/t) to (b, T, hidden/t)."""
        b, length, _ = qkv.shape
        q, k, v = qkv.view(b, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        with layer(self.number, self.own_heads) if self.share else nullcontext():
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
