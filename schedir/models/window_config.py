"""Attention windows by layer, and the tiles of windowed attention. Needs no torch."""

from __future__ import annotations

from typing import Final, Protocol

from schedir.errors import UsageError, describe
from schedir.predict.window_tiles import Tiles, compute_tiles

PerLayer = int | tuple[int, ...]


class WindowedModelConfig(Protocol):
    """A configuration of a model with attention windows.

    `window` and `stride` are one number for all layers, or a tuple with one number for each layer.
    Layers with a window of 0 attend to all earlier tokens.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def context(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def window(self) -> PerLayer:
        """Number of tokens in the window. 0 is all earlier tokens."""

    @property
    def stride(self) -> PerLayer:
        """Number of tokens by which the window moves."""


def require_windows(config: WindowedModelConfig) -> None:
    """Raise an error if the windows or strides of a configuration are invalid.

    Args:
        config: The configuration.

    Raises:
        UsageError: A number is out of range, a tuple does not have a number for each layer, a
            stride is longer than its window, or there are strides without a window.
    """
    for name, min_value in (("window", 0), ("stride", 1)):
        setting = getattr(config, name)
        numbers = setting if isinstance(setting, tuple) else (setting,)
        if isinstance(setting, tuple) and len(setting) != config.layers:
            raise UsageError(
                f"{name} has {len(setting)} numbers for {config.layers} layers",
                hint="give one number for each layer, or a single number for all",
                fields=[name, "layers"],
            )
        invalid = [number for number in numbers if type(number) is not int or number < min_value]
        if invalid:
            raise UsageError(
                f"{name} is {describe(invalid[0])}; it must be an integer of {min_value} or more",
                fields=[name],
            )
    pairs = _list_windows(config)
    for layer, (window, stride) in enumerate(pairs):
        if 0 < window < stride:
            raise UsageError(
                f"layer {layer} has stride {stride} and window {window}, but stride must not be "
                "larger than window; otherwise no query attends to some of the keys",
                fields=["stride", "window"],
            )
    if not any(window for window, _ in pairs) and any(stride > 1 for _, stride in pairs):
        raise UsageError(
            f"stride is {describe(config.stride)}, but no layer has a window",
            hint="set window, such as window = 256",
            fields=["stride", "window"],
        )


def get_windows(config: WindowedModelConfig) -> tuple[tuple[int, int] | None, ...]:
    """Return the window and the stride of each layer.

    Args:
        config: The configuration.

    Returns:
        (window, stride) for each layer. None for a layer without a window, or with a window that is
        at least as long as the context.

    Example:
        >>> from schedir.models.llama_config import LlamaConfig
        >>> get_windows(LlamaConfig(layers=3, context=64, window=(16, 0, 64), stride=(4, 1, 1)))
        ((16, 4), None, None)
    """
    return tuple(
        (window, stride) if 0 < window < config.context else None
        for window, stride in _list_windows(config)
    )


def _list_windows(config: WindowedModelConfig) -> list[tuple[int, int]]:
    """Return the configured window and stride of each layer."""
    windows, strides = (
        setting if isinstance(setting, tuple) else (setting,) * config.layers
        for setting in (config.window, config.stride)
    )
    return [*zip(windows, strides, strict=True)]


# The number of queries of a tile, which is also the number of its keys. On CPUs a tile of this size
# fits in the caches and has few masked pairs. On GPUs it is the block size of FlexAttention.
TILE_SIZE: Final = {"cpu": 64, "cuda": 128}


def compute_device_tiles(length: int, window: int, stride: int, device: str = "cpu") -> Tiles:
    """Return the tiles that windowed attention computes on a type of device, without dropout.

    Args:
        length: Number of tokens of the sequence.
        window: Number of tokens of the window.
        stride: Number of tokens by which the window moves.
        device: The device type, "cpu" or "cuda".

    Example:
        >>> found = compute_device_tiles(1024, 256, 64)
        >>> found.visited_count, found.dense_count
        (58, 136)
    """
    tile = TILE_SIZE[device]
    return compute_tiles(length, window, stride, q_tile=tile, kv_tile=tile, causal=True)
