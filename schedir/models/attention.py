"""Causal attention, over all earlier tokens or over a window of them.

A window is one of Generalized Neighborhood Attention (Hassani et al., arXiv 2504.16922), causal and
of one dimension: query i sees j <= i with j > leader - window, where the leader, i // stride *
stride + stride - 1, is the last query of the stride that i is in (`schedir.predict.window_tiles`
has which tiles that visits).  What a token sees does not depend on how many come after it.

Tiles that nobody sees are not computed: on CPUs a tile of queries after the other is, with the keys
that it visits, by torch's own operation for CPUs, and on GPUs FlexAttention skips them.  Neither
leaves out weights at random, so with dropout attention is computed whole, and masked; so it is on
GPUs for heads that are too narrow for FlexAttention, and without triton.
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
from schedir.models.attention_tiles import TILE_SIZE, compute_device_tiles

_MIN_FLEX_WIDTH: Final = 16  # heads that FlexAttention takes on a GPU
_MASK_CACHE_SIZE: Final = 32  # lengths and windows whose masks are kept


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention of heads, (b, heads, T, width) each and like it.  Fewer of k and v are each
    shared by as many neighbours of q (Ainslie et al., GQA, arXiv 2305.13245).

    `window` is (window, stride); without one each token sees all before it.  `dropout` is the share
    of the attention's weights that is left out.

    Raises UsageError for heads that do not go together.
    """
    b, heads, length, width = q.shape
    groups = k.shape[1]
    if k.shape != v.shape or k.shape != (b, groups, length, width) or heads % groups:
        raise UsageError(
            f"queries {tuple(q.shape)} do not attend to keys {tuple(k.shape)} and values "
            f"{tuple(v.shape)}: all have one length and width, and so many heads of queries share "
            "each of the others"
        )
    grouped = heads > groups
    if window is None:
        whole: Tensor = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
        return whole
    if not dropout and q.device.type == "cpu":
        cuts = _build_query_tiles(length, *window, q.dtype)
        tiled: Tensor = _TiledAttention.apply(q, k, v, cuts)  # type: ignore[no-untyped-call]
        return tiled
    if not dropout and width >= _MIN_FLEX_WIDTH and uses_triton(q):
        tiles = build_block_mask(length, *window, q.device)
        skipping: Tensor = _compile_flex_attention()(q, k, v, block_mask=tiles, enable_gqa=grouped)
        return skipping
    mask = build_window_mask(length, *window, q.device)
    masked: Tensor = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped
    )
    return masked


def build_window_mask(
    length: int, window: int, stride: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Which keys each query sees, bool (T, T).

    >>> build_window_mask(6, 4, 2).int().tolist()[3:]
    [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    """
    at = torch.arange(length, device=device)
    first = at // stride * stride + stride - window
    return (at <= at[:, None]) & (at >= first[:, None])


# ---------------------------------------------------------------- on CPUs


class _QueryTile(NamedTuple):
    """A tile of queries with the keys that it visits, and what is added to their scores; None where
    only what is behind a query is masked."""

    queries: slice
    keys: slice
    mask: Tensor | None


@lru_cache(_MASK_CACHE_SIZE)
def _build_query_tiles(
    length: int, window: int, stride: int, dtype: torch.dtype
) -> tuple[_QueryTile, ...]:
    """All tiles of queries.  Those with the same mask share it."""
    (axis,) = compute_device_tiles(length, window, stride).axes
    (start, _), tile = axis.axis.visible_keys, axis.q_tile
    masks: dict[bytes, Tensor] = {}
    given = []
    for first, (low, high) in zip(
        range(0, length, tile), (axis.visited_ranges * axis.kv_tile).tolist(), strict=True
    ):
        given.append((range(first, min(first + tile, length)), range(low, min(high, length))))
    # Keys before a tile of which its windows cut none: what such tiles mask is a part of one mask.
    uncut = [own.start - keys.start for own, keys in given if start[own[-1]] <= keys.start]
    behind = torch.full((tile, tile), -torch.inf, dtype=dtype).triu(1)
    widest = torch.cat([torch.zeros(tile, most := max(uncut, default=0), dtype=dtype), behind], 1)
    found = []
    for own, keys in given:
        mask, before = None, own.start - keys.start
        if start[own[-1]] > keys.start:
            at, query = np.asarray(keys), np.asarray(own)[:, None]
            hidden = (at < start[own, None]) | (at > query)
            key = np.packbits(hidden).tobytes() + repr(hidden.shape).encode()
            if key not in masks:
                masks[key] = torch.zeros(hidden.shape, dtype=dtype).masked_fill(
                    torch.from_numpy(hidden), -torch.inf
                )
            mask = masks[key]
        elif before:
            mask = widest[: len(own), most - before : most + len(own)]
        found.append(_QueryTile(slice(own.start, own.stop), slice(keys.start, keys.stop), mask))
    return tuple(found)


class _TiledAttention(torch.autograd.Function):
    """Attention in tiles of queries, by what `scaled_dot_product_attention` runs on a CPU.

    It saves what that does: q, k and v, what comes out, and a number for each query.  Gradients of
    keys are summed over tiles in float32, or in q's type where that is longer.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[_QueryTile, ...]) -> Tensor:
        q, k, v = map(_to_dense_rows, (q, k, v))
        b, heads, length, width = q.shape
        out = q.new_empty(b, length, heads, width).transpose(1, 2)  # as that lays it out
        sums = q.new_empty(b, length, heads, dtype=_accumulation_dtype(q.dtype)).transpose(1, 2)
        for queries, keys, mask in tiles:
            own = q[:, :, queries], *(_repeat_heads(x[:, :, keys], heads) for x in (k, v))
            out[:, :, queries], sums[:, :, queries] = _FLASH_FORWARD(
                *own, 0.0, mask is None, attn_mask=mask
            )
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.cuts = tiles
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad = _to_dense_rows(grad)
        dq, long = torch.empty_like(q), _accumulation_dtype(q.dtype)
        dk, dv = (torch.zeros_like(x, dtype=long) for x in (k, v))
        for queries, keys, mask in ctx.cuts:
            dq[:, :, queries], dk_part, dv_part = _FLASH_BACKWARD(
                *(grad[:, :, queries], q[:, :, queries]),
                *(_repeat_heads(x[:, :, keys], q.shape[1]) for x in (k, v)),
                *(out[:, :, queries], sums[:, :, queries], 0.0, mask is None),
                attn_mask=mask,
            )
            dk[:, :, keys] += _sum_shared_heads(dk_part, k.shape[1], long)
            dv[:, :, keys] += _sum_shared_heads(dv_part, k.shape[1], long)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


_FLASH_FORWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values, each as often as queries share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_shared_heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Gradients of so many heads: the sums over the queries that share each."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2, dtype=dtype)


def _to_dense_rows(x: Tensor) -> Tensor:
    """What those take: the numbers of a head one behind the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------- on GPUs


@lru_cache(_MASK_CACHE_SIZE)
def build_block_mask(length: int, window: int, stride: int, device: torch.device) -> Any:
    """FlexAttention's BlockMask of a window, of the tiles that `compute_device_tiles` tells for a
    GPU."""
    from torch.nn.attention.flex_attention import BlockMask

    found = compute_device_tiles(length, window, stride, "cuda")
    tile, grid = TILE_SIZE["cuda"], torch.from_numpy(found.grid)
    first = torch.from_numpy(found.axes[0].axis.visible_keys[0]).to(device)

    def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Of a tensor, and no numbers: so all windows are compiled at once.
        return (key <= query) & (key >= first[query])

    def listed(kind: int) -> tuple[Tensor, Tensor]:
        """By query tile, how many key tiles are of a kind, and which, those first."""
        chosen = grid == kind
        which = torch.argsort(chosen, dim=1, descending=True, stable=True)
        number, which = (x.to(device, torch.int32)[None, None] for x in (chosen.sum(1), which))
        return number, which

    return BlockMask.from_kv_blocks(
        *listed(1),
        *listed(2),
        BLOCK_SIZE=tile,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


@lru_cache(1)
def _compile_flex_attention() -> Any:
    """FlexAttention, compiled, for it is only then that it skips anything."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
