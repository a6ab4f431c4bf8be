"""Attention windows by layer.  Needs no torch."""

from __future__ import annotations

from typing import Protocol

from schedir.errors import UsageError, describe

PerLayer = int | tuple[int, ...]


class WindowedModelConfig(Protocol):
    """A configuration of a model whose layers may have windows: one number for all, or one for
    each, and 0 is none."""

    @property
    def layers(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def window(self) -> PerLayer: ...
    @property
    def stride(self) -> PerLayer: ...


def require_windows(config: WindowedModelConfig) -> None:
    """Raise UsageError for windows and strides that are none, or do not fit the layers."""
    for name, least in (("window", 0), ("stride", 1)):
        given = getattr(config, name)
        each = given if isinstance(given, tuple) else (given,)
        if isinstance(given, tuple) and len(given) != config.layers:
            raise UsageError(
                f"{name} has {len(given)} numbers for {config.layers} layers",
                hint="one number is for all layers",
                fields=[name, "layers"],
            )
        if wrong := [one for one in each if type(one) is not int or one < least]:
            raise UsageError(
                f"{name} is {describe(wrong[0])}; it must be a whole number of {least} or more",
                fields=[name],
            )
    pairs = _list_windows(config)
    for layer, (window, stride) in enumerate(pairs):
        if 0 < window < stride:
            raise UsageError(
                f"layer {layer} has stride {stride} and window {window}: keys between two "
                "windows would be seen by nobody",
                fields=["stride", "window"],
            )
    if not any(window for window, _ in pairs) and any(stride > 1 for _, stride in pairs):
        raise UsageError(
            f"stride is {describe(config.stride)}, and no layer has a window that it could move",
            hint="window = 256",
            fields=["stride", "window"],
        )


def get_windows(config: WindowedModelConfig) -> tuple[tuple[int, int] | None, ...]:
    """Window and stride of each layer; None of those that see all, as with a window that is no
    shorter than the context.

    >>> from schedir.models.llama_config import LlamaConfig
    >>> get_windows(LlamaConfig(layers=3, context=64, window=(16, 0, 64), stride=(4, 1, 1)))
    ((16, 4), None, None)
    """
    return tuple(
        (window, stride) if 0 < window < config.context else None
        for window, stride in _list_windows(config)
    )


def _list_windows(config: WindowedModelConfig) -> list[tuple[int, int]]:
    """Window and stride of each layer, as they are said."""
    windows, strides = (
        given if isinstance(given, tuple) else (given,) * config.layers
        for given in (config.window, config.stride)
    )
    return [*zip(windows, strides, strict=True)]
