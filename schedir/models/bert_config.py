"""The shape of a BERT.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from schedir.errors import UsageError
from schedir.models.shape import expect_positive


@dataclass(frozen=True)
class BertConfig:
    """The whole model; raises UsageError if a size is not positive or heads do not fit.

    `context` is the longest sequence, in tokens, both sentences with what stands between them; the
    last four tokens of `vocab` are no text, but mark it (`cls`, `sep`, `mask`, `pad`).  The
    feed-forward width is 4 * hidden; `tied` means that the head of masked tokens uses the
    embedding's weight; `seed` is what parameters are drawn from.
    """

    vocab: int = 260
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        expect_positive(self, "vocab", "layers", "hidden", "heads", "context")
        if self.vocab < 5:
            raise UsageError(
                f"vocab is {self.vocab}, and four tokens of it are no text", fields=["vocab"]
            )
        if self.context < 5:
            raise UsageError(
                f"context is {self.context}, and two sentences with what marks them are 5 tokens",
                fields=["context"],
            )
        if self.hidden % self.heads:
            raise UsageError(
                f"hidden {self.hidden} is no multiple of heads {self.heads}",
                fields=["hidden", "heads"],
            )

    @property
    def text(self) -> int:
        """How many tokens are text: the first so many."""
        return self.vocab - 4

    @property
    def cls(self) -> int:
        """The first token of each sequence, by which the next sentence is told."""
        return self.vocab - 4

    @property
    def sep(self) -> int:
        """The token behind each sentence."""
        return self.vocab - 3

    @property
    def mask(self) -> int:
        """The token in the place of one that is to be found."""
        return self.vocab - 2

    @property
    def pad(self) -> int:
        """The token that fills up a sequence."""
        return self.vocab - 1

    @property
    def parameters(self) -> int:
        """How many numbers the model has; a tied weight counts once."""
        h = self.hidden
        ends = self.vocab * (h * (2 - self.tied) + 1) + h * (self.context + 2)
        heads = 2 * (h * h + h) + 2 * h + 2 * h + 2 * h + 2
        return self.layers * (12 * h * h + 13 * h) + ends + heads
