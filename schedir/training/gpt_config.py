"""The shape of a GPT, and how stages and tensor-parallel ranks divide it.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from schedir.errors import UsageError, said
from schedir.models.shape import expect_positive
from schedir.models.shape import split_heads as split_heads
from schedir.models.shape import split_layers as split_layers


@dataclass(frozen=True)
class GPTConfig:
    """The whole model; raises UsageError if a size is not positive or heads do not fit.

    `context` is the longest sequence, in tokens; the feed-forward width is 4 * hidden; `tied`
    means that the head uses the embedding's weight; `seed` is what parameters are drawn from;
    `dropout` is the share that is left out, while training, of the embedding, of the attention's
    weights and of what each half of a layer adds, as in GPT-2.

    In layers with a `window`, of 1 or more, each token sees that many at most, itself included, and
    not all before it; all of them have one, or each its own, and 0 is none.  The window moves every
    `stride` tokens only, so that kernels skip more: 1 slides, and stride = window cuts the sequence
    into blocks (arXiv 2504.16922).
    """

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = True
    seed: int = 0
    dropout: float = 0.0
    window: int | tuple[int, ...] = 0
    stride: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        expect_positive(self, "vocab", "layers", "hidden", "heads", "context")
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
        self._require_windows()

    def _require_windows(self) -> None:
        for name, least in (("window", 0), ("stride", 1)):
            given = getattr(self, name)
            each = given if isinstance(given, tuple) else (given,)
            if isinstance(given, tuple) and len(given) != self.layers:
                raise UsageError(
                    f"{name} has {len(given)} numbers for {self.layers} layers",
                    hint="one number is for all layers",
                    fields=[name, "layers"],
                )
            if wrong := [one for one in each if type(one) is not int or one < least]:
                raise UsageError(
                    f"{name} is {said(wrong[0])}; it must be a whole number of {least} or more",
                    fields=[name],
                )
        for layer, (window, stride) in enumerate(self._each):
            if 0 < window < stride:
                raise UsageError(
                    f"layer {layer} has stride {stride} and window {window}: keys between two "
                    "windows would be seen by nobody",
                    fields=["stride", "window"],
                )
        if not any(window for window, _ in self._each) and any(s > 1 for _, s in self._each):
            raise UsageError(
                f"stride is {said(self.stride)}, and no layer has a window that it could move",
                hint="window = 256",
                fields=["stride", "window"],
            )

    @property
    def _each(self) -> list[tuple[int, int]]:
        """Window and stride of each layer, as they are said."""
        windows, strides = (
            given if isinstance(given, tuple) else (given,) * self.layers
            for given in (self.window, self.stride)
        )
        return [*zip(windows, strides, strict=True)]

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """Window and stride of each layer; None of those that see all, as with a window that is no
        shorter than the context.

        >>> GPTConfig(layers=3, context=64, window=(16, 0, 64), stride=(4, 1, 1)).windows
        ((16, 4), None, None)
        """
        return tuple(
            (window, stride) if 0 < window < self.context else None for window, stride in self._each
        )

    @property
    def parameters(self) -> int:
        """How many numbers the model has; a tied weight counts once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        ends = self.vocab * (2 - self.tied) + self.context + 2
        return self.layers * layer + ends * self.hidden
