"""Train a BERT in four stages on 1, 2 or 4 processes.

    python -m examples.bert                                 # one process has all four stages
    torchrun --nproc-per-node 4 -m examples.bert            # each of four processes has one stage

Both commands print the same losses to the last digit.  The training text is this file, so nothing
is downloaded.

The model is that of Megatron-LM (arXiv 1909.08053, section 5.3 and figure 7). It changes the BERT
of Devlin et al. (arXiv 1810.04805): a LayerNorm precedes each half of a layer, and one follows the
last layer. Attention is bidirectional. The model predicts masked tokens, and whether the second
sentence follows the first in the text. It has no dropout.

The example shows:

- Inputs by name: every stage gets the sentence numbers and the padding mask as `keywords` of a
  step. Each rank takes them from the data, so no rank sends them.
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
from examples.transformer_blocks import WHERE, FeedForward, SelfAttention
from schedir.models.language_model import (
    IGNORE_INDEX,
    EmbeddingAndHead,
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

STAGES, MICROBATCHES, SIZE, STEPS = 4, 8, 2, 10
SENTENCES = 2
MASKED = 0.15  # of the tokens of text are to be found (1810.04805, section 3.1)
SHORTER = 0.1  # of the sequences do not fill their room (appendix A.2)
Found = tuple[Tensor, Tensor]  # logits of the tokens, and of whether the second sentence is next


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

    With `sequence_parallel`, tensor-parallel ranks share the tokens, too, as a program with
    `sequence_parallel yes` requires. `layers_per_stage` is the number of layers of each stage
    (`split_layers`).
    """
    counts = split_layers(config.layers, stages, layers_per_stage)
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    sequence_parallel = sequence_parallel and tp_size(tp) > 1
    return Stage(
        config, layers, stage == 0, stage == stages - 1, tp, sequence_parallel=sequence_parallel
    )


def loss(found: Found, targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Return the loss of a microbatch, 0-dim float32 and the same on all ranks.

    `found` is the output of the last stage. `targets`, int64 (b, T), has the original token at each
    masked token. At the first token it has 0 if the second sentence follows the first, and 1 if
    not. All other places have IGNORE_INDEX.

    The loss is the sum of the cross entropies of masked tokens, plus the number of masked tokens
    times the mean cross entropy of sentence pairs. Divided by the number of masked tokens
    (`count_tokens`), it is the sum of both means: the loss of Devlin et al. (1810.04805, appendix
    A.2).
    """
    logits, follows = found
    masked = vocab_parallel_cross_entropy(logits[:, 1:], targets[:, 1:], tp, IGNORE_INDEX)
    follow = F.cross_entropy(
        follows.float(), targets[:, 0], ignore_index=IGNORE_INDEX, reduction="sum"
    ) / (targets[:, 0] != IGNORE_INDEX).sum().clamp(min=1)
    return masked + _masked(targets).sum() * follow


def count_tokens(targets: Tensor) -> int:
    """Return the number of masked tokens. The mean loss is the summed loss divided by it."""
    return int(_masked(targets).sum())


def _masked(targets: Tensor) -> Tensor:
    return targets[..., 1:] != IGNORE_INDEX


class Stage(nn.Module):
    """Consecutive layers of a BERT. The first stage has the embedding, the last has the heads.

    The input and the output are (b, T, hidden). With `sequence_parallel` they are (b, T/t, hidden),
    for the tokens of this rank. The first stage takes tokens, int64 (b, T). The last stage returns
    the logits of this rank, (b, T, ceil(V/t)), and the logits of the sentence pair, (b, 2).

    `sentences`, int64 (b, T), is the number of the sentence of each token, 0 or 1; the default is
    0. `mask`, bool (b, T), is true for tokens that are no padding; by default, no token is padding.
    """

    def __init__(
        self,
        config: BertConfig,
        layers: range,
        first: bool,
        last: bool,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence_parallel = config, tp, sequence_parallel
        self.embedding, head = EmbeddingAndHead.for_stage(
            config, first, last, tp, WHERE, sequence_parallel=sequence_parallel
        )
        self.positions = self.sentences = self.norm = self.heads = None
        seen = partial(mark_sequence_parallel, group=tp, sequence_parallel=sequence_parallel)
        if first:
            self.positions = seen(_table(config, "positions", config.context))
            self.sentences = seen(_table(config, "sentences", SENTENCES))
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, i, tp, sequence_parallel=sequence_parallel) for i in layers}
        )
        if last:
            self.norm = seen(nn.LayerNorm(config.hidden, **WHERE))
            self.heads = Heads(config, tp, sequence_parallel=sequence_parallel)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has a copy (`find_tied_weight`)."""
        return find_tied_weight(self.config, self.embedding, self.head)

    def forward(
        self, x: Tensor, *, sentences: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | Found:
        parts = tp_size(self.tp) if self.sequence_parallel and self.embedding is None else 1
        if (length := x.shape[1] * parts) > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        if self.embedding is not None:
            assert self.positions is not None and self.sentences is not None
            own = partial(
                select_local_tokens, group=self.tp, sequence_parallel=self.sequence_parallel
            )
            of = torch.zeros_like(x) if sentences is None else sentences
            of = own(of.unsqueeze(-1)).squeeze(-1)
            sums = split_backward.embedding(of, self.sentences) + own(self.positions[:length])
            x = self.embedding(x) + sums
        for block in self.layers.values():
            x = block(x, mask)
        if self.norm is not None and self.heads is not None and self.head is not None:
            tokens, follows = self.heads(self.norm(x))
            return self.head(tokens) + self.heads.bias, follows
        return x


class Layer(nn.Module):
    """One layer, (b, T, hidden); tensor-parallel ranks share its heads and feed-forward width."""

    def __init__(
        self,
        config: BertConfig,
        index: int,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        adds = 2 * config.layers
        weights = LayerParameters(
            config.seed, f"layers.{index}", config.hidden, adds, tp, WHERE, sequence_parallel
        )
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

    def __init__(
        self,
        config: BertConfig,
        tp: ProcessGroup | None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        weights = LayerParameters(
            config.seed, "heads", config.hidden, 1, tp, WHERE, sequence_parallel
        )
        self.token = _whole(weights, "token", config.hidden)
        self.norm = weights.make_norm()
        self.bias = shard(torch.zeros(config.vocab, **WHERE), 0, tp, padded=True)
        self.pool = _whole(weights, "pool", config.hidden, own=False)
        self.follows = _whole(weights, "follows", SENTENCES, own=False)

    def forward(self, x: Tensor) -> Found:
        tokens = self.norm(F.gelu(self.token(x)))
        first = get_first_token(x, self.tp, sequence_parallel=self.sequence_parallel)
        return tokens, self.follows(torch.tanh(self.pool(first)))


def _whole(
    weights: LayerParameters, name: str, k: int, *, own: bool = True
) -> ColumnParallelLinear:
    """Return a linear layer from hidden to k features, of which each rank has all weights.

    If `own` is true, the rank applies the layer to its own tokens. Otherwise all ranks apply it to
    the same input.
    """
    layer = weights._replace(tp=None, sequence_parallel=False).make_column_linear(name, k)
    return mark_sequence_parallel(
        layer, weights.tp, sequence_parallel=weights.sequence_parallel, has_local_tokens=own
    )


def _table(config: BertConfig, name: str, rows: int) -> nn.Parameter:
    """Return a table with a row for each position, or for each sentence number."""
    return shard(make_normal_init(config.seed, name, rows, config.hidden, WHERE), 0, None)


# ---------------------------------------------------------------- its data


class Pair(NamedTuple):
    """A sequence of two sentences. Each field has shape (T,).

    `tokens` are its tokens, and `sentences` the number of the sentence of each token, 0 or 1.
    `there` is true for tokens that are no padding. `targets` has the original token at each masked
    token. At the first token it has 1 if the second sentence does not follow the first, else 0. All
    other places have IGNORE_INDEX.
    """

    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    there: NDArray[np.bool_]
    targets: NDArray[np.int64]


def pair(
    own: NDArray[np.int64],
    other: NDArray[np.int64],
    config: BertConfig,
    numbers: np.random.Generator,
) -> Pair:
    """Return a sequence with the beginning of the text `own` and a second sentence.

    The second sentence is the continuation of the first in `own` or, equally often, the beginning
    of the text `other`. The sequence has the length of `own`, and at least 5 tokens are no padding.

    15 % of the tokens of text are selected, at least one. Of the selected tokens, 80 % are masked,
    10 % are replaced by other tokens, and 10 % remain (1810.04805, appendix A.1).
    """
    room = len(own) - 3
    length = int(numbers.integers(2, room + 1)) if numbers.random() < SHORTER else room
    first = int(numbers.integers(1, length))
    is_other = bool(numbers.random() < 0.5)
    second = other[: length - first] if is_other else own[first:length]
    tokens = np.full(len(own), config.pad, np.int64)
    tokens[: length + 3] = [config.cls, *own[:first], config.sep, *second, config.sep]
    at = np.arange(len(own))
    sentences = ((at > first + 1) & (at < length + 3)).astype(np.int64)
    text = at[: length + 2][(at[: length + 2] > 0) & (at[: length + 2] != first + 1)]
    masked = numbers.choice(text, max(1, round(MASKED * length)), replace=False)
    targets = np.full(len(own), IGNORE_INDEX, np.int64)
    targets[masked], targets[0] = tokens[masked], is_other
    how = numbers.random(len(masked))
    tokens[masked[how < 0.8]] = config.mask
    changed = masked[how >= 0.9]
    tokens[changed] = numbers.integers(config.text, size=len(changed))
    return Pair(tokens, sentences, at < length + 3, targets)


def batch(
    config: BertConfig, text: bytes, step: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Return the tokens and the targets of a step, and the keywords of each microbatch.

    Tokens and targets have shape (microbatches, b, T). All results depend only on the number of the
    step.
    """
    numbers = np.random.default_rng(step)
    stream = np.frombuffer(text, "u1").astype(np.int64)
    found = []
    for _ in range(MICROBATCHES * SIZE):
        begins = numbers.integers(len(stream) - config.context, size=2)
        own, other = (stream[begin : begin + config.context] for begin in begins)
        found.append(pair(own, other, config, numbers))
    tokens, sentences, there, targets = (
        torch.from_numpy(np.stack(one)).view(MICROBATCHES, SIZE, -1)
        for one in zip(*found, strict=True)
    )
    return (
        tokens,
        targets,
        [{"sentences": of, "mask": mask} for of, mask in zip(sentences, there, strict=True)],
    )


# ---------------------------------------------------------------- a run


def main() -> None:
    """Train for ten steps, as one of the ranks that torchrun has started."""
    config, text = BertConfig(), Path(__file__).read_bytes()
    train(
        partial(build_stage, config), partial(batch, config, text), loss, count_tokens,
        Boundary((SIZE, config.context, config.hidden)), config.tied,
        stages=STAGES, microbatches=MICROBATCHES, steps=STEPS,
    )  # fmt: skip


if __name__ == "__main__":
    main()
