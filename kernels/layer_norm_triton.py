"""The kernels of `layer_norm`: a row stays in registers from the first load to the last store."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of a backward: 4 for each multiprocessor of an H100


def shape(n: int) -> tuple[int, int]:
    """Columns of a program, all of a row, and its warps: at most 16 numbers a thread."""
    columns = triton.next_power_of_2(n)
    return columns, max(1, min(16, columns // 512))


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
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    inside = c < n
    at = row * n + c
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(h.dtype.element_ty)  # what backward will see
    tl.store(h + at, rounded, mask=inside)
    v = rounded.to(tl.float32)
    mean = tl.sum(v, axis=0) / n
    v = tl.where(inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
    tl.store(moments + row, mean)
    tl.store(moments + rows + row, rstd)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (v * rstd * w + b).to(y.dtype.element_ty), mask=inside)


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
    each,
    COLUMNS: tl.constexpr,
):
    """`each` rows a program; `parts` (2, programs, n) are their sums for weight and bias."""
    c = tl.arange(0, COLUMNS)
    inside = c < n
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    first = tl.program_id(0) * each
    for row in range(first, tl.minimum(first + each, rows)):
        at = tl.cast(row, tl.int64) * n + c
        mean = tl.load(moments + row)
        rstd = tl.load(moments + rows + row)
        v = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.where(inside, (v - mean) * rstd, 0.0)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        dweight += g * v
        dbias += g
        g *= w
        along = tl.sum(g * v, axis=0) / n
        g = (g - tl.sum(g, axis=0) / n - v * along) * rstd
        g += tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=inside)
    part = parts + tl.program_id(0).to(tl.int64) * n + c
    tl.store(part, dweight, mask=inside)
    tl.store(part + tl.num_programs(0).to(tl.int64) * n, dbias, mask=inside)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h, y, and for backward the mean and the inverse deviation of each row."""
    x, residual, n = x.contiguous(), residual.contiguous(), x.shape[-1]
    h, y, rows = torch.empty_like(x), torch.empty_like(x), x.numel() // n
    moments = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    columns, warps = shape(n)
    forward_kernel[(rows,)](
        x, residual, weight, bias, h, y, moments, rows, n, eps, COLUMNS=columns, num_warps=warps
    )
    return h, y, moments


def backward(
    dh: Tensor, dy: Tensor, h: Tensor, weight: Tensor, moments: Tensor, programs: int = PROGRAMS
) -> tuple[Tensor, Tensor, Tensor]:
    dh, dy, n = dh.contiguous(), dy.contiguous(), h.shape[-1]
    dx, rows = torch.empty_like(h), h.numel() // n
    each = triton.cdiv(rows, programs)
    down = triton.cdiv(rows, each)
    parts = torch.empty(2, down, n, dtype=torch.float32, device=h.device)
    columns, warps = shape(n)
    backward_kernel[(down,)](
        dh, dy, h, weight, moments, dx, parts, rows, n, each, COLUMNS=columns, num_warps=warps
    )
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, dweight, dbias
