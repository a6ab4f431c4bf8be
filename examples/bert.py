"""Train a BERT in four stages on 1, 2 or 4 processes.

    python -m examples.bert                                 # one process has all four stages
    torchrun --nproc-per-node 4 -m examples.bert            # each of four processes has one stage

Both commands print the loss of each of ten steps, with the same values in all digits. The training
text is this file, so nothing is downloaded.

The model is that of Megatron-LM (arXiv 1909.08053, section 5.3 and figure 7). It changes the BERT
of Devlin et al. (arXiv 1810.04805): a LayerNorm precedes each half of a layer, and one follows the
last layer. Attention is bidirectional. The model predicts masked tokens, and whether the second
sentence follows the first in the text. It has no dropout.

The example shows:

- Keyword arguments of stages: `step(..., keywords=...)` passes the sentence numbers and the padding
  mask to every stage. Each rank takes them from the data, so no rank sends them.
- Two outputs of the last stage: the loss function takes both.
- A tied weight: the embedding of the first stage is the head of the last one.
- Tensor parallelism (`tp`) and sequence parallelism (`sequence_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from examples.training_loop import train
from examples.transformer_blocks import PARAMETER_PLACEMENT, FeedForward, SelfAttention
from schedir.models.language_model import (
    IGNORE_INDEX,
    find_tied_weight,
    make_normal_init,
)
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import split_layers
from schedir.runtime import Boundary
from schedir.runtime.autograd import split_backward
from schedir.tensor_parallel.layers import ColumnParallelLinear
from schedir.tensor_parallel.mappings import (
    get_first_token,
    mark_sequence_parallel,
    select_local_tokens,
    shard,
    tp_size,
)
from schedir.tensor_parallel.vocab_parallel import vocab_parallel_cross_entropy

STAGES, MICROBATCHES, MICROBATCH_SIZE, STEPS = 4, 8, 2, 10
SENTENCES = 2  # sentences of a sequence
MASKED_SHARE = 0.15  # share of text tokens that the model predicts (1810.04805, section 3.1)
SHORT_SHARE = 0.1  # share of sequences that are shorter than the context (appendix A.2)
# The logits of the tokens, and of the sentence pair: whether the second sentence follows the first.
BertOutputs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BertConfig:
    """The shape of the model.

    `context` is the length of the longest sequence in tokens: both sentences and the special
    tokens. The last four tokens of `vocab` are the special tokens (`cls`, `sep`, `mask`, `pad`).
    The feed-forward width is 4 * hidden. If `tied` is true, the head of masked tokens uses the
    weight of the embedding. `seed` is the seed of the initial parameters.
    """

    vocab: int = 260
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    context: int = 64
    tied: bool = True
    seed: int = 0

    @property
    def text(self) -> int:
        """The number of tokens of text. They are the first tokens of the vocabulary."""
        return self.vocab - 4

    @property
    def cls(self) -> int:
        """The first token of each sequence. It predicts whether the second sentence follows."""
        return self.vocab - 4

    @property
    def sep(self) -> int:
        """The token after each sentence."""
        return self.vocab - 3

    @property
    def mask(self) -> int:
        """The token that replaces a masked token."""
        return self.vocab - 2

    @property
    def pad(self) -> int:
        """The token that fills up a sequence."""
        return self.vocab - 1


# ---------------------------------------------------------------- the model


def build_stage(
    config: BertConfig,
    stage: int,
    stages: int,
    *,
    tp: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layers_per_stage: Sequence[int] | None = None,
) -> Stage:
    """Return this rank's shard of stage `stage` of `stages`.

    With `sequence_parallel`, tensor-parallel ranks also divide the tokens, as a program with
    `sequence_parallel yes` requires. `layers_per_stage` is the number of layers of each stage
    (`split_layers`).
    """
    layer_counts = split_layers(config.layers, stages, layers_per_stage)
    first_layer = sum(layer_counts[:stage])
    layers = range(first_layer, first_layer + layer_counts[stage])
    sequence_parallel = sequence_parallel and tp_size(tp) > 1
    return Stage(
        config, layers, stage == 0, stage == stages - 1, tp, sequence_parallel=sequence_parallel
    )


def loss(outputs: BertOutputs, targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Return the loss of a microbatch, 0-dim float32 and the same on all ranks.

    `outputs` are the outputs of the last stage. `targets`, int64 (b, T), has the original token at
    each masked token. At the first token it has 0 if the second sentence follows the first, and 1
    if not. All other positions have IGNORE_INDEX.

    The loss is the sum of the cross entropies of masked tokens, plus the number of masked tokens
    times the mean cross entropy of sentence pairs. Divide it by the number of masked tokens
    (`count_tokens`) to get the sum of both means. This sum is the loss of Devlin et al.
    (1810.04805, appendix A.2).
    """
    token_logits, pair_logits = outputs
    token_loss = vocab_parallel_cross_entropy(token_logits[:, 1:], targets[:, 1:], tp, IGNORE_INDEX)
    pair_loss = F.cross_entropy(
        pair_logits.float(), targets[:, 0], ignore_index=IGNORE_INDEX, reduction="sum"
    ) / (targets[:, 0] != IGNORE_INDEX).sum().clamp(min=1)
    return token_loss + _is_masked(targets).sum() * pair_loss


def count_tokens(targets: Tensor) -> int:
    """Return the number of masked tokens. The mean loss is the summed loss divided by it."""
    return int(_is_masked(targets).sum())


def _is_masked(targets: Tensor) -> Tensor:
    """Return True for each masked token. The first token is not in the result."""
    return targets[..., 1:] != IGNORE_INDEX


class Stage(nn.Module):
    """Consecutive layers of a BERT. The first stage has the embedding, the last has the heads.

    The input and the output are (b, T, hidden). With `sequence_parallel` they are (b, T/t, hidden),
    for the tokens of this rank. The first stage takes tokens, int64 (b, T). The last stage returns
    the logits of this rank, (b, T, ceil(V/t)), and the logits of the sentence pair, (b, 2).

    `sentences`, int64 (b, T), is the number of the sentence of each token, 0 or 1. The default is
    0. `mask`, bool (b, T), is false for padding tokens. By default, no token is padding.
    """

    def __init__(
        self,
        config: BertConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence_parallel = config, tp, sequence_parallel
        residual_adds = 2 * config.layers
        weights = LayerParameters(
            config.seed,
            "",
            config.hidden,
            residual_adds,
            tp,
            PARAMETER_PLACEMENT,
            sequence_parallel,
        )
        self.embedding, head = weights.make_embedding_and_head(
            config.vocab, is_first, is_last, is_tied=config.tied
        )
        self.positions = self.sentences = self.norm = self.heads = None
        if is_first:
            self.positions = weights.mark_replicated(
                _make_embedding_table(config, "positions", config.context)
            )
            self.sentences = weights.mark_replicated(
                _make_embedding_table(config, "sentences", SENTENCES)
            )
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, weights._replace(name=f"layers.{i}")) for i in layers}
        )
        if is_last:
            self.norm = weights.make_norm()
            self.heads = Heads(config, weights._replace(name="heads", residual_adds=1))
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has a copy (`find_tied_weight`)."""
        return find_tied_weight(self.embedding, self.head, is_tied=self.config.tied)

    def forward(
        self, x: Tensor, *, sentences: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | BertOutputs:
        token_shards = tp_size(self.tp) if self.sequence_parallel and self.embedding is None else 1
        if (length := x.shape[1] * token_shards) > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        if self.embedding is not None:
            assert self.positions is not None and self.sentences is not None
            select_local = partial(
                select_local_tokens, group=self.tp, sequence_parallel=self.sequence_parallel
            )
            sentence_numbers = torch.zeros_like(x) if sentences is None else sentences
            sentence_numbers = select_local(sentence_numbers.unsqueeze(-1)).squeeze(-1)
            sentence_rows = split_backward.embedding(sentence_numbers, self.sentences)
            x = self.embedding(x) + (sentence_rows + select_local(self.positions[:length]))
        for block in self.layers.values():
            x = block(x, mask)
        if self.norm is not None and self.heads is not None and self.head is not None:
            tokens, pair_logits = self.heads(self.norm(x))
            return self.head(tokens) + self.heads.bias, pair_logits
        return x


class Layer(nn.Module):
    """One layer, (b, T, hidden). Tensor-parallel ranks shard its heads and feed-forward width."""

    def __init__(self, config: BertConfig, weights: LayerParameters) -> None:
        super().__init__()
        self.attention = SelfAttention(weights, config.heads, causal=False)
        self.feed_forward = FeedForward(weights)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.feed_forward(self.attention(x, mask))
        return x


class Heads(nn.Module):
    """The layers before the logits of tokens, and the head of the sentence pair.

    The head of the sentence pair uses the first token. Each rank has all weights of these layers;
    only the `bias` of the token logits is sharded.
    """

    def __init__(self, config: BertConfig, weights: LayerParameters) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = weights.tp, weights.sequence_parallel
        self.token = _make_replicated_linear(weights, "token", config.hidden)
        self.norm = weights.make_norm()
        zeros = torch.zeros(config.vocab, **PARAMETER_PLACEMENT)
        self.bias = shard(zeros, 0, weights.tp, padded=True)
        self.pool = _make_replicated_linear(weights, "pool", config.hidden, has_local_tokens=False)
        self.follows = _make_replicated_linear(
            weights, "follows", SENTENCES, has_local_tokens=False
        )

    def forward(self, x: Tensor) -> BertOutputs:
        tokens = self.norm(F.gelu(self.token(x)))
        first_token = get_first_token(x, self.tp, sequence_parallel=self.sequence_parallel)
        return tokens, self.follows(torch.tanh(self.pool(first_token)))


def _make_replicated_linear(
    weights: LayerParameters, name: str, features: int, *, has_local_tokens: bool = True
) -> ColumnParallelLinear:
    """Return a linear layer from `hidden` to `features`. Each rank has all its weights.

    If `has_local_tokens` is true, each rank applies the layer to its own tokens. Otherwise all
    ranks apply it to the same input.
    """
    layer = weights._replace(tp=None, sequence_parallel=False).make_column_linear(name, features)
    return mark_sequence_parallel(
        layer,
        weights.tp,
        sequence_parallel=weights.sequence_parallel,
        has_local_tokens=has_local_tokens,
    )


def _make_embedding_table(config: BertConfig, name: str, rows: int) -> nn.Parameter:
    """Return a table with a row for each position, or for each sentence number."""
    return shard(
        make_normal_init(config.seed, name, rows, config.hidden, PARAMETER_PLACEMENT), 0, None
    )


# ---------------------------------------------------------------- the training data


class SentencePair(NamedTuple):
    """A sequence of two sentences. Each field has shape (T,).

    `tokens` are its tokens. `sentences` has the number of the sentence of each token, 0 or 1.
    `mask` is false for padding tokens. `targets` has the original token at each masked token. At
    the first token it has 1 if the second sentence does not follow the first, else 0. All other
    positions have IGNORE_INDEX.
    """

    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    mask: NDArray[np.bool_]
    targets: NDArray[np.int64]


def make_sentence_pair(
    window: NDArray[np.int64],
    other_window: NDArray[np.int64],
    config: BertConfig,
    rng: np.random.Generator,
) -> SentencePair:
    """Return a sequence of two sentences. The first sentence is the beginning of `window`.

    The second sentence is, with equal probability, the continuation of the first in `window` or
    the beginning of `other_window`. The sequence has the length of `window`. At least 5 of its
    tokens are not padding.

    The function selects 15 % of the text tokens, at least one. Of the selected tokens, 80 % are
    masked, 10 % are replaced by other tokens, and 10 % remain (1810.04805, appendix A.1).
    """
    max_length = len(window) - 3
    length = int(rng.integers(2, max_length + 1)) if rng.random() < SHORT_SHARE else max_length
    first_length = int(rng.integers(1, length))
    is_other = bool(rng.random() < 0.5)
    second_sentence = (
        other_window[: length - first_length] if is_other else window[first_length:length]
    )
    tokens = np.full(len(window), config.pad, np.int64)
    tokens[: length + 3] = [
        config.cls,
        *window[:first_length],
        config.sep,
        *second_sentence,
        config.sep,
    ]
    # Position 0 has cls, and position first_length + 1 has the first sep.
    positions = np.arange(len(window))
    sentences = ((positions > first_length + 1) & (positions < length + 3)).astype(np.int64)
    text_positions = positions[: length + 2][
        (positions[: length + 2] > 0) & (positions[: length + 2] != first_length + 1)
    ]
    selected = rng.choice(text_positions, max(1, round(MASKED_SHARE * length)), replace=False)
    targets = np.full(len(window), IGNORE_INDEX, np.int64)
    targets[selected], targets[0] = tokens[selected], is_other
    draws = rng.random(len(selected))
    tokens[selected[draws < 0.8]] = config.mask
    replaced = selected[draws >= 0.9]
    tokens[replaced] = rng.integers(config.text, size=len(replaced))
    return SentencePair(tokens, sentences, positions < length + 3, targets)


def batch(
    config: BertConfig, text: bytes, step: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Return the tokens and targets of a step, and the keyword arguments of each microbatch.

    Tokens and targets have shape (microbatches, b, T). All results depend only on the number of the
    step, so each process can compute them.
    """
    rng = np.random.default_rng(step)
    stream = np.frombuffer(text, "u1").astype(np.int64)
    pairs = []
    for _ in range(MICROBATCHES * MICROBATCH_SIZE):
        window_starts = rng.integers(len(stream) - config.context, size=2)
        window, other_window = (stream[start : start + config.context] for start in window_starts)
        pairs.append(make_sentence_pair(window, other_window, config, rng))
    tokens, sentences, masks, targets = (
        torch.from_numpy(np.stack(arrays)).view(MICROBATCHES, MICROBATCH_SIZE, -1)
        for arrays in zip(*pairs, strict=True)
    )
    return (
        tokens,
        targets,
        [
            {"sentences": sentence_numbers, "mask": mask}
            for sentence_numbers, mask in zip(sentences, masks, strict=True)
        ],
    )


# ---------------------------------------------------------------- the training run


def main() -> None:
    """Train for ten steps as one of the ranks that torchrun started."""
    config, text = BertConfig(), Path(__file__).read_bytes()
    train(
        partial(build_stage, config), partial(batch, config, text), loss, count_tokens,
        Boundary((MICROBATCH_SIZE, config.context, config.hidden)), config.tied,
        stages=STAGES, microbatches=MICROBATCHES, steps=STEPS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
