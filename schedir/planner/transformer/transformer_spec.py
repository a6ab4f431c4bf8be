"""Define the shape of a transformer, with its numbers of parameters and operations."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_WIDTH


@explain_wrong_calls(
    "TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048)"
)
@dataclass(frozen=True)
class TransformerSpec:
    """The shape of a transformer: embedding, layers of attention and feed-forward, and head.

    Args:
        layers: The number of layers.
        hidden: The hidden size.
        heads: The number of attention heads of a layer.
        vocab: The size of the vocabulary.
        sequence: The number of tokens in a sequence.
        ffn: The width of the feed-forward network. 0 means 4 * hidden.
        kv_heads: The number of heads of keys and values, which the attention heads share (arXiv
            2305.13245). 0 means one for each attention head.
        head_dim: The width of the query, the key or the value of a head. 0 means hidden / heads,
            which must then be an integer. Some models have wider heads, such as Qwen3 (arXiv
            2505.09388).
        gated: True if the feed-forward network has a third matrix, for a gate (arXiv 2002.05202).
        experts: The number of feed-forward networks in a layer.
        active: The number of experts that process each token (arXiv 2101.03961).
        tied: True if the head uses the weight of the embedding.

    Raises:
        UsageError: A size is not an integer of at least 1, or is too large. Or `kv_heads` does not
            divide `heads`, or `active` is more than `experts`. Or `head_dim` is 0, and `heads` does
            not divide `hidden`.

    Example:
        >>> from schedir.planner import TransformerSpec
        >>> gpt3 = TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
        >>> f"{gpt3.params / 1e9:.1f} billion"
        '174.6 billion'
    """

    layers: int
    hidden: int
    heads: int
    _: KW_ONLY
    vocab: int
    sequence: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 1
    active: int = 1
    tied: bool = True

    def __post_init__(self) -> None:
        for name, usual, times in (("ffn", "hidden", 4), ("kv_heads", "heads", 1)):
            value = getattr(self, usual)
            if getattr(self, name) == 0 and isinstance(value, int):
                object.__setattr__(self, name, value * times)
        divided = [("heads", "kv_heads")]
        if self.head_dim == 0:
            divided.append(("hidden", "heads"))
            if all(isinstance(one, int) and one > 0 for one in (self.hidden, self.heads)):
                object.__setattr__(self, "head_dim", max(self.hidden // self.heads, 1))
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise UsageError(
                        f"model: {f.name} must be True or False, not {describe(value)}",
                        fields=[f.name],
                    )
                continue
            upper = MAX_LAYERS if f.name == "layers" else MAX_WIDTH
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= upper:
                raise UsageError(
                    f"model: {f.name} must be an integer from 1 to {upper}, not {describe(value)}",
                    fields=[f.name],
                )
        for total, part in divided:
            if getattr(self, total) % getattr(self, part):
                raise UsageError(
                    f"model: {total} {getattr(self, total)} is not a multiple of "
                    f"{part} {getattr(self, part)}",
                    hint="head_dim sets the size of a head" * (total == "hidden"),
                    fields=[total, part],
                )  # fmt: skip
        if self.active > self.experts:
            raise UsageError(
                f"model: active {self.active} must be at most experts {self.experts}",
                fields=["active", "experts"],
            )

    @property
    def attention_width(self) -> int:
        """The width of all queries of a token, which is the input size of the output projection."""
        return self.heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        """The number of columns of the matrix of queries, keys and values."""
        return self.attention_width + 2 * self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """The number of elements of the two matrices of the attention of a layer."""
        return self.hidden * (self.qkv_columns + self.attention_width)

    @property
    def attention_params(self) -> int:
        """The number of parameters of attention: two matrices, their biases, and the norm."""
        return self.attention_weights + self.qkv_columns + 3 * self.hidden

    @property
    def expert_params(self) -> int:
        """The number of parameters of one feed-forward network, with its biases."""
        input_columns = self.ffn * (2 if self.gated else 1)
        return self.hidden * (input_columns + self.ffn) + input_columns + self.hidden

    @property
    def layer_params(self) -> int:
        """The number of parameters of a layer: attention, feed-forward networks, norms, router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_params + self.experts * self.expert_params + 2 * self.hidden + router

    @property
    def embedding_params(self) -> int:
        """The number of parameters of the token embedding. An untied head has the same number."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """The number of parameters: for a GPT, equation 2 of SC21 (arXiv 2104.04473)."""
        ends = self.embedding_params * (1 if self.tied else 2) + self.sequence * self.hidden
        return self.layers * self.layer_params + ends + 2 * self.hidden

    def count_flops(self, batch: int) -> float:
        """Return the number of floating-point operations of one step, without recomputation.

        The backward has twice as many operations as the forward.

        Args:
            batch: The number of sequences of the step.

        References:
            arXiv 2205.05198, equation 7: 72 B l s h^2 (1 + s/6h + V/12lh) for a GPT. Without
            recomputation, equation 3 of SC21 (arXiv 2104.04473) is the same.

        Example:
            >>> from schedir.planner import TransformerSpec
            >>> m = TransformerSpec(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
            >>> b, l, s, h, v = 1536, m.layers, m.sequence, m.hidden, m.vocab
            >>> paper = 72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
            >>> abs(m.count_flops(b) / paper - 1) < 1e-12
            True
        """
        matrices = self.attention_weights + self.active * self.hidden * self.ffn * (
            3 if self.gated else 2
        )
        scores = 2 * self.sequence * self.attention_width  # The products with keys and with values.
        token = self.layers * (matrices + scores) + self.embedding_params
        return 6.0 * batch * self.sequence * token
