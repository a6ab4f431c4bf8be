"""Tests of windowed attention in tiles against full attention with a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from schedir.errors import UsageError
from schedir.models.attention import attention, build_block_mask, build_window_mask
from schedir.models.window_config import compute_device_tiles
from schedir.predict.window_tiles import Axis

torch.set_num_threads(1)
CPU = torch.device("cpu")


Heads = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_heads(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Heads:
    """Return q, k and v as views of one tensor, as in the GPT, and a gradient of the output."""
    numbers = torch.Generator().manual_seed(seed)
    qkv = torch.randn(2, length, 3, 3, 8, generator=numbers, dtype=dtype)
    grad = torch.randn(2, 3, length, 8, generator=numbers, dtype=dtype)
    q, k, v = (x.detach().requires_grad_() for x in qkv.permute(3, 0, 2, 1, 4))
    return q, k, v, grad


def run_attention(function: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out = function(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def make_masked_attention(mask: Tensor, dropout: float = 0.0) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

    return run


def make_windowed_attention(window: int, stride: int, dropout: float = 0.0) -> Any:
    return lambda q, k, v: attention(q, k, v, (window, stride), dropout)


def assert_near(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        error = (one.double() - other.double()).norm()
        assert bool(error <= limit * (1 + other.double().norm())), error


def assert_equals_masked_attention(
    length: int, window: tuple[int, int], dtype: torch.dtype, limit: float
) -> None:
    masked = make_masked_attention(build_window_mask(length, *window))
    got, want = (
        run_attention(function, *draw_heads(length, dtype))
        for function in (make_windowed_attention(*window), masked)
    )
    assert_near(got, want, limit)


window_strategy = st.integers(1, 300).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w)))
WINDOWS = [(1, 1), (16, 1), (64, 64), (100, 7), (128, 64), (130, 130), (256, 32), (300, 1)]


@given(st.integers(1, 300), window_strategy)
def test_mask_matches_cost_model(length: int, window: tuple[int, int]) -> None:
    start, end = Axis(length, *window, causal=True).visible_keys
    key = np.arange(length)
    visible = (key >= start[:, None]) & (key < end[:, None])
    assert (build_window_mask(length, *window).numpy() == visible).all()


@pytest.mark.parametrize("length", [1, 64, 200, 257])
@pytest.mark.parametrize("window", WINDOWS)
def test_tiled_attention_equals_masked_attention(length: int, window: tuple[int, int]) -> None:
    assert_equals_masked_attention(length, window, torch.float64, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiled_attention_in_low_precision(dtype: torch.dtype) -> None:
    assert_equals_masked_attention(200, (100, 7), dtype, torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("length", [1, 63, 256, 300])
def test_full_window_equals_causal_attention(length: int) -> None:
    got, want = (
        run_attention(function, *draw_heads(length, torch.float32))
        for function in (make_windowed_attention(320, 64), attention)
    )
    assert_near(got, want, 1e-6)


def test_attention_does_not_depend_on_later_tokens() -> None:
    q, k, v, _ = draw_heads(300)
    full = attention(q, k, v, (100, 64))
    for length in (1, 99, 130, 299):
        first = (x[:, :, :length] for x in (q, k, v))
        part = make_windowed_attention(100, 64)(*first)
        assert_near([part], [full[:, :, :length]], 1e-12)


@pytest.mark.parametrize("window", [None, (64, 16), (100, 7)])
@pytest.mark.parametrize(("groups", "dropout"), [(1, 0.0), (3, 0.0), (3, 0.3)])
def test_grouped_query_attention_equals_repeated_keys(
    window: Any, groups: int, dropout: float
) -> None:
    """The reference repeats each key head, so its gradient is a sum over query heads."""
    numbers = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 200, 8) for heads in (6, groups, groups)]
    q, k, v, grad = (
        torch.randn(s, generator=numbers, dtype=torch.float64) for s in (*shapes, shapes[0])
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = torch.ones(200, 200).bool().tril() if window is None else build_window_mask(200, *window)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, window, dropout)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(6 // groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)

    results = []
    for function in (grouped, repeated):
        torch.manual_seed(1)
        results.append(run_attention(function, q, k, v, grad))
    assert_near(results[0], results[1], 1e-12)


@pytest.mark.parametrize("window", [None, (4, 2)])
@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (2, 6, 8, 8), (2, 6, 9, 4), (1, 6, 9, 8)])
def test_mismatched_head_shapes_are_refused(shape: Any, window: Any) -> None:
    q, k = torch.zeros(2, 6, 9, 8), torch.zeros(shape)
    for other in (k, q):
        with pytest.raises(UsageError):
            attention(q, other, k, window)


def test_attention_accepts_any_memory_layout() -> None:
    tensors = draw_heads(200)
    heads, grad = tensors[:3], tensors[3]
    q, k, v = (
        x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in heads
    )
    windowed = make_windowed_attention(64, 16)
    got = run_attention(windowed, q, k, v, grad.new_ones(()).expand_as(grad))
    assert_near(got, run_attention(windowed, *heads, torch.ones_like(grad)), 1e-12)


def test_window_does_not_change_saved_bytes() -> None:
    def count_saved_bytes(window: tuple[int, int] | None) -> int:
        bytes_by_storage: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            bytes_by_storage[storage._cdata] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*draw_heads(512, torch.float32)[:3], window)
        del out
        return sum(bytes_by_storage.values())

    assert count_saved_bytes((128, 32)) == count_saved_bytes(None) > 0


def test_dropout_equals_dropout_of_masked_attention() -> None:
    results = []
    for function in (
        make_windowed_attention(64, 16, 0.4),
        make_masked_attention(build_window_mask(200, 64, 16), 0.4),
    ):
        torch.manual_seed(3)
        results.append(run_attention(function, *draw_heads(200)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not torch.equal(results[0][0], make_windowed_attention(64, 16)(*draw_heads(200)[:3]))


@pytest.mark.parametrize(("length", "window"), [(1024, (256, 64)), (700, (100, 7)), (90, (64, 1))])
def test_block_mask_equals_flex_attention_mask(length: int, window: tuple[int, int]) -> None:
    got = build_block_mask(length, *window, CPU)
    mask = build_window_mask(length, *window)

    def is_visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[query, key]

    want = create_block_mask(is_visible, None, None, length, length, "cpu", BLOCK_SIZE=128)
    assert torch.equal(got.to_dense(), want.to_dense())
    grid = torch.from_numpy(compute_device_tiles(length, *window, "cuda").grid)
    assert torch.equal(got.to_dense()[0, 0] > 0, grid > 0)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    positions = torch.arange(length)
    assert torch.equal(got.mask_mod(positions, positions, positions[:, None], positions), mask)
