"""Generate the page about windowed attention."""

from __future__ import annotations

from typing import Any

from docs.pages import define_page, format_table
from schedir import viz
from schedir.models.window_config import TILE_SIZE
from schedir.predict.window_tiles import Tiles, compute_tiles

LENGTH, WINDOW, STRIDES = 1024, 256, (1, 64, 256)
VIDEO: dict[str, Any] = {
    "length": (30, 48, 80),
    "window": (18, 24, 24),
    "q_tile": (4, 8, 8),
    "kv_tile": (2, 8, 8),
}


def count_tiles(stride: int) -> Tiles:
    tile = TILE_SIZE["cpu"]
    return compute_tiles(LENGTH, WINDOW, stride, q_tile=tile, kv_tile=tile, causal=True)


def build_blocks() -> dict[str, object]:
    """Return the visited tiles by stride, and those of the paper's video model."""
    rows = []
    for stride in STRIDES:
        tiles = count_tiles(stride)
        numbers = (WINDOW, stride, tiles.visited_count, tiles.dense_count, tiles.partial_count)
        rows.append([*map(str, numbers), f"{tiles.speedup:.2f} x"])
    head = ["window", "stride", "visited", "all tiles", "partly masked", "largest speedup"]
    sliding, strided = compute_tiles(stride=1, **VIDEO), compute_tiles(stride=(16, 8, 8), **VIDEO)
    example_tiles = count_tiles(64)
    return {
        "table": format_table(head, rows),
        "visited": example_tiles.visited_count,
        "dense": example_tiles.dense_count,
        "speedup": f"{example_tiles.speedup:.2f}",
        "of": example_tiles.visited_by(10),
        "sliding": f"{sliding.worst_tile_speedup:.1f} x",
        "strided": f"{strided.worst_tile_speedup:.1f} x",
        **TILE_SIZE,
    }


def draw_tiles() -> None:
    """Draw the tiles of each stride."""
    viz.save(viz.window_tiles(*map(count_tiles, STRIDES)), "windows.svg")


PAGES = define_page("explanation/windowed-attention", build_blocks, {"windows.svg": draw_tiles})
