"""Count the tiles that windowed attention computes, and the saving.

The windows are those of Generalized Neighborhood Attention (Hassani et al., arXiv 2504.16922): each
query sees `window` keys around it, and the window moves every `stride` queries only.  Stride 1 is a
sliding window, and stride = window is blocked attention.  Attention computes tiles of queries by
tiles of keys, and what is masked in a tile that is visited is computed for nothing.
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
    """One dimension: which keys of a `length` each query sees.

    The queries of a stride share the window of one of them, their leader.

    - Not causal, the leader is the middle one, or the right one of two in the middle.
      `window // 2` keys of the window lie before it, and at the ends the window is shifted inwards,
      so that everybody sees as many.  This is section 3.1 of the paper; what it leaves open, of
      strides and windows that are even, is as in NATTEN, its implementation.
    - Causal, the leader is the last query of a stride, and the window ends with it; a query sees of
      that what is not behind itself: j <= i with j > leader - window.  The paper does not say this;
      NATTEN does it, but where a last stride is not full.  There it takes the last query for the
      leader, so what a query sees depends on how many come after it, and here it does not.

    A window longer than `length`, which NATTEN refuses, sees all if not causal; causal it does if
    it is not shorter than `length` rounded up to strides.

    Raises UsageError for what is no number from 1 on, and a stride longer than the window, which
    would leave keys that nobody sees.

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
                f"causal is True or False, not {describe(self.causal)}", fields=["causal"]
            )
        if self.stride > self.window:
            raise UsageError(
                f"stride {self.stride} is longer than window {self.window}: keys between two "
                "windows would be seen by nobody",
                fields=["stride", "window"],
            )

    @cached_property
    def visible_keys(self) -> tuple[Ints, Ints]:
        """By query, the first key that it sees, and the one behind the last."""
        query = np.arange(self.length)
        first = query // self.stride * self.stride
        if self.causal:
            return np.maximum(first + self.stride - self.window, 0), query + 1
        leader = first + self.stride // 2
        start = np.clip(leader - self.window // 2, 0, max(self.length - self.window, 0))
        return start, np.minimum(start + self.window, self.length)

    @property
    def dense_axis(self) -> Axis:
        """The same with a window over all."""
        return Axis(self.length, 2 * self.length, 1, self.causal)


@dataclass(frozen=True)
class AxisTiles:
    """One dimension in tiles, of so many queries and so many keys; the last ones may be cut off."""

    axis: Axis
    q_tile: int
    kv_tile: int

    def __post_init__(self) -> None:
        for name in ("q_tile", "kv_tile"):
            _require_number(name, getattr(self, name))

    @cached_property
    def _key_bounds(self) -> tuple[Ints, Ints, Ints, Ints]:
        """By query tile: the first key and the one behind the last that any of its queries sees,
        and that all of them do."""
        (start, end), at = self.axis.visible_keys, np.arange(0, self.axis.length, self.q_tile)
        least, most = np.minimum.reduceat, np.maximum.reduceat
        return least(start, at), most(end, at), most(start, at), least(end, at)

    @cached_property
    def visited_ranges(self) -> Ints:
        """By query tile, the first of the key tiles that it visits and the one behind the last.

        They are neighbours: windows of neighbouring strides touch, as no stride is longer.
        """
        first, last, _, _ = self._key_bounds
        return np.stack([first // self.kv_tile, -(-last // self.kv_tile)], 1)

    @cached_property
    def full_ranges(self) -> Ints:
        """The same of those in which each query sees each key."""
        _, _, first, last = self._key_bounds
        first = -(-first // self.kv_tile)
        last = np.where(last == self.axis.length, -(-last // self.kv_tile), last // self.kv_tile)
        return np.stack([first, np.maximum(first, last)], 1)

    @property
    def is_aligned(self) -> bool:
        """Whether windows begin and end between tiles; a causal one ends at the diagonal."""
        if not self.axis.causal:
            return bool(np.array_equal(self.visited_ranges, self.full_ranges))
        return bool((self._key_bounds[2] <= self.visited_ranges[:, 0] * self.kv_tile).all())

    @property
    def dense_tiles(self) -> AxisTiles:
        """The same tiles with a window over all."""
        return AxisTiles(self.axis.dense_axis, self.q_tile, self.kv_tile)


@dataclass(frozen=True)
class Tiles:
    """What windowed attention computes, in tiles of queries by tiles of keys: see `compute_tiles`.

    A query sees what it sees along each dimension, so numbers of tiles are products over these.
    """

    axes: tuple[AxisTiles, ...]

    @property
    def visited_count(self) -> int:
        """How many are computed."""
        return prod(int(_compute_sizes(a.visited_ranges).sum()) for a in self.axes)

    @property
    def dense_count(self) -> int:
        """How many are with windows over all, causal where these are."""
        return prod(int(_compute_sizes(a.dense_tiles.visited_ranges).sum()) for a in self.axes)

    @property
    def partial_count(self) -> int:
        """In how many of those that are computed anything is masked, be it for causality."""
        return self.visited_count - prod(
            int(_compute_sizes(a.full_ranges).sum()) for a in self.axes
        )

    @property
    def speedup(self) -> float:
        """Dense over visited: no kernel with such tiles gains more."""
        return self.dense_count / self.visited_count

    @property
    def worst_tile_speedup(self) -> float:
        """The same of the query tile that visits most: the paper's bound (appendix B.1)."""
        most = (
            (
                _compute_sizes(a.dense_tiles.visited_ranges).max(),
                _compute_sizes(a.visited_ranges).max(),
            )
            for a in self.axes
        )
        return prod(int(dense) / int(windowed) for dense, windowed in most)

    @property
    def pair_speedup(self) -> float:
        """Dense over windowed pairs of a query and a key that it sees: what tiles of one would
        gain; "FLOP-wise" in the paper."""
        return prod(_count_pairs(a.axis.dense_axis) / _count_pairs(a.axis) for a in self.axes)

    @property
    def is_block_sparse(self) -> bool:
        """Whether nothing is masked in any tile that is computed: "perfectly block-sparse" in the
        paper (section 3.2), and never causal, but in tiles of one."""
        return self.partial_count == 0

    @property
    def is_aligned(self) -> bool:
        """Whether no tile is cut by an end of a window; causal dimensions are masked at the
        diagonal only.

        It is if, along each dimension, q_tile and kv_tile divide the stride, and kv_tile the
        window; not causal, kv_tile divides the length and window // 2 - stride // 2, too.  These
        are our conditions for tiles that lie still; the paper's two, q_tile divides the stride and
        kv_tile the window, are for key tiles that begin where the window does.
        """
        return all(a.is_aligned for a in self.axes)

    @property
    def computed_pairs(self) -> int:
        """Pairs of a query and a key that are computed, seen or not; tiles that are cut off count
        whole."""
        return self.visited_count * prod(a.q_tile * a.kv_tile for a in self.axes)

    def visited_by(self, *index: int) -> tuple[range, ...]:
        """The key tiles that a query tile visits, along each dimension."""
        return tuple(
            range(*a.visited_ranges[i].tolist()) for a, i in zip(self.axes, index, strict=True)
        )

    @property
    def grid(self) -> NDArray[np.int8]:
        """Query tiles by key tiles, both in row-major order: 2 is computed and nothing in it is
        masked, 1 computed and masked in part, 0 not computed.  It is as large as it says."""
        visited = full = np.ones((1, 1), np.int8)
        for a in self.axes:
            tile = np.arange(-(-a.axis.length // a.kv_tile))
            here, all_of = (
                ((tile >= ends[:, :1]) & (tile < ends[:, 1:])).astype(np.int8)
                for ends in (a.visited_ranges, a.full_ranges)
            )
            visited, full = np.kron(visited, here), np.kron(full, all_of)
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
    """The tiles that windowed attention visits, along one dimension or several.

    `length` is one number, or one for each dimension; so is all else, where one number is for all.
    `q_tile` queries and `kv_tile` keys are computed at once; key tiles lie still ("static KV
    tiling" in the paper), and one of which no query of a tile sees any key is skipped.

    Raises UsageError as `Axis` does, and where numbers of dimensions differ.

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
    """Floating-point operations of a transformer layer's forward with these windows: 24 b s h^2 of
    its weights, and 4 b h V of its attention, where V is the `computed_pairs`; with V = s^2 these
    are those of the appendix of arXiv 2104.04473.  A backward takes twice as many.

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
    """A value for each dimension."""
    if not isinstance(value, tuple | list):
        return (value,) * (dimensions or 1)
    if not value or dimensions not in (None, len(value)):
        raise UsageError(
            f"{name} has {len(value)} numbers; there is one for each dimension of length",
            fields=[name],
        )
    return (*value,)


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise UsageError(f"{name} is a number from 1 on, not {describe(value)}", fields=[name])
