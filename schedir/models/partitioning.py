"""Divide a model among stages and tensor-parallel ranks. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from schedir.errors import UsageError, describe
from schedir.ir.cost.number_parsing import MAX_LAYERS, MAX_WIDTH


def require_positive(config: object, *names: str) -> None:
    """Raise an error if a field of a configuration is below 1 or too large.

    Args:
        config: The configuration.
        *names: The fields. A field with "layers" in its name is at most `MAX_LAYERS`. All other
            fields are at most `MAX_WIDTH`.

    Raises:
        UsageError: A field is no integer, or out of range.
    """
    for name in names:
        value = getattr(config, name)
        max_value = MAX_LAYERS if "layers" in name else MAX_WIDTH
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name} must be an integer, not {describe(value)}", fields=[name])
        if value < 1:
            raise UsageError(f"{name} is {describe(value)}; it must be 1 or more", fields=[name])
        if value > max_value:
            raise UsageError(
                f"{name} is {describe(value)}; it must be at most {max_value}", fields=[name]
            )


def split_layers(
    layers: int, stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Args:
        layers: Number of layers of the model.
        stages: The number of stages.
        layers_per_stage: An uneven division. Only the first and the last of several stages may have
            0 layers, because they have the embedding and the head. None means that the layers are
            divided evenly.

    Raises:
        UsageError: `layers_per_stage` does not fit the layers and the stages. Or it is None, and
            the layers cannot be divided evenly.

    Example:
        >>> split_layers(8, 4)
        (2, 2, 2, 2)
        >>> split_layers(10, 4, layers_per_stage=(2, 4, 4, 0))
        (2, 4, 4, 0)
    """
    field_names = ("layers", "ranks", "stages_per_rank", "placement")
    if stages < 1:
        raise UsageError(f"stages is {stages}; it must be 1 or more", fields=field_names)
    quotient, remainder = divmod(layers, stages)
    if layers_per_stage is None:
        if not quotient:
            raise UsageError(f"{layers} layers are fewer than {stages} stages", fields=field_names)
        if remainder:
            uneven_counts = [quotient + (stage < remainder) for stage in range(stages)]
            raise UsageError(
                f"{layers} layers cannot be divided by {stages} stages",
                hint=f"layers_per_stage {uneven_counts} divides the layers unevenly",
                fields=field_names,
            )
        return (quotient,) * stages
    if len(layers_per_stage) != stages or sum(layers_per_stage) != layers:
        raise UsageError(
            f"layers_per_stage is {tuple(layers_per_stage)}; it must have one number for each of "
            f"the {stages} stages, with the sum {layers}",
            fields=["layers_per_stage", *field_names],
        )
    if min(layers_per_stage) < 0 or 0 in layers_per_stage[1:-1]:
        raise UsageError(
            f"layers_per_stage is {tuple(layers_per_stage)}; only the first and the last stage may "
            "have 0 layers",
            fields=["layers_per_stage"],
        )
    return tuple(layers_per_stage)


def find_stage_layers(
    layers: int, stage: int, stages: int, layers_per_stage: Sequence[int] | None
) -> range:
    """Return the indices of the layers of a stage.

    Args:
        layers: Number of layers of the model.
        stage: The stage, from 0.
        stages: The number of stages.
        layers_per_stage: An uneven division, as for `split_layers`.

    Raises:
        UsageError: The stage does not exist, or the layers do not fit the stages.
    """
    counts = split_layers(layers, stages, layers_per_stage)
    if not 0 <= stage < stages:
        raise UsageError(f"stage is {stage}; it must be from 0 to {stages - 1}")
    first_layer = sum(counts[:stage])
    return range(first_layer, first_layer + counts[stage])


def split_heads(heads: int, tp: int, subject: str = "heads", field: str = "heads") -> int:
    """Return the number of heads per tensor-parallel rank.

    Args:
        heads: The number of heads.
        tp: The tensor-parallel size.
        subject: The kind of heads, for the error message.
        field: The name of the field with the number of heads, for the error.

    Raises:
        UsageError: `tp` does not divide the heads.
    """
    if heads % tp:
        raise UsageError(f"tp {tp} does not divide {heads} {subject}", fields=["tp", field])
    return heads // tp


def split_tokens(context: int, tp: int) -> int:
    """Return the number of tokens per rank with sequence parallelism.

    Args:
        context: Number of tokens of the sequence.
        tp: The tensor-parallel size.

    Raises:
        UsageError: `tp` does not divide the tokens.
    """
    if context % tp:
        raise UsageError(
            f"tp {tp} does not divide the context of {context} tokens (for sequence_parallel)",
            hint=f"context = {context - context % tp or tp}, or sequence_parallel = false",
            fields=["context", "sequence_parallel"],
        )
    return context // tp
