"""A GPT in pipeline stages, with tensor parallelism within each stage.

The model is GPT-2 (pre-LayerNorm, GELU, learned positions). Tensor parallelism is the same as in
Megatron-LM (arXiv 1909.08053). The initial value of a parameter depends only on the seed and its
name, so any number of stages and tensor-parallel ranks starts with the same model.

Dropout masks depend on the layer but not on its stage. Tensor-parallel ranks use the same mask for
tensors that all of them have. They use different masks for different attention heads, as in
Megatron-LM (appendix B.2), and for different tokens with sequence parallelism (arXiv 2205.05198,
section 4.2.2).

In shapes, b is the number of sequences of a microbatch, T the number of tokens of a sequence, V the
size of the vocabulary, and t the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    ParameterPlacement,
    find_tied_weight,
    make_normal_init,
)
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.language_model import loss as loss
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import find_stage_layers, split_heads
from schedir.models.window_config import get_windows
from schedir.runtime.autograd.random_streams import fork_layer_rng
from schedir.tensor_parallel.mappings import (
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
    """Build a pipeline stage of a GPT, with the shard of this tensor-parallel rank.

    Initialization needs the memory of the shard, and CPU memory for one block of a weight
    (`SlicedInit`). The values are the same on all devices, up to rounding to `dtype`.

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
        UsageError: The stage does not exist, the layers do not fit the stages, or the heads cannot
            be divided among the tensor-parallel ranks.
    """
    layers = find_stage_layers(config.layers, stage, stages, layers_per_stage)
    split_heads(config.heads, tp_size(tp))
    placement: ParameterPlacement = {"device": device, "dtype": dtype}
    weights = LayerParameters.from_config(
        config, 0, tp, placement, sequence_parallel=sequence_parallel
    )
    return Stage(config, layers, stage == 0, stage == stages - 1, weights)


class Stage(nn.Module):
    """Consecutive layers of a GPT. The first stage has the embedding, and the last has the head.

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
        make_layer: Builds a layer from the arguments of `Layer`. The default is `Layer`.
    """

    def __init__(
        self,
        config: GPTConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        weights: LayerParameters,
        make_layer: Callable[[GPTConfig, int, LayerParameters], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        make_layer = make_layer or Layer
        self.config = config
        self.tp = weights.tp
        self.sequence_parallel = weights.sequence_parallel
        self.embedding, head = weights.make_embedding_and_head(
            config.vocab, is_first, is_last, is_tied=config.tied
        )
        self.positions: nn.Parameter | None = None
        self.norm: nn.LayerNorm | None = None
        if is_first:
            positions = make_normal_init(
                config.seed, "positions", config.context, config.hidden, weights.placement
            )
            self.positions = weights.mark_replicated(shard(positions, 0, None))
        self.layers = nn.ModuleDict(
            {str(i): make_layer(config, i, weights._replace(name=f"layers.{i}")) for i in layers}
        )
        if is_last:
            self.norm = weights.make_norm()
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of a weight that is tied across stages. See `find_tied_weight`."""
        return find_tied_weight(self.embedding, self.head, is_tied=self.config.tied)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage.

        Args:
            x: The input of the stage.
        """
        x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        return self.apply_head(x)

    def embed(self, x: Tensor) -> Tensor:
        """Return the embedding of tokens if this is the first stage, and `x` otherwise.

        Args:
            x: Tokens, int64 of shape (b, T), or the input of a later stage.

        Raises:
            UsageError: There are more tokens than the context of the model.
        """
        if self.embedding is not None and self.positions is not None:
            length = x.shape[-1]
            if length > self.config.context:
                raise UsageError(f"{length} tokens exceed the context of {self.config.context}")
            positions = select_local_tokens(
                self.positions[:length], self.tp, sequence_parallel=self.sequence_parallel
            )
            x = self.embedding(x) + positions
            if self.training and self.config.dropout:
                with fork_layer_rng(0, tp_rank(self.tp) if self.sequence_parallel else None):
                    x = F.dropout(x, self.config.dropout)
        return x

    def apply_head(self, x: Tensor) -> Tensor:
        """Return the logits if this is the last stage, and `x` otherwise.

        Args:
            x: The output of the last layer.
        """
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class AttentionLayer(nn.Module):
    """The attention of a transformer layer, with the norms before and after the attention.

    Args:
        config: The configuration of the model.
        index: The index of the layer in the model, from 0.
        weights: The factory of the layer's parameters.
    """

    def __init__(self, config: GPTConfig, index: int, weights: LayerParameters) -> None:
        super().__init__()
        hidden, self.head_width = config.hidden, config.hidden // config.heads
        tp, sequence_parallel = weights.tp, weights.sequence_parallel
        self.layer_number = 1 + index
        self.dropout = config.dropout
        self.tp_rank = tp_rank(tp)
        # The random stream of this rank's heads. With sequence parallelism, the rank's tokens use
        # the stream `tp_rank`, so its heads use another stream.
        self.head_stream = self.tp_rank + tp_size(tp) * sequence_parallel
        self.window = get_windows(config)[index]
        self.sequence_parallel = sequence_parallel
        self.attention_norm = weights.make_norm()
        # The rows of `qkv` are ordered by head. A head has the rows of its query, its key and its
        # value, in this order. So the slice of a tensor-parallel rank has complete heads.
        self.qkv = weights.make_column_linear("qkv", 3 * hidden)
        self.proj = weights.make_row_linear("proj", hidden)
        self.mlp_norm = weights.make_norm()

    def run_attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the attention and add its output to the residual stream.

        Args:
            x: The residual stream before the layer.

        Returns:
            The new residual stream, and its LayerNorm.
        """
        attended = self.proj(self.attend(self.qkv(self.attention_norm(x))))
        return self.add_attention(attended, x)

    def use_dropout_stream(self) -> AbstractContextManager[None]:
        """Return a context in which dropout draws from the layer's random stream.

        This stream is for the two dropouts outside of the attention heads. The dropout after the
        attention must come before the dropout after the feed-forward network, because both draw
        from the same stream.
        """
        stream = self.tp_rank if self.sequence_parallel else None
        return fork_layer_rng(self.layer_number, stream) if self.dropout_rate else nullcontext()

    @property
    def dropout_rate(self) -> float:
        """The dropout probability, which is 0 in evaluation mode."""
        return self.dropout if self.training else 0.0

    def attend(self, qkv: Tensor) -> Tensor:
        """Return the attention of this rank's heads.

        Args:
            qkv: Queries, keys and values, of shape (b, T, 3 * hidden/t).

        Returns:
            A tensor of shape (b, T, hidden/t).
        """
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
        """Add the attention output to the residual stream, and normalize the sum.

        Args:
            attended: The attention output after its projection.
            x: The residual stream.

        Returns:
            The new residual stream, and its LayerNorm.
        """
        norm = self.mlp_norm
        return add_layer_norm(self.apply_dropout(attended), x, norm.weight, norm.bias, norm.eps)

    def add_feed_forward(self, down: Tensor, x: Tensor) -> Tensor:
        """Add the feed-forward output to the residual stream.

        Args:
            down: The output of the linear layer `down`, with its bias.
            x: The residual stream.
        """
        return x + self.apply_dropout(down)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Apply dropout in training mode, with the current random stream.

        Args:
            x: The tensor.
        """
        return F.dropout(x, self.dropout_rate) if self.dropout_rate else x


class Layer(AttentionLayer):
    """A transformer layer. Tensor-parallel ranks divide its heads and its feed-forward width.

    Args:
        config: See `AttentionLayer`.
        index: See `AttentionLayer`.
        weights: See `AttentionLayer`.
    """

    def __init__(self, config: GPTConfig, index: int, weights: LayerParameters) -> None:
        super().__init__(config, index, weights)
        self.up = weights.make_column_linear("up", 4 * config.hidden)
        self.down = weights.make_row_linear("down", 4 * config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            x: The residual stream before the layer.
        """
        with self.use_dropout_stream():
            x, normed = self.run_attention(x)
            return self.add_feed_forward(self.down(self.activate(self.up.project(normed))), x)

    def activate(self, product: Tensor) -> Tensor:
        """Add the bias of the linear layer `up`, and apply GELU.

        Args:
            product: The output of `up` without its bias.
        """
        assert self.up.bias is not None
        return bias_gelu(product, self.up.bias)
