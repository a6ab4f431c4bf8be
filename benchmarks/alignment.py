"""Find the CPU kernels of torch whose rounding depends on the address of an operand.

    python benchmarks/alignment.py
    MKL_CBWR=AUTO python benchmarks/alignment.py
    ATEN_CPU_CAPABILITY=default python benchmarks/alignment.py

The script runs each kernel on operands that begin on a 64-byte line, and again with one operand
moved by some bytes. The table counts the shapes for which a move changes the bits of the result.
The results of other kernels do not depend on the address.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import parse

CACHE_LINE_BYTES = 64  # bytes
SEED = 0
Kernel = Callable[..., Tensor]
ELEMENTWISE_AND_SUMS: dict[str, Kernel] = {
    "sum over rows": lambda x: x.sum(0),
    "sum over columns": lambda x: x.sum(1),
    "sum": torch.sum,
    "norm": torch.linalg.vector_norm,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "gelu": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
}


class Case(NamedTuple):
    """A kernel with its operands."""

    name: str
    kernel: Kernel
    operands: Sequence[Tensor]


def build_cases(dtype: torch.dtype) -> list[Case]:
    """Return every kernel on operands of one random shape."""
    rows, inner, columns = torch.randint(1, 70, (3,)).tolist()

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    x, w, total = matrix(rows, inner), matrix(inner, columns), matrix(rows, columns)
    x_transposed, w_transposed = matrix(inner, rows).mT, matrix(columns, inner).mT
    return [
        Case("x @ w", torch.mm, (x, w)),
        Case("x @ w.T", torch.mm, (x, w_transposed)),
        Case("x.T @ w", torch.mm, (x_transposed, w)),
        Case("total.addmm_(x, w)", lambda total, x, w: total.addmm_(x, w), (total, x, w)),
        *(Case(name, kernel, (x,)) for name, kernel in ELEMENTWISE_AND_SUMS.items()),
    ]


def copy_at_offset(t: Tensor, offset: int) -> Tensor:
    """Return a copy of `t`, with its strides, that begins `offset` bytes after a 64-byte line."""
    memory = torch.empty(t.nbytes + 2 * CACHE_LINE_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % CACHE_LINE_BYTES + offset
    flat = memory[begin : begin + t.nbytes].view(t.dtype)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


def find_rounding_offsets(case: Case) -> set[int]:
    """Return the offsets, in bytes, by which a moved operand changes the bits of the result."""
    expected = case.kernel(*(copy_at_offset(t, 0) for t in case.operands))
    offsets = set()
    for k, operand in enumerate(case.operands):
        for offset in (operand.element_size(), 16, 32, 48):
            operands = [copy_at_offset(t, offset * (j == k)) for j, t in enumerate(case.operands)]
            if not torch.equal(case.kernel(*operands), expected):
                offsets.add(offset)
    return offsets


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shapes", type=int, default=60, help="number of random shapes per kernel (60)"
    )
    shapes = parse(parser, shapes=2).shapes
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    differing_shapes: Counter[tuple[str, str, int]] = Counter()
    for dtype in (torch.float32, torch.float64):
        for _ in range(shapes):
            for case in build_cases(dtype):
                kind = str(dtype).removeprefix("torch.")
                differing_shapes.update(
                    (case.name, kind, offset) for offset in find_rounding_offsets(case)
                )
    setting = os.environ.get("MKL_CBWR", "not set")
    print(f"{torch.backends.cpu.get_cpu_capability()} kernels, MKL_CBWR {setting}, seed {SEED}")
    for (name, kind, offset), count in sorted(differing_shapes.items()):
        print(f"{name:20} {kind:8} moved by {offset:2} bytes: {count:3} of {shapes} shapes differ")
    if not differing_shapes:
        print("no kernel rounds by the address of an operand")


if __name__ == "__main__":
    main()
