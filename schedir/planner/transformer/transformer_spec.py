"""Define the shape of a transformer, with its numbers of parameters and operations."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Final

from schedir.call_errors import explain_wrong_calls
from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_WIDTH

# Fields of models for which the planner only counts parameters.
_UNSUPPORTED: Final = (
    "shared_experts", "dense_layers", "dense_ffn", "query_rank", "kv_rank", "rope_dim",
)  # fmt: skip


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
        rotary: True if attention rotates queries and keys by their positions (RoPE, arXiv
            2104.09864), which needs no parameters. False if each position of the sequence has a
            learned embedding. None means the value of `gated`.
        experts: The number of feed-forward networks in a layer.
        active: The number of experts that process each token (arXiv 2101.03961).
        tied: True if the head uses the weight of the embedding.
        shared_experts: The number of further experts that process each token.
        dense_layers: The number of first layers with one feed-forward network instead of experts.
        dense_ffn: The width of the feed-forward network of these layers.
        query_rank: The size of the latent vector from which latent attention computes queries
            (arXiv 2405.04434, section 2.1).
        kv_rank: The size of the latent vector for keys and values. 0 means no latent attention.
        rope_dim: The additional width of queries and of the shared key with rotary embeddings.

    The planner counts the parameters of models with one of the last six fields, but it cannot plan
    them: `require_supported` refuses them.

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
    rotary: bool | None = None
    experts: int = 1
    active: int = 1
    tied: bool = True
    shared_experts: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        for name, usual, times in (("ffn", "hidden", 4), ("kv_heads", "heads", 1)):
            value = getattr(self, usual)
            if getattr(self, name) == 0 and isinstance(value, int):
                object.__setattr__(self, name, value * times)
        if self.rotary is None:
            object.__setattr__(self, "rotary", self.gated)
        divided = [("heads", "kv_heads")]
        if self.head_dim == 0:
            divided.append(("hidden", "heads"))
            if all(isinstance(one, int) and one > 0 for one in (self.hidden, self.heads)):
                object.__setattr__(self, "head_dim", max(self.hidden // self.heads, 1))
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool) or f.name == "rotary":
                if not isinstance(value, bool):
                    raise UsageError(
                        f"model: {f.name} must be True or False, not {describe(value)}",
                        fields=[f.name],
                    )
                continue
            upper = MAX_LAYERS if f.name == "layers" else MAX_WIDTH
            lower = 0 if f.name in _UNSUPPORTED else 1
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not lower <= value <= upper:
                raise UsageError(
                    f"model: {f.name} must be an integer from {lower} to {upper}, not "
                    f"{describe(value)}",
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
        if self.dense_layers > self.layers:
            raise UsageError(
                f"model: dense_layers {self.dense_layers} must be at most layers {self.layers}",
                fields=["dense_layers", "layers"],
            )

    def require_supported(self) -> None:
        """Raise an error if the planner cannot predict the times and the memory of this model.

        Raises:
            UsageError: The model has latent attention, shared experts or dense first layers. The
                message has its number of parameters.
        """
        names = [name for name in _UNSUPPORTED if getattr(self, name)]
        if names:
            values = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise UsageError(
                f"model: the planner cannot predict the times and the memory of a model with "
                f"{values}; it only counts its parameters: {self.params / 1e9:.4g} billion, "
                f"{self.active_params / 1e9:.4g} billion of them active",
                fields=names,
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
        """The number of elements of the matrices of the attention of a layer."""
        if self.kv_rank:
            queries = self.heads * (self.head_dim + self.rope_dim)
            from_latent = self.kv_rank * 2 * self.attention_width
            to_latent = self.hidden * (self.kv_rank + self.rope_dim)
            if self.query_rank:
                of_queries = self.query_rank * (self.hidden + queries)
            else:
                of_queries = self.hidden * queries
            return of_queries + to_latent + from_latent + self.hidden * self.attention_width
        return self.hidden * (self.qkv_columns + self.attention_width)

    @property
    def attention_params(self) -> int:
        """The number of parameters of attention: matrices, their biases, and the norm.

        Latent attention has no biases, and a norm of each latent vector.
        """
        if self.kv_rank:
            return self.attention_weights + self.query_rank + self.kv_rank + 2 * self.hidden
        return self.attention_weights + self.qkv_columns + 3 * self.hidden

    @property
    def expert_params(self) -> int:
        """The number of parameters of one feed-forward network, with its biases."""
        input_columns = self.ffn * (2 if self.gated else 1)
        return self.hidden * (input_columns + self.ffn) + input_columns + self.hidden

    @property
    def layer_params(self) -> int:
        """The number of parameters of a layer: attention, feed-forward networks, norms, router.

        The layer is not one of the `dense_layers`.
        """
        router = self.hidden * self.experts if self.experts > 1 else 0
        networks = (self.experts + self.shared_experts) * self.expert_params
        return self.attention_params + networks + 2 * self.hidden + router

    @property
    def dense_layer_params(self) -> int:
        """The number of parameters of one of the `dense_layers`."""
        matrices = self.hidden * self.dense_ffn * (3 if self.gated else 2)
        return self.attention_params + matrices + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        """The number of parameters of the token embedding. An untied head has the same number."""
        return self.vocab * self.hidden

    @property
    def position_params(self) -> int:
        """The number of parameters of the position embedding. 0 for rotary positions."""
        return 0 if self.rotary else self.sequence * self.hidden

    @property
    def params(self) -> int:
        """The number of parameters: for a GPT, equation 2 of SC21 (arXiv 2104.04473)."""
        ends = self.embedding_params * (1 if self.tied else 2) + self.position_params
        layers = (self.layers - self.dense_layers) * self.layer_params
        return layers + self.dense_layers * self.dense_layer_params + ends + 2 * self.hidden

    @property
    def active_params(self) -> int:
        """The number of parameters that process a token."""
        idle_experts = (self.layers - self.dense_layers) * (self.experts - self.active)
        return self.params - idle_experts * self.expert_params

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
