"""Model: the shape of a transformer, as far as its costs depend on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_WIDTH


@dataclass(frozen=True)
class TransformerSpec:
    """Layers of attention and a feed-forward network, an embedding before and a head behind them.

    `layers` of width `hidden` have `heads` of attention over a `sequence` of tokens, of `vocab`
    kinds; `ffn` is the width of the feed-forward network, 4 hidden unless told; `kv_heads` of keys
    and values are shared by the heads, one each unless told (arXiv 2305.13245); `gated` has a third
    matrix in the feed-forward network (arXiv 2002.05202).  With `experts` there are so many such
    networks in a layer, of which each token goes through `active` ones (arXiv 2101.03961).  `tied`
    means that the head uses the embedding's matrix.

    Raises UsageError for sizes that are no whole numbers from 1 on, or do not fit.

    >>> from schedir.planner import TransformerSpec
    >>> gpt3 = TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    >>> f"{gpt3.params / 1e9:.1f} billion"
    '174.6 billion'
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    experts: int = 1
    active: int = 1
    tied: bool = True

    def __post_init__(self) -> None:
        for name, usual, times in (("ffn", "hidden", 4), ("kv_heads", "heads", 1)):
            value = getattr(self, usual)
            if getattr(self, name) == 0 and isinstance(value, int):
                object.__setattr__(self, name, value * times)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(f"model: {f.name} is True or False, not {describe(value)}",
                                     fields=[f.name])  # fmt: skip
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(
                    f"model: {f.name} is a whole number from 1 on, not {describe(value)}",
                    fields=[f.name],
                )
            elif value > (most := MAX_LAYERS if f.name == "layers" else MAX_WIDTH):
                raise UsageError(
                    f"model: {f.name} is {describe(value)}; it must be at most {most}",
                    fields=[f.name],
                )
        for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise UsageError(
                    f"model: {whole} {getattr(self, whole)} is no multiple of "
                    f"{part} {getattr(self, part)}", fields=[whole, part],
                )  # fmt: skip
        if self.active > self.experts:
            raise UsageError(
                f"model: a token goes through active {self.active} of experts {self.experts}",
                fields=["active", "experts"],
            )

    @property
    def qkv_columns(self) -> int:
        """Columns of the matrix of queries, keys and values."""
        return self.hidden + 2 * self.kv_heads * (self.hidden // self.heads)

    @property
    def attention_params(self) -> int:
        """Numbers in a layer's attention: both matrices, their biases, and its norm."""
        return self.hidden * (self.qkv_columns + self.hidden) + self.qkv_columns + 3 * self.hidden

    @property
    def expert_params(self) -> int:
        """Numbers in one feed-forward network, with its biases."""
        into = self.ffn * (2 if self.gated else 1)
        return self.hidden * (into + self.ffn) + into + self.hidden

    @property
    def layer_params(self) -> int:
        """Numbers in a layer: attention, feed-forward networks, their norm and their router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_params + self.experts * self.expert_params + 2 * self.hidden + router

    @property
    def embedding_params(self) -> int:
        """Numbers in the embedding of tokens, and in a head of its own."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """Numbers in the whole model: SC21 (arXiv 2104.04473), equation 2, for a plain GPT."""
        ends = self.embedding_params * (1 if self.tied else 2) + self.sequence * self.hidden
        return self.layers * self.layer_params + ends + 2 * self.hidden

    def count_flops(self, batch: int) -> float:
        """Operations of one step of `batch` sequences that the model asks for: its matrices, twice
        in the backward, nothing again.

        72 B l s h^2 (1 + s/6h + V/12lh) of a plain GPT: arXiv 2205.05198, equation 7, which SC21's
        equation 3 is without its recomputation.

        >>> from schedir.planner import TransformerSpec
        >>> m = TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
        >>> b, l, s, h, v = 1536, m.layers, m.sequence, m.hidden, m.vocab
        >>> paper = 72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
        >>> abs(m.count_flops(b) / paper - 1) < 1e-12
        True
        """
        matrices = self.hidden * (self.qkv_columns + self.hidden)
        matrices += self.active * self.hidden * self.ffn * (3 if self.gated else 2)
        scores = 2 * self.sequence * self.hidden  # queries by keys, and weights by values
        token = self.layers * (matrices + scores) + self.embedding_params
        return 6.0 * batch * self.sequence * token
