"""Train an encoder-decoder in four stages on 1, 2 or 4 processes.

    python -m examples.encoder_decoder                      # one process has all four stages
    torchrun --nproc-per-node 4 -m examples.encoder_decoder # each of four processes has one stage

Both commands print the loss of each of ten steps, with the same values in all digits. The training
text is this file, so nothing is downloaded.

The model predicts the second half of a text from its first half (prefix language modelling: Raffel
et al., arXiv 1910.10683, section 3.2.3).

The model is that of Vaswani et al. (arXiv 1706.03762), with sines and cosines as positions (section
3.5), and one weight for both embeddings and the head (section 3.4). A LayerNorm precedes each
sublayer instead of following it, as in Pegasus (Zhang et al., arXiv 1912.08777). It has no dropout.

The example shows:

- A boundary of two tensors (`boundaries`). The output of the encoder is the *memory*. Each stage of
  the decoder receives the memory with its other input, and sends it to the next stage. In the
  backwards, each of these stages adds its gradient of the memory.
- Keyword arguments of stages: every stage gets the target tokens and the padding mask of the
  source.
- A weight that three stages share: the first stage, the last stage, and the first stage of the
  decoder (`tied_stages`).
- Tensor parallelism (`tp`) and sequence parallelism (`sequence_parallel`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from examples.training_loop import train
from examples.transformer_blocks import (
    PARAMETER_PLACEMENT,
    CrossAttention,
    FeedForward,
    SelfAttention,
)
from schedir.models.language_model import count_tokens, loss, make_normal_init
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_layers
from schedir.runtime import Boundary
from schedir.tensor_parallel.mappings import mark_sequence_parallel, select_local_tokens, tp_size
from schedir.tensor_parallel.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    shard_vocab,
)

STAGES, MICROBATCHES, MICROBATCH_SIZE, STEPS = 4, 8, 2, 10
THETA = 10000.0  # the base of the wavelengths of positions (section 3.5)


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """The shape of the model.

    The layers of the encoder come first, then those of the decoder. `context` is the length of the
    longest source or target, in tokens. The feed-forward width is 4 * hidden. If `tied` is true,
    both embeddings and the head are one weight. `seed` is the seed of the initial parameters.
    """

    vocab: int = 256
    encoder_layers: int = 2
    decoder_layers: int = 2
    hidden: int = 64
    heads: int = 4
    context: int = 32
    tied: bool = True
    seed: int = 0


def get_stage_layers(
    config: EncoderDecoderConfig, stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """Return the layer numbers of each stage. The layers of the encoder come first."""
    layer_counts = split_layers(
        config.encoder_layers + config.decoder_layers, stages, layers_per_stage
    )
    stops = [sum(layer_counts[: s + 1]) for s in range(stages)]
    return [range(stop - count, stop) for stop, count in zip(stops, layer_counts, strict=True)]


def tied_stages(
    config: EncoderDecoderConfig, stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the stages that share the embedding, for `tied_weights` of `schedir.compile`."""
    if not config.tied:
        return ()
    layers = get_stage_layers(config, stages, layers_per_stage)
    decoder_stage = next(
        s for s, stage_layers in enumerate(layers) if config.encoder_layers in stage_layers
    )
    tied_group = tuple(sorted({0, decoder_stage, stages - 1}))
    return (tied_group,) if len(tied_group) > 1 else ()


def build_stage(
    config: EncoderDecoderConfig,
    stage: int,
    stages: int,
    *,
    tp: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layers_per_stage: Sequence[int] | None = None,
) -> Stage:
    """Return this rank's shard of stage `stage` of `stages`.

    With `sequence_parallel`, tensor-parallel ranks also divide the tokens of both sequences, as a
    program with `sequence_parallel yes` requires. `layers_per_stage` is the number of layers of
    each stage. The layers of the encoder come first. One stage may have the last layers of the
    encoder and the first layers of the decoder.
    """
    layers = get_stage_layers(config, stages, layers_per_stage)
    sequence_parallel = sequence_parallel and tp_size(tp) > 1
    return Stage(
        config,
        layers[stage],
        stage == 0,
        stage == stages - 1,
        tp,
        sequence_parallel=sequence_parallel,
    )


def boundaries(
    config: EncoderDecoderConfig,
    stages: int,
    batch: int,
    source: int,
    target: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> dict[int, tuple[Boundary, ...]]:
    """Return the output shapes of all stages but the last, for the `boundary` of an `Executor`.

    `source` and `target` are the numbers of tokens of a sample. With sequence parallelism, they are
    the numbers of tokens of one rank.
    """
    memory, hidden = (Boundary((batch, tokens, config.hidden)) for tokens in (source, target))
    stops = [
        stage_layers.stop
        for stage_layers in get_stage_layers(config, stages, layers_per_stage)[:-1]
    ]
    return {
        s: (memory,) if stop <= config.encoder_layers else (hidden, memory)
        for s, stop in enumerate(stops)
    }


class Stage(nn.Module):
    """Consecutive layers. The first stage embeds the source, and the last has the head.

    The first stage takes the tokens of the source, int64 (b, S). The output of an encoder stage is
    (b, S, hidden). The outputs of a decoder stage are (b, T, hidden) and the memory, (b, S,
    hidden). The last stage returns the logits of this rank, (b, T, ceil(V/t)). With
    `sequence_parallel`, the tensors between stages have only the tokens of this rank: (b, S/t,
    hidden) and (b, T/t, hidden).

    All stages get two keyword arguments. `target`, int64 (b, T), has the target tokens. The stage
    with the first layer of the decoder embeds them. `mask`, bool (b, S), is false for padding
    tokens of the source. By default, no token is padding.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, encoder_layers = config, config.encoder_layers
        self.tp, self.sequence_parallel = tp, sequence_parallel
        parallel_options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        has_table = {
            "embedding": is_first,
            "decoder_embedding": encoder_layers in layers,
            "head": is_last,
        }
        weights = _make_vocab_weights(
            [name for name, on_stage in has_table.items() if on_stage], config, tp
        )
        self.embedding = self.decoder_embedding = self.head = None
        if is_first:
            self.embedding = VocabParallelEmbedding(weights["embedding"], tp, **parallel_options)
        if encoder_layers in layers:
            decoder_weight = weights["decoder_embedding"]
            self.decoder_embedding = VocabParallelEmbedding(decoder_weight, tp, **parallel_options)
        self.encoder = nn.ModuleDict(
            {
                str(i): EncoderLayer(config, i, tp, **parallel_options)
                for i in layers
                if i < encoder_layers
            }
        )
        self.decoder = nn.ModuleDict(
            {
                str(i): DecoderLayer(config, i, tp, **parallel_options)
                for i in layers
                if i >= encoder_layers
            }
        )
        self.encoder_norm = self.norm = None
        if encoder_layers - 1 in layers:
            self.encoder_norm = mark_sequence_parallel(
                nn.LayerNorm(config.hidden, **PARAMETER_PLACEMENT), tp, **parallel_options
            )
        if is_last:
            self.norm = mark_sequence_parallel(
                nn.LayerNorm(config.hidden, **PARAMETER_PLACEMENT), tp, **parallel_options
            )
            self.head = VocabParallelHead(weights["head"], config.vocab, tp, **parallel_options)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has a copy; else None.

        The gradients of the copies are summed.
        """
        tables = [table for table in (self.embedding, self.decoder_embedding, self.head) if table]
        return tables[0].weight if self.config.tied and 0 < len(tables) < 3 else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        target: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        token_shards = tp_size(self.tp) if self.sequence_parallel and self.embedding is None else 1
        if max(length := x.shape[1] * token_shards, target.shape[1]) > self.config.context:
            raise ValueError(
                f"{length} and {target.shape[1]} tokens do not fit a context of "
                f"{self.config.context}"
            )
        if self.embedding is not None:
            x = self._add_positions(self.embedding(x), x.shape[1])
        for block in self.encoder.values():
            x = block(x, mask)
        if self.encoder_norm is not None:
            x = self.encoder_norm(x)
        if self.decoder_embedding is not None:
            x, memory = self._add_positions(self.decoder_embedding(target), target.shape[1]), x
        for block in self.decoder.values():
            x = block(x, memory, mask)
        if self.norm is not None and self.head is not None:
            logits: Tensor = self.head(self.norm(x))
            return logits
        return x if memory is None else (x, memory)

    def _add_positions(self, x: Tensor, length: int) -> Tensor:
        """Return `x` times the square root of the hidden size, plus the encodings of positions.

        `x` has the embeddings of tokens. With `sequence_parallel`, it has only those of this rank.
        """
        positions = select_local_tokens(
            waves(length, x), self.tp, sequence_parallel=self.sequence_parallel
        )
        return x * math.sqrt(x.shape[-1]) + positions


class EncoderLayer(nn.Module):
    """Self-attention of the source and a feed-forward, (b, S, hidden)."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        index: int,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        residual_adds = 2 * config.encoder_layers
        name = f"encoder.{index}"
        weights = LayerParameters(
            config.seed,
            name,
            config.hidden,
            residual_adds,
            tp,
            PARAMETER_PLACEMENT,
            sequence_parallel,
        )
        self.attention = SelfAttention(weights, config.heads, causal=False)
        self.feed_forward = FeedForward(weights)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.feed_forward(self.attention(x, mask))
        return x


class DecoderLayer(nn.Module):
    """Causal self-attention of the target, attention to the memory, and a feed-forward."""

    def __init__(
        self,
        config: EncoderDecoderConfig,
        index: int,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        residual_adds = 3 * config.decoder_layers
        name = f"decoder.{index}"
        weights = LayerParameters(
            config.seed,
            name,
            config.hidden,
            residual_adds,
            tp,
            PARAMETER_PLACEMENT,
            sequence_parallel,
        )
        self.attention = SelfAttention(weights, config.heads, causal=True)
        cross_weights = weights._replace(name=f"decoder.{index}.across")
        self.across = CrossAttention(cross_weights, config.heads)
        self.feed_forward = FeedForward(weights)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        x = self.feed_forward(self.across(self.attention(x), memory, mask))
        return x


def _make_vocab_weights(
    names: Sequence[str], config: EncoderDecoderConfig, tp: ProcessGroup | None
) -> dict[str, nn.Parameter]:
    """Return the weights of a stage's embeddings and head, by name. Tied ones are one Parameter."""

    def make_weight(name: str) -> nn.Parameter:
        key = f"{name}.weight"
        return shard_vocab(
            make_normal_init(config.seed, key, config.vocab, config.hidden, PARAMETER_PLACEMENT), tp
        )

    if config.tied:
        return dict.fromkeys(names, make_weight("embedding")) if names else {}
    return {name: make_weight(name) for name in names}


def waves(length: int, like: Tensor) -> Tensor:
    """Return the encodings of positions, (T, hidden), with the dtype of `like`.

    A row has all sines first, then all cosines. At position p, the angle of sine i and cosine i is
    p / THETA^(2i / hidden) (1706.03762, section 3.5).
    """
    hidden = like.shape[-1]
    dimensions = torch.arange(0, hidden, 2, device=like.device, dtype=torch.float32)
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / THETA ** (dimensions / hidden))
    return torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)


def batch(
    config: EncoderDecoderConfig, text: bytes, step: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Return the sources and targets of a step, and the keyword arguments of each microbatch.

    Sources and targets have shape (microbatches, b, T). All results depend only on the number of
    the step, so each process can compute them.
    """
    generator = torch.Generator().manual_seed(step)
    length = config.context
    shape = (MICROBATCHES, MICROBATCH_SIZE, 1)
    starts = torch.randint(len(text) - 2 * length, shape, generator=generator)
    tokens = torch.tensor([*text])[starts + torch.arange(2 * length + 1)]
    source, target = tokens[..., :length], tokens[..., length:]
    return (
        source,
        target[..., 1:],
        [{"target": decoder_tokens[:, :-1]} for decoder_tokens in target],
    )


def main() -> None:
    """Train for ten steps as one of the ranks that torchrun started."""
    config, text = EncoderDecoderConfig(), Path(__file__).read_bytes()
    train(
        partial(build_stage, config), partial(batch, config, text), loss, count_tokens,
        boundaries(config, STAGES, MICROBATCH_SIZE, config.context, config.context),
        tied_stages(config, STAGES),
        stages=STAGES, microbatches=MICROBATCHES, steps=STEPS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
