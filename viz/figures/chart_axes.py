"""Place axes on a figure in inches, and draw the light grid of a chart of points or bars."""

from __future__ import annotations

from collections.abc import Collection

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def add_axes_with_margins(
    inner_size: tuple[float, float], left: float, top: float, right: float, bottom: float
) -> tuple[Figure, Axes, tuple[float, float]]:
    """Return a new figure, its axes, and its width and height. All lengths are in inches.

    Args:
        inner_size: The width and the height of the axes.
        left: The margin at the left.
        top: The margin above.
        right: The margin at the right.
        bottom: The margin below.
    """
    inner_width, inner_height = inner_size
    width, height = left + inner_width + right, top + inner_height + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes(
        (left / width, bottom / height, inner_width / width, inner_height / height)
    )
    return figure, axes, (width, height)


def draw_grid(axes: Axes, *, hidden_sides: Collection[str] = ("top", "right")) -> None:
    """Draw a light grid below the content of axes, and hide some sides of their frame.

    Args:
        axes: The axes. They have horizontal lines only if the left side is not hidden.
        hidden_sides: The sides to hide.
    """
    axes.tick_params(labelsize=7.5)
    axes.grid(axis="x" if "left" in hidden_sides else "both", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[[*hidden_sides]].set_visible(False)
