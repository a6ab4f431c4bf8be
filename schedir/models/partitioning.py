"""Divide a model among stages and tensor-parallel ranks.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_WIDTH


def require_positive(config: object, *names: str) -> None:
    """Raise UsageError for a field of a configuration that is not 1 or more, or is too large.

    A field with "layers" in its name is at most `MAX_LAYERS`, and any other at most `MAX_WIDTH`.
    """
    for name in names:
        value, most = getattr(config, name), MAX_LAYERS if "layers" in name else MAX_WIDTH
        if value < 1:
            raise UsageError(f"{name} is {describe(value)}; it must be 1 or more", fields=[name])
        if value > most:
            raise UsageError(
                f"{name} is {describe(value)}; it must be at most {most}", fields=[name]
            )


def split_layers(
    layers: int, stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Layers per stage: the same for all, or `layers_per_stage`, which may be uneven.

    Only the first and the last stage of several may have no layer: they hold the embedding and
    the head. Raises UsageError if `layers_per_stage` does not fit, or if there is none and the
    layers cannot be divided.

    >>> split_layers(8, 4)
    (2, 2, 2, 2)
    >>> split_layers(10, 4, layers_per_stage=(2, 4, 4, 0))
    (2, 4, 4, 0)
    """
    cut = ("layers", "ranks", "stages_per_rank", "placement")
    if stages < 1:
        raise UsageError(f"{stages} stages; there must be 1 or more", fields=cut)
    each, over = divmod(layers, stages)
    if layers_per_stage is None:
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
    if len(layers_per_stage) != stages or sum(layers_per_stage) != layers:
        raise UsageError(
            f"layers_per_stage {tuple(layers_per_stage)} is not one of {layers} layers on "
            f"{stages} stages",
            fields=["layers_per_stage", *cut],
        )
    if min(layers_per_stage) < 0 or 0 in layers_per_stage[1:-1]:
        raise UsageError(
            f"layers_per_stage {tuple(layers_per_stage)} leaves a stage with nothing to do",
            fields=["layers_per_stage"],
        )
    return tuple(layers_per_stage)


def split_heads(heads: int, tp: int, subject: str = "heads", field: str = "heads") -> int:
    """Heads per tensor-parallel rank, of all kinds or of those that `subject` says.

    Raises UsageError if they cannot be shared evenly.
    """
    if heads % tp:
        raise UsageError(f"tp {tp} does not divide {heads} {subject}", fields=["tp", field])
    return heads // tp


def split_tokens(context: int, tp: int) -> int:
    """Tokens of each of the tensor-parallel ranks that share a sequence of so many.

    Raises UsageError if they cannot be shared evenly.
    """
    if context % tp:
        raise UsageError(
            f"tp {tp} does not divide a context of {context} tokens, which its ranks are to share",
            hint=f"context = {context - context % tp or tp}, or sequence_parallel = false",
            fields=["context", "sequence_parallel"],
        )
    return context // tp
