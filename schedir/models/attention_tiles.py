"""Tile sizes of windowed attention.  Needs no torch."""

from __future__ import annotations

from typing import Final

from schedir.predict.window_tiles import Tiles, compute_tiles

# Queries and keys of a tile.  On CPUs: small enough for caches, and to cut little that is not seen;
# on GPUs FlexAttention's own.
TILE_SIZE: Final = {"cpu": 64, "cuda": 128}


def compute_device_tiles(length: int, window: int, stride: int, device: str = "cpu") -> Tiles:
    """The tiles that are computed on such a device, without dropout.

    >>> found = compute_device_tiles(1024, 256, 64)
    >>> found.visited_count, found.dense_count
    (58, 136)
    """
    tile = TILE_SIZE[device]
    return compute_tiles(length, window, stride, q_tile=tile, kv_tile=tile, causal=True)
