"""Train an encoder-decoder in four stages on 1, 2 or 4 processes.

    python -m examples.encoder_decoder                      # one process has all four stages
    torchrun --nproc-per-node 4 -m examples.encoder_decoder # each of four processes has one stage

Both commands print the same losses to the last digit. The training text is this file, so nothing is
downloaded. The model predicts the second half of a text from its first half (prefix language
modelling: Raffel et al., arXiv 1910.10683, section 3.2.3).

The model is that of Vaswani et al. (arXiv 1706.03762), with sines and cosines as positions (section
3.5), and one weight for both embeddings and the head (section 3.4).  A norm precedes each sublayer
instead of following it, as in Pegasus (Zhang et al., arXiv 1912.08777).  It has no dropout.

The example shows:

- A boundary of two tensors (`boundaries`). The output of the encoder is the *memory*. Each stage of
  the decoder takes the memory with its other input, and passes it on. On the way back, each of
  these stages adds its gradient of the memory.
- Inputs by name: every stage gets the target tokens and the padding mask of the source.
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
from examples.transformer_blocks import WHERE, CrossAttention, FeedForward, SelfAttention
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

STAGES, MICROBATCHES, SIZE, STEPS = 4, 8, 2, 10
THETA = 10000.0  # of the longest wave of positions


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


def layers_of(
    config: EncoderDecoderConfig, stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """Return the numbers of the layers of each stage; layers of the encoder come first."""
    counts = split_layers(config.encoder_layers + config.decoder_layers, stages, layers_per_stage)
    ends = [sum(counts[: s + 1]) for s in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def tied_stages(
    config: EncoderDecoderConfig, stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the stages that share the embedding, as `tied_weights` of `compile` takes them."""
    if not config.tied:
        return ()
    layers = layers_of(config, stages, layers_per_stage)
    middle = next(s for s, own in enumerate(layers) if config.encoder_layers in own)
    found = tuple(sorted({0, middle, stages - 1}))
    return (found,) if len(found) > 1 else ()


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

    With `sequence_parallel`, tensor-parallel ranks share the tokens of both sequences, too, as a
    program with `sequence_parallel yes` requires. `layers_per_stage` is the number of layers of
    each stage; layers of the encoder come first. A stage may have the last layers of the encoder
    and the first layers of the decoder.
    """
    layers = layers_of(config, stages, layers_per_stage)
    ends = stage == 0, stage == stages - 1
    return Stage(
        config, layers[stage], *ends, tp, sequence_parallel=sequence_parallel and tp_size(tp) > 1
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
    """Return the outputs of all stages but the last, as `boundary` of an Executor takes them.

    `source` and `target` are the numbers of tokens. If ranks share the tokens, they are those of
    one rank.
    """
    memory, hidden = (Boundary((batch, n, config.hidden)) for n in (source, target))
    ends = [own.stop for own in layers_of(config, stages, layers_per_stage)[:-1]]
    return {
        s: (memory,) if end <= config.encoder_layers else (hidden, memory)
        for s, end in enumerate(ends)
    }


class Stage(nn.Module):
    """Consecutive layers. The first stage has the embedding of the source, the last has the head.

    The first stage takes the tokens of the source, int64 (b, S). The output of an encoder stage is
    (b, S, hidden). The outputs of a decoder stage are (b, T, hidden) and the memory, (b, S,
    hidden). The last stage returns the logits of this rank, (b, T, ceil(V/t)). With
    `sequence_parallel`, the tensors between stages are those of the tokens of this rank: (b, S/t,
    hidden) and (b, T/t, hidden).

    All stages get two keyword arguments. `target`, int64 (b, T), are the target tokens; the stage
    with the first layer of the decoder embeds them. `mask`, bool (b, S), is true for tokens of the
    source that are no padding; by default, no token is padding.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        layers: range,
        first: bool,
        last: bool,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, begin = config, config.encoder_layers
        self.tp, self.sequence_parallel = tp, sequence_parallel
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        ends = {"embedding": first, "decoder_embedding": begin in layers, "head": last}
        weights = _ends([name for name, here in ends.items() if here], config, tp)
        self.embedding = self.decoder_embedding = self.head = None
        if first:
            self.embedding = VocabParallelEmbedding(weights["embedding"], tp, **how)
        if begin in layers:
            own = weights["decoder_embedding"]
            self.decoder_embedding = VocabParallelEmbedding(own, tp, **how)
        self.encoder = nn.ModuleDict(
            {str(i): EncoderLayer(config, i, tp, **how) for i in layers if i < begin}
        )
        self.decoder = nn.ModuleDict(
            {str(i): DecoderLayer(config, i, tp, **how) for i in layers if i >= begin}
        )
        self.encoder_norm = self.norm = None
        if begin - 1 in layers:
            self.encoder_norm = mark_sequence_parallel(
                nn.LayerNorm(config.hidden, **WHERE), tp, **how
            )
        if last:
            self.norm = mark_sequence_parallel(nn.LayerNorm(config.hidden, **WHERE), tp, **how)
            self.head = VocabParallelHead(weights["head"], config.vocab, tp, **how)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has a copy; else None.

        The gradients of the copies are summed.
        """
        ends = [end for end in (self.embedding, self.decoder_embedding, self.head) if end]
        return ends[0].weight if self.config.tied and 0 < len(ends) < 3 else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        target: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        parts = tp_size(self.tp) if self.sequence_parallel and self.embedding is None else 1
        if max(length := x.shape[1] * parts, target.shape[1]) > self.config.context:
            raise ValueError(
                f"{length} and {target.shape[1]} tokens do not fit a context of "
                f"{self.config.context}"
            )
        if self.embedding is not None:
            x = self._placed(self.embedding(x), x.shape[1])
        for block in self.encoder.values():
            x = block(x, mask)
        if self.encoder_norm is not None:
            x = self.encoder_norm(x)
        if self.decoder_embedding is not None:
            x, memory = self._placed(self.decoder_embedding(target), target.shape[1]), x
        for block in self.decoder.values():
            x = block(x, memory, mask)
        if self.norm is not None and self.head is not None:
            logits: Tensor = self.head(self.norm(x))
            return logits
        return x if memory is None else (x, memory)

    def _placed(self, x: Tensor, length: int) -> Tensor:
        """Return the embeddings of tokens, times the root of the width, plus their positions.

        With `sequence_parallel`, these are the tokens of this rank.
        """
        where = select_local_tokens(
            waves(length, x), self.tp, sequence_parallel=self.sequence_parallel
        )
        return x * math.sqrt(x.shape[-1]) + where


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
        adds = 2 * config.encoder_layers
        name = f"encoder.{index}"
        weights = LayerParameters(
            config.seed, name, config.hidden, adds, tp, WHERE, sequence_parallel
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
        adds = 3 * config.decoder_layers
        name = f"decoder.{index}"
        weights = LayerParameters(
            config.seed, name, config.hidden, adds, tp, WHERE, sequence_parallel
        )
        self.attention = SelfAttention(weights, config.heads, causal=True)
        across = weights._replace(name=f"decoder.{index}.across")
        self.across = CrossAttention(across, config.heads)
        self.feed_forward = FeedForward(weights)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        x = self.feed_forward(self.across(self.attention(x), memory, mask))
        return x


def _ends(
    names: Sequence[str], config: EncoderDecoderConfig, tp: ProcessGroup | None
) -> dict[str, nn.Parameter]:
    """Return the embeddings and the head that a stage has. Tied weights share one Parameter."""

    def made(name: str) -> nn.Parameter:
        key = f"{name}.weight"
        return shard_vocab(
            make_normal_init(config.seed, key, config.vocab, config.hidden, WHERE), tp
        )

    if config.tied:
        return dict.fromkeys(names, made("embedding")) if names else {}
    return {name: made(name) for name in names}


def waves(length: int, like: Tensor) -> Tensor:
    """Return the sines and then the cosines of each position, (T, hidden), in the type of `like`.

    Sine i and cosine i have the angle p / theta^(2i / hidden) at position p (1706.03762, section
    3.5).
    """
    hidden = like.shape[-1]
    pairs = torch.arange(0, hidden, 2, device=like.device, dtype=torch.float32)
    at = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(at, 1.0 / THETA ** (pairs / hidden))
    return torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)


def batch(
    config: EncoderDecoderConfig, text: bytes, step: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Return the sources and the targets of a step, and the keywords of each microbatch.

    Sources and targets have shape (microbatches, b, T). All results depend only on the number of
    the step.
    """
    numbers = torch.Generator().manual_seed(step)
    size = config.context
    shape = (MICROBATCHES, SIZE, 1)
    begins = torch.randint(len(text) - 2 * size, shape, generator=numbers)
    tokens = torch.tensor([*text])[begins + torch.arange(2 * size + 1)]
    source, target = tokens[..., :size], tokens[..., size:]
    return source, target[..., 1:], [{"target": each[:, :-1]} for each in target]


def main() -> None:
    """Train for ten steps, as one of the ranks that torchrun has started."""
    config, text = EncoderDecoderConfig(), Path(__file__).read_bytes()
    train(
        partial(build_stage, config), partial(batch, config, text), loss, count_tokens,
        boundaries(config, STAGES, SIZE, config.context, config.context),
        tied_stages(config, STAGES),
        stages=STAGES, microbatches=MICROBATCHES, steps=STEPS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
