"""The page about windows of attention: see `generate.py`."""

from __future__ import annotations

from typing import Any

from docs.pages import page, table
from schedir import viz
from schedir.models.attention_tiles import TILE
from schedir.predict.window_tiles import Tiles, tiles

LENGTH, WINDOW, STRIDES = 1024, 256, (1, 64, 256)
VIDEO: dict[str, Any] = {
    "length": (30, 48, 80),
    "window": (18, 24, 24),
    "q_tile": (4, 8, 8),
    "kv_tile": (2, 8, 8),
}


def found(stride: int) -> Tiles:
    tile = TILE["cpu"]
    return tiles(LENGTH, WINDOW, stride, q_tile=tile, kv_tile=tile, causal=True)


def blocks() -> dict[str, object]:
    """The tiles that are visited, by stride, and those of the paper's video model."""
    rows = []
    for stride in STRIDES:
        one = found(stride)
        numbers = (WINDOW, stride, one.visited, one.dense, one.partial)
        rows.append([*map(str, numbers), f"{one.speedup:.2f} x"])
    head = ["window", "stride", "tiles visited", "of", "masked in part", "at most"]
    sliding, strided = tiles(stride=1, **VIDEO), tiles(stride=(16, 8, 8), **VIDEO)
    usual = found(64)
    return {
        "table": table(head, rows),
        "visited": usual.visited,
        "dense": usual.dense,
        "speedup": f"{usual.speedup:.2f}",
        "of": usual.of(10),
        "sliding": f"{sliding.speedup_of_worst:.1f} x",
        "strided": f"{strided.speedup_of_worst:.1f} x",
        "pairs": f"{strided.speedup_of_pairs:.1f} x",
        **TILE,
    }


def picture() -> None:
    """Draw the tiles of each stride."""
    viz.save(viz.window_tiles(*map(found, STRIDES)), "windows.svg")


PAGES = page("windows", blocks, {"windows.svg": picture})
