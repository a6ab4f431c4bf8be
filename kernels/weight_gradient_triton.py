"""The kernel of `weight_gradient`."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TOKENS, WARPS, STAGES = 128, 128, 64, 8, 3  # tile of the weight, depth of a step
GROUP = 8  # tiles of a column that run together, so that they find each other's x in the cache


@triton.jit
def accumulate_kernel(
    main,
    dy,
    x,
    tokens,
    k,
    n,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of `main` a program."""
    down = tl.cdiv(k, ROWS)
    across = tl.cdiv(n, COLUMNS)
    pid = tl.program_id(0)
    first = pid // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    r = (first + pid % (GROUP * across) % height) * ROWS + tl.arange(0, ROWS)
    c = (pid % (GROUP * across) // height) * COLUMNS + tl.arange(0, COLUMNS)
    # Past the end any row will do: what comes of it is not stored. So no mask is needed.
    a = dy + tl.arange(0, TOKENS)[None, :].to(tl.int64) * k + (r % k)[:, None]
    b = x + tl.arange(0, TOKENS)[:, None].to(tl.int64) * n + (c % n)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, tokens, TOKENS):
        left = tl.arange(0, TOKENS) < tokens - start
        dy_tile = tl.load(a, mask=left[None, :], other=0.0)
        x_tile = tl.load(b, mask=left[:, None], other=0.0)
        if UPCAST:
            dy_tile, x_tile = dy_tile.to(tl.float32), x_tile.to(tl.float32)
        total = tl.dot(dy_tile, x_tile, total, input_precision="ieee")
        a += TOKENS * k
        b += TOKENS * n
    at = main + r.to(tl.int64)[:, None] * n + c[None, :]
    inside = (r < k)[:, None] & (c < n)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)


def accumulate_(main: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    (tokens, k), n = dy.shape, x.shape[1]
    grid = (triton.cdiv(k, ROWS) * triton.cdiv(n, COLUMNS),)
    accumulate_kernel[grid](
        main,
        dy,
        x,
        tokens,
        k,
        n,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TOKENS=TOKENS,
        GROUP=GROUP,
        # Triton's interpreter holds bfloat16 as bits, of which a product is garbage.
        UPCAST=not dy.is_cuda,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return main
