"""The shape of a Llama-like GPT.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from schedir.errors import UsageError
from schedir.models.partitioning import require_positive
from schedir.models.window_config import PerLayer, require_windows


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama model.  A size that is not positive is refused.

    - `vocab`, `layers`, `hidden`, `heads`: the size of the vocabulary, and the numbers of layers,
      of hidden units, and of attention heads.
    - `kv_heads`: the number of heads of keys and values (grouped-query attention); by default
      `heads`.
    - `feed_forward`: the width of the gated layer; by default 8/3 of `hidden`, rounded up to a
      multiple of 8.
    - `context`: the longest sequence, in tokens.
    - `theta`: the base of the rotary position embedding.
    - `eps`: the epsilon of the RMS norms.
    - `tied`: whether the head uses the weight of the embedding.
    - `seed`: the seed of the initial parameters.
    - `window`: how many tokens each token sees, itself included: one number, or one per layer;
      0 is all before it.  `stride` is by how many tokens the window moves.  With stride 1 it is
      Mistral's sliding window (Jiang et al., arXiv 2310.06825, section 2).
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
                f"hidden {self.hidden} is no multiple of twice the heads, {2 * self.heads}: "
                "positions turn pairs of a head's numbers",
                fields=["hidden", "heads"],
            )
        if self.heads % self.kv_groups:
            raise UsageError(
                f"{self.heads} heads cannot share {self.kv_groups} heads of keys and values evenly",
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
        """Heads of keys and values, each with the queries that share it."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """The feed-forward width."""
        return -(-self.hidden // 3) * 8 if self.feed_forward is None else self.feed_forward

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has; a tied weight counts once."""
        shared = self.hidden * self.kv_groups // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * shared + 3 * self.ffn_width + 2)
        return self.layers * layer + self.hidden * (self.vocab * (2 - self.tied) + 1)
