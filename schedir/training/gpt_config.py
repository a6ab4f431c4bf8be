"""The shape of a GPT, and how stages and tensor-parallel ranks divide it.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedir.errors import UsageError


@dataclass(frozen=True)
class GPTConfig:
    """The whole model; raises UsageError if a size is not positive or heads do not fit.

    `context` is the longest sequence, in tokens; the feed-forward width is 4 * hidden; `tied`
    means that the head uses the embedding's weight; `seed` is what parameters are drawn from;
    `dropout` is the share that is left out, while training, of the embedding, of the attention's
    weights and of what each half of a layer adds, as in GPT-2.
    """

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    tied: bool = True
    seed: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "hidden", "heads", "context"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more", fields=[name]
                )
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

    @property
    def parameters(self) -> int:
        """How many numbers the model has; a tied weight counts once."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        ends = self.vocab * (2 - self.tied) + self.context + 2
        return self.layers * layer + ends * self.hidden


def split_layers(layers: int, stages: int, given: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers per stage: the same for all, or `given`, which may be uneven.

    Only the first and the last stage of several may have no layer: they hold the embedding and
    the head. Raises UsageError if `given` does not fit, or if there is none and the layers cannot
    be divided.

    >>> split_layers(8, 4)
    (2, 2, 2, 2)
    >>> split_layers(10, 4, given=(2, 4, 4, 0))
    (2, 4, 4, 0)
    """
    cut = ("layers", "ranks", "stages_per_rank", "placement")
    if stages < 1:
        raise UsageError(f"{stages} stages; there must be 1 or more", fields=cut)
    each, over = divmod(layers, stages)
    if given is None:
        if not each:
            raise UsageError(f"{layers} layers do not fill {stages} stages", fields=cut)
        if over:
            uneven = [each + (stage < over) for stage in range(stages)]
            raise UsageError(
                f"{layers} layers cannot be divided by {stages} stages",
                hint=f"an uneven division can be given: {uneven}",
                fields=cut,
            )
        return (each,) * stages
    if len(given) != stages or sum(given) != layers:
        raise UsageError(
            f"division {tuple(given)} is not one of {layers} layers on {stages} stages",
            fields=["division", *cut],
        )
    if min(given) < 0 or 0 in given[1:-1]:
        raise UsageError(
            f"division {tuple(given)} leaves a stage with nothing to do", fields=["division"]
        )
    return tuple(given)


def split_heads(heads: int, tp: int) -> int:
    """Heads per tensor-parallel rank. Raises UsageError if they cannot be shared evenly."""
    if heads % tp:
        raise UsageError(f"tp {tp} does not divide {heads} heads", fields=["tp", "heads"])
    return heads // tp
