"""The shape of a GPT, and its division among stages and tensor-parallel ranks. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schedir.errors import UsageError
from schedir.ir.pipeline.stage_segments import ENTRY_COLLECTIVE, EXIT_COLLECTIVE
from schedir.models.partitioning import require_positive
from schedir.models.partitioning import split_heads as split_heads
from schedir.models.partitioning import split_layers as split_layers
from schedir.models.window_config import PerLayer, require_windows

# The letters of a layer's tensor-parallel collectives: before and after the attention, and before
# and after the feed-forward network.
LAYER_BOUNDARIES: Final = 2 * (ENTRY_COLLECTIVE + EXIT_COLLECTIVE)


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT.

    Args:
        vocab: Size of the vocabulary.
        layers: Number of layers.
        hidden: Hidden size. The feed-forward network has 4 * hidden units.
        heads: Number of attention heads of a layer.
        context: The longest sequence, in tokens.
        tied: True if the head uses the weight of the embedding.
        seed: The seed of the initial parameters.
        dropout: The dropout probability of the embedding, of attention weights, and of the outputs
            of attention and feed-forward network, as in GPT-2.
        window: Number of tokens that each token attends to, including itself: one number, or one
            per layer. 0 is all earlier tokens.
        stride: Number of tokens by which the window moves: one number, or one per layer. 1 is a
            sliding window. With a larger stride, kernels skip more tiles of the attention matrix. A
            stride equal to the window divides the sequence into blocks (arXiv 2504.16922).

    Raises:
        UsageError: A size is not positive, or does not fit the other sizes.
    """

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = True
    seed: int = 0
    dropout: float = 0.0
    window: PerLayer = 0
    stride: PerLayer = 1

    def __post_init__(self) -> None:
        require_positive(self, "vocab", "layers", "hidden", "heads", "context")
        if self.hidden % self.heads:
            raise UsageError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}",
                fields=["hidden", "heads"],
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"dropout is {self.dropout:g}; it must be at least 0 and below 1",
                fields=["dropout"],
            )
        require_windows(self)

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied weight is counted once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        ends = self.vocab * (2 - self.tied) + self.context + 2
        return self.layers * layer + ends * self.hidden
