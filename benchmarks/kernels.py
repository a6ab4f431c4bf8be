"""Bytes that each kernel moves per second, over what a plain copy moves in the same run.

    python benchmarks/kernels.py

Needs a GPU and triton.  For each operation: the bytes that it must read and write once, its time
and that of its plain-torch reference (medians, between events), and the share of the copy's
bandwidth.  The goal is a share of 0.8.  The weight gradient is bound by products, not by bytes: its
share is that of the rate of a plain bfloat16 product of the same shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from schedir.kernels import (
    choice,
    cross_entropy,
    gelu,
    layer_norm,
    weight_gradient,
)

GOAL = 0.8
CLOCK = 2e9  # at most so many cycles a second
CACHE = 1 << 28  # bytes, more than a GPU's cache has


def main() -> int:
    parser = argparse.ArgumentParser(description="bandwidth of the kernels, on a GPU")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=51200, help="of all tensor-parallel ranks")
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    if not choice.has_triton():
        print("needs triton, which is not installed", file=sys.stderr)
        return 2

    copy = copied()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e9:.2f} TB/s")
    print(f"{'operation':32} {'MB':>8} {'ms':>8} {'plain ms':>9} {'of copy':>8}")
    missed = False
    for name, size, ours, plain in operations(options):
        ms, reference = milliseconds(ours), milliseconds(plain)
        share = size / ms / copy
        missed = missed or share < GOAL
        print(f"{name:32} {size / 1e6:8.1f} {ms:8.3f} {reference:9.3f} {share:8.2f}")
    for name, flop, ours, plain, product in products(options):
        ms, reference, bare = map(milliseconds, (ours, plain, product))
        print(
            f"{name:32} {flop / ms / 1e9:8.0f} TFLOP/s, {reference / ms:.2f} times plain torch, "
            f"{bare / ms:.2f} of the product alone"
        )
    print(f"goal {GOAL} of the copy: {'missed' if missed else 'met'}")
    return 0


def milliseconds(run: Callable[[], object], times: int = 30) -> float:
    """The median of how long the GPU takes, its cache cold and the host well ahead of it."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = perf_counter()
    run()
    asleep = int(2 * (perf_counter() - began) * CLOCK)
    cold, spans = torch.empty(CACHE, dtype=torch.uint8, device="cuda"), []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()
        torch.cuda._sleep(asleep)  # or what is measured is how fast the host issues
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in spans)


def copied() -> float:
    """Bytes that a copy reads and writes in a millisecond."""
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


Operation = tuple[str, int, Callable[[], object], Callable[[], object]]


def operations(options: argparse.Namespace) -> list[Operation]:
    """Name, bytes, kernel and reference of all that is bound by bandwidth."""
    from schedir.kernels import cross_entropy_triton, gelu_triton, layer_norm_triton

    T, h, t, k = options.tokens, options.hidden, options.tp, options.vocab // options.tp

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    logits, targets = random(T, k), torch.arange(T, device="cuda") % k
    parts = cross_entropy.statistics(logits, targets, 0).unsqueeze(0)
    dloss = torch.ones((), device="cuda")
    ce = logits, targets, parts, dloss, 0, -1
    n = 4 * h // t
    wide, wide_dy, wide_bias = random(T, n), random(T, n), random(n)
    x, r, dy, weight, bias = random(T, h), random(T, h), random(T, h), random(h), random(h)
    hidden, _, moments = layer_norm_triton.forward(x, r, weight, bias, 1e-5)
    return [
        (
            "cross entropy, statistics",
            logits.nbytes,
            lambda: cross_entropy_triton.statistics(logits, targets, 0),
            lambda: cross_entropy.statistics_reference(logits, targets, 0),
        ),
        (
            "cross entropy, gradient",
            2 * logits.nbytes,
            lambda: cross_entropy_triton.gradient_(*ce),
            lambda: cross_entropy.gradient_reference_(*ce),
        ),
        (
            "bias + GELU, forward",
            2 * wide.nbytes,
            lambda: gelu_triton.forward(wide, wide_bias),
            lambda: gelu.bias_gelu_reference(wide, wide_bias),
        ),
        (
            "bias + GELU, backward",
            3 * wide.nbytes,
            lambda: gelu_triton.backward(wide_dy, wide, wide_bias),
            lambda: gelu.backward_reference(wide_dy, wide, wide_bias),
        ),
        (
            "residual + LayerNorm, forward",
            4 * x.nbytes,
            lambda: layer_norm_triton.forward(x, r, weight, bias, 1e-5),
            lambda: layer_norm.add_layer_norm_reference(x, r, weight, bias),
        ),
        (
            "residual + LayerNorm, backward",
            4 * x.nbytes,
            lambda: layer_norm_triton.backward(dy, r, hidden, weight, moments),
            lambda: layer_norm.backward_reference(dy, r, hidden, weight, bias),
        ),
    ]


Product = tuple[str, int, Callable[[], object], Callable[[], object], Callable[[], object]]


def products(options: argparse.Namespace) -> list[Product]:
    """Name, flop, way, the plain way and the bare product of weight gradients."""
    T, h, k = options.tokens, options.hidden, 4 * options.hidden // options.tp
    dy, x = (torch.randn(T, n, device="cuda").bfloat16() for n in (k, h))
    main = torch.zeros(k, h, device="cuda")
    plain = lambda: main.add_(dy.t() @ x)  # noqa: E731
    bare = lambda: dy.t() @ x  # noqa: E731
    way = lambda: weight_gradient.accumulate_(main, dy, x)  # noqa: E731
    return [("weight gradient", 2 * T * h * k, way, plain, bare)]


if __name__ == "__main__":
    sys.exit(main())
