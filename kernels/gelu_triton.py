"""The Triton kernels of `gelu`. In this module, a program is an instance of a Triton kernel."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedir.kernels import launch_grid

ROWS, COLUMNS, NUM_WARPS = 4, 512, 4  # Rows and columns of a program's tile, and its warps.
# The largest number of registers of a thread in the backward. With this limit, 8 programs fit on a
# multiprocessor.
MAX_REGISTERS = 64
# The largest number of programs of the backward: enough to fill a GPU, but few, because each
# program writes a partial sum.
MAX_PROGRAMS = 2048


@triton.jit
def forward_kernel(x, bias, y, rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute one tile per program."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (r < rows)[:, None] & (c < n)[None, :]
    offsets = r.to(tl.int64)[:, None] * n + c[None, :]
    z = tl.load(x + offsets, mask=is_inside, other=0.0).to(tl.float32)
    z += tl.load(bias + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
    value = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    tl.store(y + offsets, value.to(y.dtype.element_ty), mask=is_inside)


@triton.jit
def backward_kernel(
    dy,
    x,
    bias,
    dx,
    dbias,
    rows,
    n,
    each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `each` rows of COLUMNS columns per program.

    The program writes its part of the bias gradient to one row of `dbias`.
    """
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
    first_row = tl.program_id(0) * each
    part = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, each, ROWS):
        r = first_row + start + tl.arange(0, ROWS)
        is_inside = (r < rows)[:, None] & (c < n)[None, :]
        offsets = r.to(tl.int64)[:, None] * n + c[None, :]
        z = tl.load(x + offsets, mask=is_inside, other=0.0).to(tl.float32) + b
        g = tl.load(dy + offsets, mask=is_inside, other=0.0).to(tl.float32)
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        g *= cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
        tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=is_inside)
        part += tl.sum(g, axis=0)
    tl.store(dbias + tl.program_id(0).to(tl.int64) * n + c, part, mask=c < n)


def forward(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x + bias).

    Args:
        x: The input, of shape (..., n).
        bias: The bias, of shape (n,).
    """
    x, n = x.contiguous(), x.shape[-1]
    y, rows = torch.empty_like(x), x.numel() // n
    grid = launch_grid.count_blocks(rows, ROWS), launch_grid.count_blocks(n, COLUMNS)
    forward_kernel[grid](x, bias, y, rows, n, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS)
    return y


def backward(
    dy: Tensor, x: Tensor, bias: Tensor, max_programs: int = MAX_PROGRAMS
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and bias.

    Args:
        dy: The gradient of the output.
        x: The input, of shape (..., n).
        bias: The bias, of shape (n,).
        max_programs: The largest number of programs.
    """
    dy, x, n = dy.contiguous(), x.contiguous(), x.shape[-1]
    dx, rows = torch.empty_like(x), x.numel() // n
    column_blocks = launch_grid.count_blocks(n, COLUMNS)
    tiles = launch_grid.count_blocks(rows, ROWS)
    rows_per_program = ROWS * max(
        1, launch_grid.count_blocks(tiles, max(1, max_programs // column_blocks))
    )  # Without rows, `tiles` is 0 and `each` must still be positive.
    row_programs = launch_grid.count_blocks(rows, rows_per_program)
    dbias = torch.empty(row_programs, n, dtype=torch.float32, device=x.device)
    backward_kernel[(row_programs, column_blocks)](
        dy,
        x,
        bias,
        dx,
        dbias,
        rows,
        n,
        rows_per_program,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )
    return dx, dbias.sum(0).to(bias.dtype)
