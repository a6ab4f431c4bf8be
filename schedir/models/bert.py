"""A BERT cut into pipeline stages, each shared by a tensor-parallel group.

The model is Megatron-LM's (arXiv 1909.08053, section 5.3 and figure 7): that of Devlin et al.
(arXiv 1810.04805) with LayerNorm and residual connections rearranged, so that a norm stands before
each half of a layer, and one behind the last.  It attends both ways, finds masked tokens, and tells
whether the second sentence is the next.  There is no dropout.

Which sentence each token is of, and which tokens are there at all, comes from the data: every stage
is given both by name (`keywords` of a step), and nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import UsageError
from schedir.models.bert_config import BertConfig as BertConfig
from schedir.models.blocks import FeedForward, SelfAttention
from schedir.models.language import IGNORE as IGNORE
from schedir.models.language import Ends, Where, drawn, tied_copy
from schedir.models.shape import split_heads, split_layers
from schedir.models.weights import Weights
from schedir.parallel.group import first_token, own_tokens, seen_in_parts, shard, tp_size
from schedir.parallel.vocab import vocab_parallel_cross_entropy
from schedir.runtime import split

SENTENCES = 2
Found = tuple[Tensor, Tensor]  # logits of the tokens, and of whether the second sentence is next


def build_stage(
    config: BertConfig,
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

    With `sequence` tensor-parallel ranks share the tokens, too: for a program that says
    `sequence yes`.  `division` is the number of layers of each stage (`split_layers`). Raises
    UsageError if the layers do not fit the stages, or the heads the tensor-parallel ranks.
    """
    counts = split_layers(config.layers, stages, division)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} is not one of 0..{stages - 1}")
    split_heads(config.heads, tp_size(tp))
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    where: Where = {"device": device, "dtype": dtype}
    sequence = sequence and tp_size(tp) > 1
    return Stage(config, layers, stage == 0, stage == stages - 1, tp, where, sequence=sequence)


def loss(found: Found, targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Of a microbatch the cross entropies of its masked tokens, and of its next sentences: 0-dim
    float32, the same on all ranks.

    `found` is what the last stage gives, `targets` int64 (b, T): at each masked token what it was,
    at the first place 0 where the second sentence is the next and 1 where it is another, and
    elsewhere IGNORE.  Masked tokens are summed up; of the sentences it is the mean, which counts
    as often as there are masked tokens.  So divided by their number (`count_tokens`) it is the mean
    of each, added: Devlin et al.'s loss (1810.04805, appendix A.2).
    """
    logits, follows = found
    masked = vocab_parallel_cross_entropy(logits[:, 1:], targets[:, 1:], tp, IGNORE)
    follow = F.cross_entropy(
        follows.float(), targets[:, 0], ignore_index=IGNORE, reduction="sum"
    ) / (targets[:, 0] != IGNORE).sum().clamp(min=1)
    return masked + _masked(targets).sum() * follow


def count_tokens(targets: Tensor) -> int:
    """How many tokens are masked: divide the summed loss by it for the mean."""
    return int(_masked(targets).sum())


def _masked(targets: Tensor) -> Tensor:
    return targets[..., 1:] != IGNORE


class Stage(nn.Module):
    """Consecutive layers of a BERT, with the embedding if first and the heads if last.

    Maps (b, T, hidden) to (b, T, hidden), or with `sequence` (b, T/t, hidden) to the same, of the
    rank's own tokens. The first stage takes tokens instead, int64 (b, T); the
    last gives this rank's logits, (b, T, ceil(V/t)), and those of the next sentence, (b, 2).
    `sentences`, int64 (b, T), says of which of two sentences each token is, and `mask`, bool
    (b, T), which tokens are there; without them all are, of the first.
    """

    def __init__(
        self,
        config: BertConfig,
        layers: range,
        first: bool,
        last: bool,
        tp: ProcessGroup | None,
        where: Where,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.sequence = config, tp, sequence
        self.embedding, head = Ends.of(config, first, last, tp, where, sequence=sequence)
        self.positions = self.sentences = self.norm = self.heads = None
        seen = partial(seen_in_parts, group=tp, sequence=sequence)
        if first:
            self.positions = seen(_table(config, "positions", config.context, where))
            self.sentences = seen(_table(config, "sentences", SENTENCES, where))
        self.layers = nn.ModuleDict(
            {str(i): Layer(config, i, tp, where, sequence=sequence) for i in layers}
        )
        if last:
            self.norm = seen(nn.LayerNorm(config.hidden, **where))
            self.heads = Heads(config, tp, where, sequence=sequence)
        self.head = head

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the embedding, if another stage has one (`tied_copy`)."""
        return tied_copy(self.config, self.embedding, self.head)

    def forward(
        self, x: Tensor, *, sentences: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | Found:
        parts = tp_size(self.tp) if self.sequence and self.embedding is None else 1
        if (length := x.shape[1] * parts) > self.config.context:
            raise UsageError(f"{length} tokens do not fit a context of {self.config.context}")
        if self.embedding is not None:
            assert self.positions is not None and self.sentences is not None
            own = partial(own_tokens, group=self.tp, sequence=self.sequence)
            of = torch.zeros_like(x) if sentences is None else sentences
            of = own(of.unsqueeze(-1)).squeeze(-1)
            sums = split.embedding(of, self.sentences) + own(self.positions[:length])
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
        where: Where,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        adds = 2 * config.layers
        weights = Weights(config.seed, f"layers.{index}", config.hidden, adds, tp, where, sequence)
        self.attention = SelfAttention(weights, config.heads, causal=False)
        self.feed_forward = FeedForward(weights)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.feed_forward(self.attention(x, mask))
        return x


class Heads(nn.Module):
    """What stands before the logits: of tokens, and of the next sentence, by the first token.

    Each rank holds it whole, but the `bias` of the logits of tokens.
    """

    def __init__(
        self,
        config: BertConfig,
        tp: ProcessGroup | None,
        where: Where,
        *,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.sequence = tp, sequence
        weights = Weights(config.seed, "heads", config.hidden, 1, tp, where, sequence)
        self.token = weights.whole("token", config.hidden)
        self.norm = weights.norm()
        self.bias = shard(torch.zeros(config.vocab, **where), 0, tp, padded=True)
        self.pool = weights.whole("pool", config.hidden, own=False)
        self.follows = weights.whole("follows", SENTENCES, own=False)

    def forward(self, x: Tensor) -> Found:
        tokens = self.norm(F.gelu(self.token(x)))
        first = first_token(x, self.tp, sequence=self.sequence)
        return tokens, self.follows(torch.tanh(self.pool(first)))


def _table(config: BertConfig, name: str, rows: int, where: Where) -> nn.Parameter:
    """A row for each place, or for each sentence."""
    return shard(drawn(config.seed, name, rows, config.hidden, where), 0, None)
