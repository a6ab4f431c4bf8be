"""The Triton kernels of `layer_norm`. The kernels read each input from memory once.

In this module, a program is an instance of a Triton kernel, and runs as one block. A thread
computes 16 bytes of a row (8 numbers of bfloat16), because one load instruction reads 16 bytes. In
the forward, a thread computes more if a row needs more than 32 warps.

A thread of the backward keeps two sums per number, and has at most 64 registers. So at least
32 warps fit on a multiprocessor: one block for rows of 8192 numbers, or 8 blocks for rows of 1024.
If two rows fit in shared memory, the backward loads the next row while it computes a row. A block
then waits for memory only once.
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

LOAD_BYTES = 16  # Bytes that a thread loads with one instruction.
MAX_TILE_BYTES = 32 * 32 * LOAD_BYTES  # Bytes of a tile in the backward: 32 warps, a full block.
# The fewest rows of a program in the backward. Each program writes partial sums, which must be read
# again, so more programs move more memory.
MIN_ROWS = 8
# The largest number of registers of a thread in the backward. With this limit, 1024 threads fit on
# a multiprocessor.
MAX_REGISTERS = 64


def count_warps(columns: int, itemsize: int) -> int:
    """Return the number of warps of a program.

    Args:
        columns: The number of elements of a row that the program processes.
        itemsize: Bytes of an element.
    """
    return max(1, min(32, columns * itemsize // (32 * LOAD_BYTES)))


class Tiling(NamedTuple):
    """The division of a row in the backward.

    Attributes:
        tiles: The number of tiles.
        tile_width: The number of columns of a tile.
        padded_columns: The columns of a tile or of the row, whichever is less, rounded up to a
            power of 2.
        stages: Triton's `num_stages` for the loop over rows. With 3, the next row is loaded while
            a row is computed.
        warps: The number of warps of a program.
    """

    tiles: int
    tile_width: int
    padded_columns: int
    stages: int
    warps: int


@cache
def choose_tiling(n: int, itemsize: int, max_shared_bytes: int) -> Tiling:
    """Return the division of a row in the backward.

    Args:
        n: The number of elements in a row.
        itemsize: Bytes of an element.
        max_shared_bytes: Bytes of shared memory that a block can have.
    """
    count = launch_grid.count_blocks(n * itemsize, MAX_TILE_BYTES)
    width = 16 * launch_grid.count_blocks(launch_grid.count_blocks(n, count), 16)
    columns = launch_grid.next_power_of_2(min(n, width))
    stages = 3 if count_shared_bytes(count, columns, itemsize) <= max_shared_bytes else 1
    return Tiling(count, width, columns, stages, count_warps(columns, itemsize))


def count_shared_bytes(tiles: int, columns: int, itemsize: int) -> int:
    """Return the most bytes of shared memory that a program uses if it loads the next row early.

    For each of two rows, shared memory has the elements of all tiles from three tensors. The
    reductions over a row need 1024 more bytes.

    Args:
        tiles: The number of tiles.
        columns: The number of padded columns of a tile.
        itemsize: Bytes of an element.
    """
    return 2 * 3 * tiles * columns * itemsize + 1024


@cache
def get_device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory that a block can have.

    Args:
        device: The GPU.
    """
    properties = driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


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
    """Compute one row per program."""
    row = tl.program_id(0)
    row_start = row.to(tl.int64) * n
    c = tl.arange(0, COLUMNS)
    is_inside = c < n
    total = tl.load(x + row_start + c, mask=is_inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row_start + c, mask=is_inside, other=0.0).to(tl.float32)
    rounded = total.to(h.dtype.element_ty)  # The backward reads these rounded numbers.
    tl.store(h + row_start + c, rounded, mask=is_inside)
    v = rounded.to(tl.float32)
    mean = tl.sum(v, axis=0) / n
    v = tl.where(is_inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
    tl.store(moments + row, mean)
    tl.store(moments + rows + row, rstd)
    w = tl.load(weight + c, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + row_start + c, (v * rstd * w + b).to(y.dtype.element_ty), mask=is_inside)


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
    """Compute `each` rows per program, and their partial sums for weight and bias.

    `parts` has the shape (2, programs, n). If a row has several tiles, a program computes one of
    these tiles. It also reads the other tiles, for two sums over the row. Neighboring programs read
    the same tiles, so the other tiles are in the cache.
    """
    tile = tl.program_id(1)
    c = tile * width + tl.arange(0, COLUMNS)
    is_inside = c < tl.minimum((tile + 1) * width, n)
    w = tl.load(weight + c, mask=is_inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    first_row = tl.program_id(0) * each
    for row in tl.range(first_row, tl.minimum(first_row + each, rows), num_stages=STAGES):
        row_start = tl.cast(row, tl.int64) * n
        mean = tl.load(moments + row)
        rstd = tl.load(moments + rows + row)
        dot = 0.0
        total = 0.0
        for k in tl.static_range(1, TILES):
            begin = (tile + k) % TILES * width
            o = begin + tl.arange(0, COLUMNS)
            is_in_tile = o < tl.minimum(begin + width, n)
            v = (
                tl.load(h + row_start + o, mask=is_in_tile, other=0.0).to(tl.float32) - mean
            ) * rstd
            g = tl.load(dy + row_start + o, mask=is_in_tile, other=0.0).to(tl.float32)
            g *= tl.load(weight + o, mask=is_in_tile, other=0.0).to(tl.float32)
            dot += tl.sum(g * v, axis=0)
            total += tl.sum(g, axis=0)
        # Outside of the tile, g is 0, so v has no effect there.
        v = (tl.load(h + row_start + c, mask=is_inside, other=0.0).to(tl.float32) - mean) * rstd
        g = tl.load(dy + row_start + c, mask=is_inside, other=0.0).to(tl.float32)
        dweight += g * v
        dbias += g
        g *= w
        dot += tl.sum(g * v, axis=0)
        total += tl.sum(g, axis=0)
        g = (g - total / n - v * (dot / n)) * rstd
        g += tl.load(dh + row_start + c, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(dx + row_start + c, g.to(dx.dtype.element_ty), mask=is_inside)
    part = parts + tl.program_id(0).to(tl.int64) * n
    tl.store(part + c, dweight, mask=is_inside)
    tl.store(part + tl.num_programs(0).to(tl.int64) * n + c, dbias, mask=is_inside)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, y, and the moments of each row for the backward.

    Args:
        x: The input, of shape (..., n).
        residual: The residual stream, of shape (..., n).
        weight: The gain, of shape (n,).
        bias: The shift, of shape (n,).
        eps: The epsilon of the norm.

    Returns:
        The sum h and its norm y, of shape (..., n), and float32 moments of shape (2, rows): the
        mean and the inverse standard deviation.
    """
    x, residual, n = x.contiguous(), residual.contiguous(), x.shape[-1]
    h = torch.empty_like(x)
    y = torch.empty_like(x)
    rows = x.numel() // n
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
    """Return the gradients of x, weight and bias.

    Args:
        dh: The gradient of h.
        dy: The gradient of y.
        h: The sum, from the forward.
        weight: The gain, of shape (n,).
        moments: The moments, from the forward.
        limits: Multiprocessors and bytes of shared memory, as from `get_device_limits`. None means
            the limits of the device.
    """
    dh = dh.contiguous()
    dy = dy.contiguous()
    n = h.shape[-1]
    dx, rows = torch.empty_like(h), h.numel() // n
    multiprocessors, shared = limits or get_device_limits(h.device)
    tiling = choose_tiling(n, h.element_size(), shared)
    # At most as many programs as the GPU can run at the same time.
    programs = max(1, multiprocessors * (32 // tiling.warps) // tiling.tiles)
    rows_per_program = max(MIN_ROWS, launch_grid.count_blocks(rows, programs))
    programs_needed = launch_grid.count_blocks(rows, rows_per_program)
    parts = torch.empty(2, programs_needed, n, dtype=torch.float32, device=h.device)
    backward_kernel[(programs_needed, tiling.tiles)](
        dh,
        dy,
        h,
        weight,
        moments,
        dx,
        parts,
        rows,
        n,
        tiling.tile_width,
        rows_per_program,
        TILES=tiling.tiles,
        COLUMNS=tiling.padded_columns,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        maxnreg=MAX_REGISTERS,
    )
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, dweight, dbias
