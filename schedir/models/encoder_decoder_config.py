"""The shape of an encoder-decoder, and which of its stages share the embedding.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedir.errors import UsageError
from schedir.models.shape import expect_positive, split_layers


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """The whole model; raises UsageError if a size is not positive or heads do not fit.

    Its layers are those of the encoder, and then those of the decoder.  `context` is the longest
    sequence of either, in tokens; the feed-forward width is 4 * hidden; `tied` means that the
    embeddings of both and the head are one weight; `seed` is what parameters are drawn from.
    """

    vocab: int = 256
    encoder_layers: int = 2
    decoder_layers: int = 2
    hidden: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        names = ("vocab", "encoder_layers", "decoder_layers", "hidden", "heads", "context")
        expect_positive(self, *names)
        if self.context < 2:
            raise UsageError(
                f"context is {self.context}; it must be 2 or more, for a source and a target",
                fields=["context"],
            )
        if self.hidden % self.heads or self.hidden % 2:
            raise UsageError(
                f"hidden {self.hidden} is no even multiple of heads {self.heads}",
                fields=["hidden", "heads"],
            )

    @property
    def layers(self) -> int:
        """Of both halves."""
        return self.encoder_layers + self.decoder_layers

    @property
    def parameters(self) -> int:
        """How many numbers the model has; a tied weight counts once."""
        h = self.hidden
        encoder = self.encoder_layers * (12 * h * h + 13 * h) + 2 * h
        decoder = self.decoder_layers * (16 * h * h + 19 * h) + 2 * h
        return encoder + decoder + self.vocab * h * (1 if self.tied else 3)


def halves(config: EncoderDecoderConfig) -> tuple[int, int]:
    """Tokens of a source and of a target that are windows of a stream, cut in two.

    >>> halves(EncoderDecoderConfig(context=9))
    (4, 5)
    """
    return config.context // 2, config.context - config.context // 2


def layers_of(
    config: EncoderDecoderConfig, stages: int, division: Sequence[int] | None = None
) -> list[range]:
    """The layers of each stage, by number, those of the encoder first (`split_layers`).

    >>> layers_of(EncoderDecoderConfig(encoder_layers=1, decoder_layers=3), 2)
    [range(0, 2), range(2, 4)]
    """
    counts = split_layers(config.layers, stages, division)
    ends = [sum(counts[: s + 1]) for s in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def tied_stages(
    config: EncoderDecoderConfig, stages: int, division: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which stages share the embedding, as `compile(..., tied=)` takes it; none in one stage.

    >>> tied_stages(EncoderDecoderConfig(), 4)
    ((0, 2, 3),)
    """
    if not config.tied:
        return ()
    layers = layers_of(config, stages, division)
    middle = next(s for s, own in enumerate(layers) if config.encoder_layers in own)
    found = tuple(sorted({0, middle, stages - 1}))
    return (found,) if len(found) > 1 else ()
