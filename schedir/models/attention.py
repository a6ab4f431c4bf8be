"""Causal attention, over all earlier tokens or over a window of earlier tokens.

The windows are defined as in Generalized Neighborhood Attention (Hassani et al., arXiv 2504.16922),
in its causal form with one dimension. Query i attends to keys j with leader - window < j <= i. Each
group of `stride` queries has one leader, its last query: i // stride * stride + stride - 1. The
keys of a query do not depend on the number of later tokens. A tile is a block of queries and a
block of keys. `schedir.predict.window_tiles` finds the tiles in which a query attends to a key. All
other tiles are skipped. On CPUs, torch's flash attention operation runs for one tile of queries at
a time, with the keys of this tile. On GPUs, FlexAttention skips the tiles. Neither of these two
implementations supports dropout. With dropout, the attention computes the scores of all pairs and
masks them. The same happens on GPUs without Triton, and for heads that are too narrow for
FlexAttention.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from schedir.errors import UsageError
from schedir.kernels.backend_choice import uses_triton
from schedir.models.window_config import TILE_SIZE, compute_device_tiles

_MIN_FLEX_WIDTH: Final = 16  # FlexAttention needs heads of at least this width on a GPU.
_MASK_CACHE_SIZE: Final = 32  # Masks are cached for this many combinations of length and window.


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute causal attention of all heads.

    Several neighboring query heads may share a head of keys and values (Ainslie et al., GQA, arXiv
    2305.13245).

    Args:
        q: Queries of b sequences of T tokens, of shape (b, heads, T, width).
        k: Keys, of shape (b, groups, T, width). `groups` divides `heads`.
        v: Values, with the shape of `k`.
        window: (window, stride) in tokens. None means all earlier tokens.
        dropout: The dropout probability of attention weights.

    Returns:
        The attention output, with the shape of `q`.

    Raises:
        UsageError: The shapes do not match.
    """
    b, heads, length, width = q.shape
    groups = k.shape[1]
    if k.shape != v.shape or k.shape != (b, groups, length, width) or heads % groups:
        raise UsageError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must have the same "
            "length and width, and the heads of q must be a multiple of those of k and v"
        )
    is_grouped = heads > groups
    output: Tensor
    if window is None:
        output = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped
        )
        return output
    if not dropout and q.device.type == "cpu":
        query_tiles = _build_query_tiles(length, *window, q.dtype)
        output = _TiledAttention.apply(q, k, v, query_tiles)  # type: ignore[no-untyped-call]
        return output
    if not dropout and width >= _MIN_FLEX_WIDTH and uses_triton(q):
        block_mask = build_block_mask(length, *window, q.device)
        flex_attention = _compile_flex_attention()
        output = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=is_grouped)
        return output
    mask = build_window_mask(length, *window, q.device)
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=is_grouped
    )
    return output


def build_window_mask(
    length: int, window: int, stride: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the mask of a window: True where a query attends to a key.

    Args:
        length: Number of tokens of the sequence.
        window: Number of tokens of the window, including the query's token.
        stride: Number of tokens by which the window moves.
        device: The device of the mask.

    Returns:
        A bool tensor of shape (queries, keys).

    Example:
        >>> build_window_mask(6, 4, 2).int().tolist()[3:]
        [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    """
    positions = torch.arange(length, device=device)
    first_key = positions // stride * stride + stride - window
    return (positions <= positions[:, None]) & (positions >= first_key[:, None])


# ---------------------------------------------------------------- on CPUs


class _QueryTile(NamedTuple):
    """A tile of queries with its keys and the mask that is added to the scores.

    `mask` is None if the queries and keys are at the same positions, so that a causal mask is
    enough.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


@lru_cache(_MASK_CACHE_SIZE)
def _build_query_tiles(
    length: int, window: int, stride: int, dtype: torch.dtype
) -> tuple[_QueryTile, ...]:
    """Return all tiles of queries. Tiles with equal masks share a tensor."""
    (axis,) = compute_device_tiles(length, window, stride).axes
    (start, _), tile = axis.axis.visible_keys, axis.q_tile
    masks: dict[bytes, Tensor] = {}
    ranges = []
    for tile_start, (keys_begin, keys_end) in zip(
        range(0, length, tile), (axis.visited_ranges * axis.kv_tile).tolist(), strict=True
    ):
        queries = range(tile_start, min(tile_start + tile, length))
        ranges.append((queries, range(keys_begin, min(keys_end, length))))
    # If all queries of a tile attend to all keys of the tile that precede its first query, the mask
    # is zero in the columns of these keys. The later columns are a causal mask. Such masks are
    # slices of one tensor, `widest`.
    uncut_lengths = [
        queries.start - keys.start for queries, keys in ranges if start[queries[-1]] <= keys.start
    ]
    causal = torch.full((tile, tile), -torch.inf, dtype=dtype).triu(1)
    max_keys_before = max(uncut_lengths, default=0)
    widest = torch.cat([torch.zeros(tile, max_keys_before, dtype=dtype), causal], 1)
    result = []
    for queries, keys in ranges:
        mask, keys_before = None, queries.start - keys.start
        if start[queries[-1]] > keys.start:
            key_positions, query_positions = np.asarray(keys), np.asarray(queries)[:, None]
            is_hidden = (key_positions < start[queries, None]) | (key_positions > query_positions)
            mask_key = np.packbits(is_hidden).tobytes() + repr(is_hidden.shape).encode()
            if mask_key not in masks:
                masks[mask_key] = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill(
                    torch.from_numpy(is_hidden), -torch.inf
                )
            mask = masks[mask_key]
        elif keys_before:
            begin, end = max_keys_before - keys_before, max_keys_before + len(queries)
            mask = widest[: len(queries), begin:end]
        query_slice, key_slice = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        result.append(_QueryTile(query_slice, key_slice, mask))
    return tuple(result)


class _TiledAttention(torch.autograd.Function):
    """Attention in tiles of queries, with torch's flash attention operation for CPUs.

    The function saves the same tensors as torch's operation: q, k, v, the output, and the
    log-sum-exp of the scores of each query. Gradients of keys and values are summed over tiles in
    float32 or in the type of q, whichever is wider.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[_QueryTile, ...]) -> Tensor:
        q, k, v = map(_to_dense_rows, (q, k, v))
        b, heads, length, width = q.shape
        out = q.new_empty(b, length, heads, width).transpose(1, 2)  # The layout of torch's output.
        sums = q.new_empty(b, length, heads, dtype=_accumulation_dtype(q.dtype)).transpose(1, 2)
        for queries, keys, mask in tiles:
            tile_inputs = q[:, :, queries], *(_repeat_heads(x[:, :, keys], heads) for x in (k, v))
            out[:, :, queries], sums[:, :, queries] = _FLASH_FORWARD(
                *tile_inputs, 0.0, mask is None, attn_mask=mask
            )
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.tiles = tiles
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad = _to_dense_rows(grad)
        dq = torch.empty_like(q)
        sum_dtype = _accumulation_dtype(q.dtype)
        dk, dv = (torch.zeros_like(x, dtype=sum_dtype) for x in (k, v))
        for queries, keys, mask in ctx.tiles:
            dq[:, :, queries], dk_part, dv_part = _FLASH_BACKWARD(
                *(grad[:, :, queries], q[:, :, queries]),
                *(_repeat_heads(x[:, :, keys], q.shape[1]) for x in (k, v)),
                *(out[:, :, queries], sums[:, :, queries], 0.0, mask is None),
                attn_mask=mask,
            )
            dk[:, :, keys] += _sum_shared_heads(dk_part, k.shape[1], sum_dtype)
            dv[:, :, keys] += _sum_shared_heads(dv_part, k.shape[1], sum_dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


_FLASH_FORWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values for the query heads that share this head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_shared_heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Sum the gradients of repeated heads, the reverse of `_repeat_heads`."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2, dtype=dtype)


def _to_dense_rows(x: Tensor) -> Tensor:
    """Return the tensor with stride 1 in its last dimension, as the flash operation requires."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------- on GPUs


@lru_cache(_MASK_CACHE_SIZE)
def build_block_mask(length: int, window: int, stride: int, device: torch.device) -> Any:
    """Return the `BlockMask` of a window for FlexAttention.

    The mask has the tiles of `compute_device_tiles`.

    Args:
        length: Number of tokens of the sequence.
        window: Number of tokens of the window.
        stride: Number of tokens by which the window moves.
        device: The GPU.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tiles = compute_device_tiles(length, window, stride, "cuda")
    tile, grid = TILE_SIZE["cuda"], torch.from_numpy(tiles.grid)
    first_key = torch.from_numpy(tiles.axes[0].axis.visible_keys[0]).to(device)

    def is_visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The limits are in a tensor, so one compiled kernel works for all windows.
        return (key <= query) & (key >= first_key[query])

    def list_key_tiles(kind: int) -> tuple[Tensor, Tensor]:
        """Return, for each query tile, the count and the indices of key tiles of this `kind`."""
        is_of_kind = grid == kind
        key_tiles = torch.argsort(is_of_kind, dim=1, descending=True, stable=True)
        counts = is_of_kind.sum(1)
        counts, key_tiles = (x.to(device, torch.int32)[None, None] for x in (counts, key_tiles))
        return counts, key_tiles

    return BlockMask.from_kv_blocks(
        *list_key_tiles(1),
        *list_key_tiles(2),
        BLOCK_SIZE=tile,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


@lru_cache(1)
def _compile_flex_attention() -> Any:
    """Return compiled FlexAttention. Only the compiled version skips tiles."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
