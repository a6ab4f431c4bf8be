"""The kernels of `layer_norm`: what they are given is read from memory once.

A thread has as much of a row as it loads at once: 16 bytes, 8 numbers of bfloat16. So 32 warps or
more fit a multiprocessor at the 64 registers of a backward, which keeps two sums a number: in one
block for rows of 8192, in 8 blocks for rows of 1024. While a row is computed, the next is on its
way into shared memory, so that a block waits for memory only once.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from schedir.kernels import launch_grid

LOAD_BYTES = 16  # bytes that a thread loads at once
MAX_TILE_BYTES = (
    32 * 32 * LOAD_BYTES
)  # bytes of a row that a backward takes in one tile: 32 warps, a whole block
MIN_ROWS = 8  # of a program of a backward, at least: its sums are written, and read again, for each
MAX_REGISTERS = 64  # of a thread of a backward, at most: 1024 of them fit a multiprocessor


def count_warps(columns: int, itemsize: int) -> int:
    """Of a program that has so many numbers of a row, each of `itemsize` bytes."""
    return max(1, min(32, columns * itemsize // (32 * LOAD_BYTES)))


class Tiling(NamedTuple):
    """How a backward divides a row: tiles, columns of each, and the power of 2 that holds them."""

    tiles: int
    tile_width: int
    padded_columns: int
    stages: int  # of its loop: with 3, the next row is fetched while one is computed
    warps: int


@cache
def choose_tiling(n: int, itemsize: int, max_shared_bytes: int) -> Tiling:
    """For rows of n numbers of `itemsize` bytes, where a block can have `max_shared_bytes`
    bytes."""
    count = launch_grid.count_blocks(n * itemsize, MAX_TILE_BYTES)
    width = 16 * launch_grid.count_blocks(launch_grid.count_blocks(n, count), 16)
    columns = launch_grid.next_power_of_2(min(n, width))
    stages = 3 if count_shared_bytes(count, columns, itemsize) <= max_shared_bytes else 1
    return Tiling(count, width, columns, stages, count_warps(columns, itemsize))


def count_shared_bytes(tiles: int, columns: int, itemsize: int) -> int:
    """Bytes of shared memory, at most, where the next row is fetched while one is computed: three
    tensors of each tile, of two rows, and what the sums of a row take."""
    return 2 * 3 * tiles * columns * itemsize + 1024


@cache
def get_device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the shared memory that a block can have."""
    its = driver.active.utils.get_device_properties(device.index)
    return its["multiprocessor_count"], its["max_shared_mem"]


@triton.jit
def forward_kernel(
    x,
    residual,
    weight,
    bias,
    h,
    y,
    moments,
    rows,
    n,
    eps,
    COLUMNS: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * n
    c = tl.arange(0, COLUMNS)
    inside = c < n
    total = tl.load(x + at + c, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + at + c, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(h.dtype.element_ty)  # what backward will see
    tl.store(h + at + c, rounded, mask=inside)
    v = rounded.to(tl.float32)
    mean = tl.sum(v, axis=0) / n
    v = tl.where(inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
    tl.store(moments + row, mean)
    tl.store(moments + rows + row, rstd)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at + c, (v * rstd * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dh,
    dy,
    h,
    weight,
    moments,
    dx,
    parts,
    rows,
    n,
    width,
    each,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`each` rows a program; `parts` (2, programs, n) are their sums for weight and bias.

    Of a row that is more than a tile, a program has one, and reads the others for two sums: its
    neighbours have them in the cache.
    """
    tile = tl.program_id(1)
    c = tile * width + tl.arange(0, COLUMNS)
    inside = c < tl.minimum((tile + 1) * width, n)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * each
    for row in tl.range(first, tl.minimum(first + each, rows), num_stages=STAGES):
        at = tl.cast(row, tl.int64) * n
        mean = tl.load(moments + row)
        rstd = tl.load(moments + rows + row)
        along = 0.0
        total = 0.0
        for k in tl.static_range(1, TILES):
            begin = (tile + k) % TILES * width
            o = begin + tl.arange(0, COLUMNS)
            there = o < tl.minimum(begin + width, n)
            v = (tl.load(h + at + o, mask=there, other=0.0).to(tl.float32) - mean) * rstd
            g = tl.load(dy + at + o, mask=there, other=0.0).to(tl.float32)
            g *= tl.load(weight + o, mask=there, other=0.0).to(tl.float32)
            along += tl.sum(g * v, axis=0)
            total += tl.sum(g, axis=0)
        # Past the row g is 0, and v counts nowhere.
        v = (tl.load(h + at + c, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        g = tl.load(dy + at + c, mask=inside, other=0.0).to(tl.float32)
        dweight += g * v
        dbias += g
        g *= w
        along += tl.sum(g * v, axis=0)
        total += tl.sum(g, axis=0)
        g = (g - total / n - v * (along / n)) * rstd
        g += tl.load(dh + at + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at + c, g.to(dx.dtype.element_ty), mask=inside)
    part = parts + tl.program_id(0).to(tl.int64) * n
    tl.store(part + c, dweight, mask=inside)
    tl.store(part + tl.num_programs(0).to(tl.int64) * n + c, dbias, mask=inside)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h, y, and for backward the mean and the inverse deviation of each row."""
    x, residual, n = x.contiguous(), residual.contiguous(), x.shape[-1]
    h, y, rows = torch.empty_like(x), torch.empty_like(x), x.numel() // n
    moments = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    columns = launch_grid.next_power_of_2(n)
    forward_kernel[(rows,)](
        x,
        residual,
        weight,
        bias,
        h,
        y,
        moments,
        rows,
        n,
        eps,
        COLUMNS=columns,
        num_warps=count_warps(columns, x.element_size()),
    )
    return h, y, moments


def backward(
    dh: Tensor,
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    moments: Tensor,
    limits: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; `limits`, if not those of the device, as
    `get_device_limits`."""
    dh, dy, n = dh.contiguous(), dy.contiguous(), h.shape[-1]
    dx, rows = torch.empty_like(h), h.numel() // n
    multiprocessors, shared = limits or get_device_limits(h.device)
    by = choose_tiling(n, h.element_size(), shared)
    # As many programs as run at once, or fewer.
    programs = max(1, multiprocessors * (32 // by.warps) // by.tiles)
    each = max(MIN_ROWS, launch_grid.count_blocks(rows, programs))
    down = launch_grid.count_blocks(rows, each)
    parts = torch.empty(2, down, n, dtype=torch.float32, device=h.device)
    backward_kernel[(down, by.tiles)](
        dh,
        dy,
        h,
        weight,
        moments,
        dx,
        parts,
        rows,
        n,
        by.tile_width,
        each,
        TILES=by.tiles,
        COLUMNS=by.padded_columns,
        STAGES=by.stages,
        num_warps=by.warps,
        maxnreg=MAX_REGISTERS,
    )
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, dweight, dbias
