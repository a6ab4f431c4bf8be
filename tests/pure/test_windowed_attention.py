"""Tests of tiles of windowed attention against single queries and keys, and paper figures."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedir import viz
from schedir.errors import UsageError
from schedir.predict.window_tiles import Axis, compute_tiles


def is_visible(query: int, key: int, axis: Axis) -> bool:
    """Return whether a query sees a key, computed for the single pair.

    A window that is not causal has the left and right sides of NATTEN's fna_cutlass fusion.hpp.
    """
    window, stride, length = axis.window, axis.stride, axis.length
    if axis.causal:
        leader = (query // stride) * stride + stride - 1
        return key <= query and key > leader - window
    window = min(window, length)  # NATTEN refuses longer ones
    left_side, right_side = window // 2, window // 2 + window % 2 - 1
    leader = min((query // stride) * stride + stride // 2, length - 1)
    start = max(leader - left_side, 0)
    if leader + right_side >= length:
        start += length - right_side - leader - 1
    return start <= key < start + window


Case = tuple[Axis, int, int]


@st.composite
def cases(draw: st.DrawFn, max_length: int, causal: bool | None = None) -> Case:
    length, window = draw(st.integers(1, max_length)), draw(st.integers(1, max_length + 3))
    stride, flag = draw(st.integers(1, window)), draw(st.booleans())
    axis = Axis(length, window, stride, flag if causal is None else causal)
    return axis, draw(st.integers(1, max_length)), draw(st.integers(1, max_length))


def compute_grid_by_pairs(axis_cases: list[Case]) -> tuple[np.ndarray[Any, Any], int]:
    """Return the grid, and the number of seen pairs, by testing every query with every key."""
    lengths = [axis.length for axis, _, _ in axis_cases]
    counts = [[-(-axis.length // t) for t in tile_sizes] for axis, *tile_sizes in axis_cases]
    shape = tuple(prod(c[k] for c in counts) for k in (0, 1))
    any_visible, all_of = np.zeros(shape, bool), np.ones(shape, bool)
    pairs = 0
    for query in product(*map(range, lengths)):
        for key in product(*map(range, lengths)):
            is_pair_visible = all(
                is_visible(i, j, c[0]) for i, j, c in zip(query, key, axis_cases, strict=True)
            )
            row = column = 0
            for i, j, (_, q, kv), (rows, columns) in zip(
                query, key, axis_cases, counts, strict=True
            ):
                row, column = row * rows + i // q, column * columns + j // kv
            any_visible[row, column] |= is_pair_visible
            all_of[row, column] &= is_pair_visible
            pairs += is_pair_visible
    return any_visible.astype(int) + (any_visible & all_of), pairs


def compute_case_tiles(axis_cases: list[Case], **overrides: Any) -> Any:
    axes, q_tiles, kv_tiles = zip(*axis_cases, strict=True)
    options: dict[str, Any] = {"q_tile": q_tiles, "kv_tile": kv_tiles}
    options |= {name: [getattr(a, name) for a in axes] for name in ("length", "window", "stride")}
    return compute_tiles(causal=[a.causal for a in axes], **(options | overrides))


@given(
    st.one_of(
        cases(24).map(lambda one: [one]),
        st.lists(cases(6), min_size=2, max_size=2),
        st.lists(cases(3), min_size=3, max_size=3),
    )
)
def test_tiles_match_single_queries_and_keys(found: list[Case]) -> None:
    got = compute_case_tiles(found)
    grid, pairs = compute_grid_by_pairs(found)
    assert got.grid.tolist() == grid.tolist()
    assert got.visited_count == (grid > 0).sum() and got.partial_count == (grid == 1).sum()
    assert got.is_block_sparse == (1 not in grid)
    if len(found) == 1:
        assert [[*got.visited_by(row)[0]] for row in range(len(grid))] == [
            np.flatnonzero(row).tolist() for row in grid
        ]
    dense = [(Axis(axis.length, 99, 1, axis.causal), q, kv) for axis, q, kv in found]
    dense_grid, dense_pairs = compute_grid_by_pairs(dense)
    assert got.dense_count == (dense_grid > 0).sum()
    assert got.speedup == got.dense_count / got.visited_count
    assert got.worst_tile_speedup == (dense_grid > 0).sum(1).max() / (grid > 0).sum(1).max()
    assert got.pair_speedup == pytest.approx(dense_pairs / pairs)


@given(cases(30))
def test_query_sees_itself_and_full_window(one: Case) -> None:
    axis, _, _ = one
    start, end = axis.visible_keys
    query = np.arange(axis.length)
    assert ((start <= query) & (query < end)).all()
    if not axis.causal:  # windows shift inwards at the ends, so all queries see equally many keys
        assert set(end - start) == {min(axis.window, axis.length)}
    else:  # the leader of a stride sees the full window, except at the start
        full = axis.window if axis.length > axis.window else 0
        leaders = query[(query % axis.stride == axis.stride - 1) & (query >= full - 1)]
        assert ((end - start)[leaders] == np.minimum(axis.window, leaders + 1)).all()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_tiles_that_divide_window_are_aligned(
    kv: int, strides: int, windows: int, lengths: int, data: st.DataObject
) -> None:
    stride, window = kv * strides, kv * windows
    assume(stride <= window)
    q = data.draw(st.sampled_from([q for q in range(1, stride + 1) if stride % q == 0]))
    causal = data.draw(st.booleans())
    length = kv * lengths * windows + (data.draw(st.integers(0, 9)) if causal else 0)
    assume(causal or (window // 2 - stride // 2) % kv == 0)
    tiles = compute_tiles(length, window, stride, q_tile=q, kv_tile=kv, causal=causal)
    assert tiles.is_aligned
    assert tiles.is_block_sparse or causal


@given(cases(16))
def test_aligned_tiles_are_masked_only_at_diagonal(one: Case) -> None:
    axis, q, kv = one
    grid, _ = compute_grid_by_pairs([one])
    masked_by_the_window = any(
        grid[i // q, j // kv] and not is_visible(i, j, axis) and not (axis.causal and j > i)
        for i, j in product(range(axis.length), repeat=2)
    )
    assert compute_case_tiles([one]).is_aligned == (not masked_by_the_window)


# HunyuanVideo in arXiv 2504.16922: tokens, window, tiles, the share of attention in a run (Table
# 1), and by stride the speedups of its simulator from the end-to-end table.
VIDEO = {"length": (30, 48, 80), "window": (18, 24, 24), "q_tile": (4, 8, 8), "kv_tile": (2, 8, 8)}
SHARE = 0.607
END_TO_END = {
    (1, 1, 1): 1.73,
    (2, 1, 1): 1.78,
    (1, 1, 8): 1.99,
    (2, 1, 8): 2.02,
    (1, 8, 8): 2.17,
    (2, 8, 8): 2.20,
    (16, 8, 8): 2.23,
    (18, 24, 24): 2.06,
}


@pytest.mark.parametrize(("stride", "published"), END_TO_END.items())
def test_published_video_model_speedups(stride: tuple[int, ...], published: float) -> None:
    tiles = compute_tiles(stride=stride, **VIDEO)  # type: ignore[arg-type]
    gained = 1 / (1 - SHARE + SHARE / tiles.worst_tile_speedup)
    # The paper prints two decimals of the speedup, and three of the share.
    assert gained == pytest.approx(published, abs=0.011)
    assert tiles.is_block_sparse == (stride == (16, 8, 8))


def test_large_window_is_computed_cheaply() -> None:
    tiles = compute_tiles(
        (128, 128, 32), (40, 40, 8), (8, 8, 4), q_tile=(4, 8, 4), kv_tile=(2, 8, 4)
    )
    assert tiles.visited_count > 0 and tiles.pair_speedup > tiles.speedup > 1
    single = compute_tiles((128, 128, 32), (40, 40, 8), (8, 8, 4), q_tile=1, kv_tile=1)
    assert single.visited_count == 128 * 128 * 32 * 40 * 40 * 8


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"window": 0}, ["window"]),
        ({"window": -4}, ["window"]),
        ({"stride": 0}, ["stride"]),
        ({"stride": 5}, ["stride", "window"]),
        ({"length": 0}, ["length"]),
        ({"length": ()}, ["length"]),
        ({"length": (8, True)}, ["length"]),
        ({"length": (8, 8), "window": (4, 4, 4)}, ["window"]),
        ({"causal": (True, False)}, ["causal"]),
        ({"causal": "no"}, ["causal"]),
        ({"q_tile": 0}, ["q_tile"]),
        ({"kv_tile": 2.5}, ["kv_tile"]),
    ],
)
def test_invalid_windows_are_refused(given: dict[str, Any], fields: list[str]) -> None:
    usual: dict[str, Any] = {"length": 8, "window": 4, "stride": 2, "q_tile": 2, "kv_tile": 2}
    with pytest.raises(UsageError) as error:
        compute_tiles(**usual | given)
    assert [*error.value.fields] == fields


def test_picture_shows_each_tile() -> None:
    causal = compute_tiles(300, 64, 16, q_tile=32, kv_tile=16, causal=True)
    plane = compute_tiles((12, 8), (5, 4), (1, 4), q_tile=(4, 4), kv_tile=(4, 2))
    figure = viz.window_tiles(causal, plane)
    for axes, tiles in zip(figure.axes, (causal, plane), strict=True):
        (tile_image,) = axes.images
        kinds = np.asarray(tile_image.get_array())
        assert kinds.shape == tiles.grid.shape
        assert (np.maximum(kinds - 1, 0) == tiles.grid).all()
        assert (kinds > 0).sum() == tiles.dense_count
    large_tiles = compute_tiles(10**4, 64, q_tile=1, kv_tile=1)
    for wrong in ((), (causal, large_tiles)):
        with pytest.raises(UsageError):
            viz.window_tiles(*wrong)
