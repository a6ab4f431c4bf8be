"""Count the tiles that windowed attention computes, and the operations that it saves.

The windows are defined as in Generalized Neighborhood Attention (Hassani et al., arXiv 2504.16922).
Each query attends to `window` keys around it, and the window moves only every `stride` queries.
Stride 1 is a sliding window, and stride = window is blocked attention. Attention computes tiles of
queries by tiles of keys. Masked pairs in a tile that is computed are wasted work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError, describe

Ints = NDArray[np.int64]
PerDimension = int | Sequence[int]


@dataclass(frozen=True)
class Axis:
    """The keys that each query attends to along one dimension.

    Each group of `stride` consecutive queries has a leader. All queries of the group share the
    window of the leader.

    - Not causal: the leader is the middle query of the group. If the group has an even number of
      queries, the leader is the right one of the two middle queries. `window // 2` keys of the
      window come before the leader. At both ends of the dimension the window is shifted inwards, so
      that each query attends to the same number of keys. This rule is from section 3.1 of the
      paper. The paper does not define even strides and windows. For these, this class follows
      NATTEN, the paper's implementation.
    - Causal: the leader is the last query of the group, and the window ends with it. A query i
      attends to the keys j of this window up to itself: j <= i and j > leader - window. The paper
      does not define this case. NATTEN does the same, except in a last group that is not full. In
      such a group, NATTEN's leader is the last query of the sequence, so the keys of a query depend
      on the number of queries after it.

    NATTEN refuses a window longer than `length`. This class allows such a window. If the window is
    not causal, it contains all keys. Let n be `length`, rounded up to a multiple of the stride. A
    causal window of at least n keys contains all earlier keys.

    Args:
        length: The number of queries and of keys.
        window: The number of keys in a window.
        stride: The number of consecutive queries that share a window.
        causal: True if a query attends only to itself and earlier keys.

    Raises:
        UsageError: A number is not an integer of at least 1, or `stride` is longer than `window`.
            With such a stride, no query would attend to the keys between two windows.

    Example:
        >>> Axis(8, window=4, stride=2, causal=True).visible_keys[0].tolist()
        [0, 0, 0, 0, 2, 2, 4, 4]
        >>> Axis(8, window=4, stride=2).visible_keys[0].tolist()
        [0, 0, 1, 1, 3, 3, 4, 4]
    """

    length: int
    window: int
    stride: int = 1
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "window", "stride"):
            _require_number(name, getattr(self, name))
        if not isinstance(self.causal, bool):
            raise UsageError(
                f"causal must be True or False, not {describe(self.causal)}", fields=["causal"]
            )
        if self.stride > self.window:
            raise UsageError(
                f"stride must be at most window ({self.window}), not {self.stride}: no query "
                "would see the keys between two windows",
                fields=["stride", "window"],
            )

    @cached_property
    def visible_keys(self) -> tuple[Ints, Ints]:
        """The first key and the last key plus 1 of each query, as two arrays of shape (length,)."""
        query = np.arange(self.length)
        group_start = query // self.stride * self.stride
        if self.causal:
            return np.maximum(group_start + self.stride - self.window, 0), query + 1
        leader = group_start + self.stride // 2
        start = np.clip(leader - self.window // 2, 0, max(self.length - self.window, 0))
        return start, np.minimum(start + self.window, self.length)

    @property
    def dense_axis(self) -> Axis:
        """The same dimension with a window over all keys."""
        return Axis(self.length, 2 * self.length, 1, self.causal)


@dataclass(frozen=True)
class AxisTiles:
    """One dimension divided into tiles. The last tiles may be incomplete.

    Args:
        axis: The dimension.
        q_tile: Number of queries in a tile.
        kv_tile: Number of keys in a tile.

    Raises:
        UsageError: A number is not an integer of at least 1.
    """

    axis: Axis
    q_tile: int
    kv_tile: int

    def __post_init__(self) -> None:
        for name in ("q_tile", "kv_tile"):
            _require_number(name, getattr(self, name))

    @cached_property
    def _key_bounds(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Four bounds of keys for each query tile.

        The first two results bound the keys that at least one query of the tile attends to. The
        last two results bound the keys that all queries of the tile attend to.
        """
        start, end = self.axis.visible_keys
        tile_starts = np.arange(0, self.axis.length, self.q_tile)
        minimum, maximum = np.minimum.reduceat, np.maximum.reduceat
        return (
            minimum(start, tile_starts),
            maximum(end, tile_starts),
            maximum(start, tile_starts),
            minimum(end, tile_starts),
        )

    @cached_property
    def visited_ranges(self) -> Ints:
        """The first key tile and the last key tile plus 1 of each query tile, shape (n, 2).

        These are the key tiles that are computed. They are consecutive, because no stride is longer
        than the window, so there are no keys between consecutive windows.
        """
        first, last, _, _ = self._key_bounds
        return np.stack([first // self.kv_tile, -(-last // self.kv_tile)], 1)

    @cached_property
    def full_ranges(self) -> Ints:
        """The same as `visited_ranges`, for the key tiles without a masked (query, key) pair."""
        _, _, first_key, last_key = self._key_bounds
        first_tile = -(-first_key // self.kv_tile)
        last_tile = np.where(
            last_key == self.axis.length, -(-last_key // self.kv_tile), last_key // self.kv_tile
        )
        return np.stack([first_tile, np.maximum(first_tile, last_tile)], 1)

    @property
    def is_aligned(self) -> bool:
        """Return whether windows begin (and non-causal windows also end) at tile boundaries."""
        if not self.axis.causal:
            return bool(np.array_equal(self.visited_ranges, self.full_ranges))
        return bool((self._key_bounds[2] <= self.visited_ranges[:, 0] * self.kv_tile).all())

    @property
    def dense_tiles(self) -> AxisTiles:
        """The same tiles with a window over all keys."""
        return AxisTiles(self.axis.dense_axis, self.q_tile, self.kv_tile)


@dataclass(frozen=True)
class Tiles:
    """The tiles of windowed attention, as `compute_tiles` returns them.

    A query attends to a key if it attends to this key along each dimension. So the number of tiles
    is the product of the numbers of tiles along each dimension.

    Args:
        axes: The tiles along each dimension.
    """

    axes: tuple[AxisTiles, ...]

    @property
    def visited_count(self) -> int:
        """The number of tiles that are computed."""
        return prod(int(_compute_sizes(a.visited_ranges).sum()) for a in self.axes)

    @property
    def dense_count(self) -> int:
        """The number of tiles that are computed if windows include all keys.

        Causal dimensions stay causal.
        """
        return prod(int(_compute_sizes(a.dense_tiles.visited_ranges).sum()) for a in self.axes)

    @property
    def partial_count(self) -> int:
        """The number of computed tiles in which a (query, key) pair is masked."""
        return self.visited_count - prod(
            int(_compute_sizes(a.full_ranges).sum()) for a in self.axes
        )

    @property
    def speedup(self) -> float:
        """`dense_count` / `visited_count`: the largest speedup that these tiles allow."""
        return self.dense_count / self.visited_count

    @property
    def worst_tile_speedup(self) -> float:
        """The speedup of the query tile with most computed tiles (the bound in appendix B.1)."""
        max_tiles = (
            (
                _compute_sizes(a.dense_tiles.visited_ranges).max(),
                _compute_sizes(a.visited_ranges).max(),
            )
            for a in self.axes
        )
        return prod(int(dense) / int(windowed) for dense, windowed in max_tiles)

    @property
    def pair_speedup(self) -> float:
        """The number of dense (query, key) pairs divided by the number of windowed pairs.

        This is the speedup with tiles of size 1. The paper calls it "FLOP-wise".
        """
        return prod(_count_pairs(a.axis.dense_axis) / _count_pairs(a.axis) for a in self.axes)

    @property
    def is_block_sparse(self) -> bool:
        """Return whether no computed tile has a masked pair.

        The paper calls this "perfectly block-sparse" (section 3.2). Causal attention is
        block-sparse only with tiles of size 1.
        """
        return self.partial_count == 0

    @property
    def is_aligned(self) -> bool:
        """Return whether all windows begin and end at boundaries of tiles.

        A causal dimension may be masked at the diagonal. A causal dimension is aligned if `q_tile`
        and `kv_tile` divide the stride, and `kv_tile` divides the window. For a dimension that is
        not causal, `kv_tile` must also divide the length and `window // 2 - stride // 2`.

        These conditions are for key tiles at fixed positions. The paper has only two conditions:
        `q_tile` divides the stride, and `kv_tile` divides the window. These two conditions are for
        key tiles that begin where the window begins.
        """
        return all(a.is_aligned for a in self.axes)

    @property
    def computed_pairs(self) -> int:
        """The number of (query, key) pairs in computed tiles, including masked pairs.

        Incomplete tiles are counted as complete tiles.
        """
        return self.visited_count * prod(a.q_tile * a.kv_tile for a in self.axes)

    def visited_by(self, *index: int) -> tuple[range, ...]:
        """Return the key tiles that are computed for a query tile, along each dimension.

        Args:
            *index: The index of the query tile along each dimension.
        """
        return tuple(
            range(*a.visited_ranges[i].tolist()) for a, i in zip(self.axes, index, strict=True)
        )

    @property
    def grid(self) -> NDArray[np.int8]:
        """The state of each query tile and key tile: 2 for full, 1 for masked, 0 for skipped.

        In a full tile, no (query, key) pair is masked. In a masked tile, some pairs are masked. A
        skipped tile is not computed. The shape is (query tiles, key tiles), each in row-major order
        over the dimensions. The array may be very large.
        """
        visited = full = np.ones((1, 1), np.int8)
        for a in self.axes:
            tile = np.arange(-(-a.axis.length // a.kv_tile))
            visited_axis, full_axis = (
                ((tile >= ends[:, :1]) & (tile < ends[:, 1:])).astype(np.int8)
                for ends in (a.visited_ranges, a.full_ranges)
            )
            visited = np.kron(visited, visited_axis)
            full = np.kron(full, full_axis)
        return visited + full


def compute_tiles(
    length: PerDimension,
    window: PerDimension,
    stride: PerDimension = 1,
    *,
    q_tile: PerDimension,
    kv_tile: PerDimension,
    causal: bool | Sequence[bool] = False,
) -> Tiles:
    """Return the tiles that windowed attention computes, along one or several dimensions.

    Each argument is one number for all dimensions, or a sequence with one number for each
    dimension. Key tiles have fixed positions ("static KV tiling" in the paper). For a query tile, a
    key tile is skipped if no query of the tile attends to any of its keys.

    Args:
        length: The number of queries and of keys: one number for each dimension.
        window: The number of keys in a window.
        stride: The number of consecutive queries that share a window.
        q_tile: Number of queries in a tile.
        kv_tile: Number of keys in a tile.
        causal: True if a query attends only to itself and earlier keys.

    Raises:
        UsageError: `Axis` refuses a number, or an argument has a different number of dimensions
            than `length`.

    Example:
        The paper's video model, with a sliding window and with a stride (Figure 3):

        >>> video = {"q_tile": (4, 8, 8), "kv_tile": (2, 8, 8)}
        >>> sliding = compute_tiles((30, 48, 80), (18, 24, 24), **video)
        >>> f"{sliding.worst_tile_speedup:.1f} of {sliding.pair_speedup:.1f}"
        '3.3 of 11.1'
        >>> strided = compute_tiles((30, 48, 80), (18, 24, 24), (16, 8, 8), **video)
        >>> f"{strided.worst_tile_speedup:.1f}", strided.is_block_sparse
        ('11.1', True)

        A causal GPT, over one dimension:

        >>> gpt = compute_tiles(4096, 256, 64, q_tile=64, kv_tile=64, causal=True)
        >>> gpt.visited_count, gpt.dense_count, f"{gpt.speedup:.2f}", gpt.is_aligned
        (250, 2080, '8.32', True)
        >>> gpt.visited_by(10)
        (range(7, 11),)
    """
    lengths = _to_dimensions("length", length, None)
    n = len(lengths)
    windows, strides, q_tiles, kv_tiles = (
        _to_dimensions(name, value, n)
        for name, value in (
            ("window", window), ("stride", stride), ("q_tile", q_tile), ("kv_tile", kv_tile)
        )
    )  # fmt: skip
    flags = _to_dimensions("causal", causal, n)
    axes = map(Axis, lengths, windows, strides, flags)
    return Tiles(tuple(map(AxisTiles, axes, q_tiles, kv_tiles)))


def count_layer_flops(attention_tiles: Tiles, hidden: int, microbatch_size: int = 1) -> float:
    """Return the floating-point operations of the forward of a layer with windowed attention.

    For b sequences of s tokens and hidden size h, the products with weights take 24 b s h^2
    operations. The attention takes 4 b h V operations, where V is `computed_pairs`. With V = s^2,
    this is the formula in the appendix of arXiv 2104.04473. A backward takes twice as many
    operations.

    Args:
        attention_tiles: The tiles of the attention.
        hidden: Hidden size.
        microbatch_size: Number of sequences in a microbatch.

    Example:
        >>> gpt = compute_tiles(4096, 256, 64, q_tile=64, kv_tile=64, causal=True)
        >>> f"{count_layer_flops(gpt, 1024) / 1e9:.1f} GFLOP"
        '107.3 GFLOP'
    """
    tokens = prod(a.axis.length for a in attention_tiles.axes)
    return (
        24.0 * microbatch_size * tokens * hidden**2
        + 4.0 * microbatch_size * hidden * attention_tiles.computed_pairs
    )


def _compute_sizes(ends: Ints) -> Ints:
    sizes: Ints = ends[:, 1] - ends[:, 0]
    return sizes


def _count_pairs(axis: Axis) -> int:
    start, end = axis.visible_keys
    return int((end - start).sum())


def _to_dimensions(name: str, value: Any, dimensions: int | None) -> tuple[Any, ...]:
    """Return a value for each dimension."""
    if not isinstance(value, tuple | list):
        return (value,) * (dimensions or 1)
    if not value or dimensions not in (None, len(value)):
        raise UsageError(
            f"{name} has {len(value)} numbers, but needs one for each dimension of length",
            fields=[name],
        )
    return (*value,)


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UsageError(f"{name} must be an int >= 1, not {describe(value)}", fields=[name])
