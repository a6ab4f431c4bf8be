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
from schedir.models.language_model import IGNORE_INDEX as IGNORE_INDEX
from schedir.models.language_model import (
    EmbeddingAndHead,
    ParameterPlacement,
    find_tied_weight,
    make_normal_init,
)
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_heads, split_layers
from schedir.models.window_config import get_windows
from schedir.runtime.autograd.random_streams import fork_layer_rng
from schedir.tensor_parallel.mappings import (
    mark_sequence_parallel,
    select_local_tokens,
    shard,
    tp_rank,
    tp_size,
)


def build_stage(
    config: GPTConfig,
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

    To make it takes the shard's own memory, and on the CPU one block of a weight (`Drawn`).  Its
    numbers are the same on any device, but rounded to `dtype`.  With `sequence_parallel`
    tensor-parallel ranks share the tokens, too: for a program with `sequence_parallel yes`.
    `layers_per_stage` is the number of layers of each stage (`split_layers`).  Raises UsageError if
    the layers do not fit the stages, or the heads the tensor-parallel ranks.
    """
    counts = split_layers(config.layers, stages, layers_per_stage)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.heads, tp_size(tp))
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
    """Consecutive layers of a GPT, with the embedding if first and the head if last.

    Maps (b, T, hidden) to (b, T, hidden), or with `sequence_parallel` (b, T/t, hidden) to the same,
    of the rank's own tokens. The first stage takes tokens instead, int64 (b, T); the last gives
    this rank's logits, (b, T, ceil(V/t)). Parameters bear the names that they have in the model of
    one stage.
    """

    def __init__(
        self,
        config: GPTConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        tp: ProcessGroup | None,
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence_parallel = config, tp, sequence_parallel
        self.embedding, head = EmbeddingAndHead.for_stage(
            config, is_first, is_last, tp, placement, sequence_parallel=sequence_parallel
        )
        self.positions: nn.Parameter | None = None
        self.norm: nn.LayerNorm | None = None
        if is_first:
            positions = make_normal_init(
                config.seed, "positions", config.context, config.hidden, placement
            )
            self.positions = mark_sequence_parallel(
                shard(positions, 0, None), tp, sequence_parallel=sequence_parallel
            )
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(config, i, tp, placement, sequence_parallel=sequence_parallel)
                for i in layers
            }
        )
        if is_last:
            norm = nn.LayerNorm(config.hidden, **placement)
            self.norm = mark_sequence_parallel(norm, tp, sequence_parallel=sequence_parallel)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has one (`find_tied_weight`)."""
        return find_tied_weight(self.config, self.embedding, self.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        return self.apply_head(x)

    def embed(self, x: Tensor) -> Tensor:
        """The embedding of tokens; what is none, as it is."""
        if self.embedding is not None and self.positions is not None:
            length = x.shape[-1]
            if length > self.config.context:
                raise UsageError(f"{length} tokens do not fit a context of {self.config.context}")
            positions = select_local_tokens(
                self.positions[:length], self.tp, sequence_parallel=self.sequence_parallel
            )
            x = self.embedding(x) + positions
            if self.training and self.config.dropout:
                with fork_layer_rng(0, tp_rank(self.tp) if self.sequence_parallel else None):
                    x = F.dropout(x, self.config.dropout)
        return x

    def apply_head(self, x: Tensor) -> Tensor:
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
        placement: ParameterPlacement,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        hidden, self.head_width = config.hidden, config.hidden // config.heads
        self.layer_number, self.dropout, self.tp_rank = 1 + index, config.dropout, tp_rank(tp)
        # What is drawn for its heads: where it has its own tokens, too, for these it draws apart.
        self.head_stream = self.tp_rank + tp_size(tp) * sequence_parallel
        self.window, self.sequence_parallel = get_windows(config)[index], sequence_parallel
        weights = LayerParameters(
            config.seed,
            f"layers.{index}",
            hidden,
            2 * config.layers,
            tp,
            placement,
            sequence_parallel,
        )
        self.attention_norm = weights.make_norm()
        # Rows in the order (head, q k v, width): a slice of them is whole heads.
        self.qkv = weights.make_column_linear("qkv", 3 * hidden)
        self.proj = weights.make_row_linear("proj", hidden)
        self.mlp_norm = weights.make_norm()
        self.up = weights.make_column_linear("up", 4 * hidden)
        self.down = weights.make_row_linear("down", 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        with self.use_dropout_stream():
            attended = self.proj(self.attend(self.qkv(self.attention_norm(x))))
            x, normed = self.add_attention(attended, x)
            return self.add_feed_forward(self.down(self.activate(self.up.project(normed))), x)

    def use_dropout_stream(self) -> AbstractContextManager[None]:
        """Within this the layer draws: what is dropped of what attention adds comes first."""
        own = self.tp_rank if self.sequence_parallel else None
        return fork_layer_rng(self.layer_number, own) if self.dropout_rate else nullcontext()

    @property
    def dropout_rate(self) -> float:
        """The share of dropout, 0 where it does not train."""
        return self.dropout if self.training else 0.0

    def attend(self, qkv: Tensor) -> Tensor:
        """Attention of this rank's heads: (b, T, 3 * hidden/t) to (b, T, hidden/t)."""
        b, length, _ = qkv.shape
        q, k, v = qkv.view(b, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        with (
            fork_layer_rng(self.layer_number, self.head_stream)
            if self.dropout_rate
            else nullcontext()
        ):
            heads = attention(q, k, v, self.window, self.dropout_rate)  # (b, heads/t, T, width)
        return heads.transpose(1, 2).reshape(b, length, -1)

    def add_attention(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with what attention adds to it, and its norm."""
        norm = self.mlp_norm
        return add_layer_norm(self.apply_dropout(attended), x, norm.weight, norm.bias, norm.eps)

    def activate(self, product: Tensor) -> Tensor:
        """What the feed-forward makes of its first product."""
        assert self.up.bias is not None
        return bias_gelu(product, self.up.bias)

    def add_feed_forward(self, down: Tensor, x: Tensor) -> Tensor:
        """The residual stream with what the feed-forward adds to it."""
        return x + self.apply_dropout(down)

    def apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_rate) if self.dropout_rate else x
