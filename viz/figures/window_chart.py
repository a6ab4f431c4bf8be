"""Draw the tiles that windowed attention computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from schedir.errors import UsageError
from schedir.predict.window_tiles import Tiles

_TILE_COLORS: Final = {
    "not computed with any window": "#ffffff",
    "skipped": "#e4e4e4",
    "computed, masked in part": "#8fc3e0",
    "computed, nothing masked": "#0072b2",
}
_MAX_TILES: Final = 2**22  # tiles of a panel; a picture cannot show more
_PANEL_SIZE: Final = 2.6  # inches


def window_tiles(*tile_sets: Tiles) -> Figure:
    """Draw the tiles that attention computes and skips, with a panel for each argument.

    The rows of a panel are query tiles, and the columns are key tiles. If attention has several
    dimensions, as in an image, the tiles are in row-major order over the dimensions.

    Args:
        *tile_sets: The tiles of each panel.

    Returns:
        The figure.

    Raises:
        UsageError: There are no tiles, or more than 2**22 in a panel.

    Example:
        >>> import schedir
        >>> from schedir.predict.window_tiles import compute_tiles
        >>> strided = compute_tiles(1024, 256, 64, q_tile=64, kv_tile=64, causal=True)
        >>> figure = schedir.viz.window_tiles(strided)
        >>> print(figure.axes[0].get_title())
        window 256, stride 64
        58 of 136 tiles: 2.34 x
    """
    if not tile_sets:
        raise UsageError("tile_sets is empty", hint="schedir.predict.window_tiles.compute_tiles")
    figure = Figure(
        figsize=(_PANEL_SIZE * len(tile_sets) + 0.4, _PANEL_SIZE + 1.0), layout="constrained"
    )
    colors = ListedColormap([*_TILE_COLORS.values()])
    for axes, tiles in zip(
        figure.subplots(1, len(tile_sets), squeeze=False)[0], tile_sets, strict=True
    ):
        rows, columns = _measure_grid(tiles)
        if rows * columns > _MAX_TILES:
            raise UsageError(
                f"{rows} x {columns} tiles are too many for a picture, which can have at most "
                f"{_MAX_TILES}",
                fields=["tile_sets"],
            )
        is_dense = replace(tiles, axes=tuple(axis.dense_tiles for axis in tiles.axes)).grid > 0
        kinds = tiles.grid + is_dense
        axes.imshow(
            kinds,
            cmap=colors,
            vmin=0,
            vmax=3,
            interpolation="nearest",
            extent=(0, columns, rows, 0),
        )
        for tile_count, axis in ((columns, axes.xaxis), (rows, axes.yaxis)):
            axis.set_major_locator(MaxNLocator(8, integer=True))
            if max(rows, columns) <= 64:
                axis.set_minor_locator(FixedLocator(range(tile_count + 1)))
                axis.grid(which="both", color="white", linewidth=0.5)
        axes.tick_params(which="both", length=0, labelsize=7)
        axes.set_xlabel("key tile", fontsize=8)
        axes.set_ylabel("query tile", fontsize=8)
        axes.set_title(_format_title(tiles), fontsize=8)
    patches = [Patch(facecolor=color, label=kind) for kind, color in [*_TILE_COLORS.items()][1:]]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return figure


def _measure_grid(tiles: Tiles) -> tuple[int, int]:
    rows = columns = 1
    for a in tiles.axes:
        rows *= len(a.visited_ranges)
        columns *= -(-a.axis.length // a.kv_tile)
    return rows, columns


def _format_title(tiles: Tiles) -> str:
    def format_numbers(numbers: Sequence[int]) -> str:
        return " x ".join(map(str, numbers))

    window, stride = ([getattr(a.axis, name) for a in tiles.axes] for name in ("window", "stride"))
    return (
        f"window {format_numbers(window)}, stride {format_numbers(stride)}\n"
        f"{tiles.visited_count} of {tiles.dense_count} tiles: {tiles.speedup:.2f} x"
    )
