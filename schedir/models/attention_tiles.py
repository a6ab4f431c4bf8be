"""Tile sizes of windowed attention. Needs no torch."""

from __future__ import annotations

from typing import Final

from schedir.predict.window_tiles import Tiles, compute_tiles

# Queries and keys of a tile. On CPUs a tile fits in the caches and has few pairs that are masked.
# On GPUs it is the size of FlexAttention.
TILE_SIZE: Final = {"cpu": 64, "cuda": 128}


def compute_device_tiles(length: int, window: int, stride: int, device: str = "cpu") -> Tiles:
    """Return the tiles that windowed attention computes on a type of device, without dropout.

    Args:
        length: Tokens of the sequence.
        window: Tokens of the window.
        stride: Tokens by which the window moves.
        device: The device type, "cpu" or "cuda".

    Example:
        >>> found = compute_device_tiles(1024, 256, 64)
        >>> found.visited_count, found.dense_count
        (58, 136)
    """
    tile = TILE_SIZE[device]
    return compute_tiles(length, window, stride, q_tile=tile, kv_tile=tile, causal=True)
