"""The configuration of a Llama model. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from schedir.errors import UsageError
from schedir.models.partitioning import require_positive
from schedir.models.window_config import PerLayer, require_windows


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama model.

    Args:
        vocab: Size of the vocabulary.
        layers: Number of layers.
        hidden: Hidden size.
        heads: Number of attention heads of a layer.
        kv_heads: Number of heads of keys and values (grouped-query attention). The default is
            `heads`.
        feed_forward: Width of the feed-forward network. The default is 8/3 of `hidden`, rounded up
            to a multiple of 8.
        context: The longest sequence, in tokens.
        theta: The base of the rotary position embedding.
        eps: The epsilon of the RMS norms.
        tied: True if the head uses the weight of the embedding.
        seed: The seed of the initial parameters.
        window: Number of tokens that each token attends to, including itself: one number, or one
            per layer. 0 is all earlier tokens.
        stride: Number of tokens by which the window moves: one number, or one per layer. 1 is the
            sliding window of Mistral (Jiang et al., arXiv 2310.06825, section 2).

    Raises:
        UsageError: A size is not positive, or does not fit the other sizes.
    """

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int | None = None
    feed_forward: int | None = None
    context: int = 128
    theta: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    seed: int = 0
    window: PerLayer = 0
    stride: PerLayer = 1

    def __post_init__(self) -> None:
        require_positive(self, "vocab", "layers", "hidden", "heads", "context")
        for name in ("kv_heads", "feed_forward"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        if self.hidden % (2 * self.heads):
            raise UsageError(
                f"hidden {self.hidden} is not a multiple of 2 * heads = {2 * self.heads}: rotary "
                "positions need an even width of each head",
                fields=["hidden", "heads"],
            )
        if self.heads % self.kv_groups:
            raise UsageError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_groups}",
                fields=["heads", "kv_heads"],
            )
        for name in ("theta", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(
                    f"{name} is {getattr(self, name):g}; it must be above 0", fields=[name]
                )
        require_windows(self)

    @property
    def kv_groups(self) -> int:
        """Number of heads of keys and values. Each has a group of query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward network."""
        return -(-self.hidden // 3) * 8 if self.feed_forward is None else self.feed_forward

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied weight counts once."""
        kv_width = self.hidden * self.kv_groups // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * kv_width + 3 * self.ffn_width + 2)
        return self.layers * layer + self.hidden * (self.vocab * (2 - self.tied) + 1)
