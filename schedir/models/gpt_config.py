"""The shape of a GPT, and how stages and tensor-parallel ranks divide it.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schedir.errors import UsageError
from schedir.ir.pipeline.stage_segments import ENTRY_COLLECTIVE, EXIT_COLLECTIVE
from schedir.models.partitioning import require_positive
from schedir.models.partitioning import split_heads as split_heads
from schedir.models.partitioning import split_layers as split_layers
from schedir.models.window_config import PerLayer, require_windows

# Where tensor-parallel ranks meet in a layer: around its attention, and its feed-forward.
LAYER_BOUNDARIES: Final = 2 * (ENTRY_COLLECTIVE + EXIT_COLLECTIVE)


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.  A size that is not positive is refused.

    - `vocab`, `layers`, `hidden`, `heads`: the size of the vocabulary, and the numbers of layers,
      of hidden units, and of attention heads.  The feed-forward layer has 4 * hidden units.
    - `context`: the longest sequence, in tokens.
    - `tied`: whether the head uses the weight of the embedding.
    - `seed`: the seed of the initial parameters.
    - `dropout`: the share that is left out, while training, of the embedding, of the attention's
      weights and of the output of both halves of a layer, as in GPT-2.
    - `window`: how many tokens each token sees, itself included: one number, or one per layer;
      0 is all before it.  `stride` is by how many tokens the window moves, so that kernels skip
      more: 1 slides it, and stride = window divides the sequence into blocks (arXiv 2504.16922).
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
                f"hidden {self.hidden} is no multiple of heads {self.heads}",
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
        """How many numbers the model has; a tied weight counts once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        ends = self.vocab * (2 - self.tied) + self.context + 2
        return self.layers * layer + ends * self.hidden
