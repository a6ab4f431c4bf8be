"""Bytes that each kernel moves per second, over what a plain copy moves in the same run.

    python benchmarks/kernels.py

Needs a GPU and triton.  For each operation: the bytes that it must read and write once, its time,
and the share of the copy's bandwidth that it reaches, beside those of the same in eager torch, by
torch.compile, and by Liger-Kernel where that is installed and has it.  All times are medians,
between events.  The goal is a share of 0.8, of ours.  The weight gradient is bound by products, not
by bytes: it is beside a product and then a sum, and beside the product alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import lacks, parse
from schedir.kernels import choice, cross_entropy, gelu, layer_norm, weight_gradient
from schedir.parallel.vocab import fused_cross_entropy

DEVICE = "cuda"
GOAL = 0.8
CLOCK = 2e9  # at most so many cycles a second
CACHE = 1 << 28  # bytes, more than a GPU's cache has
WAYS = "ours", "eager", "compiled", "Liger"

Run = Callable[[], Any]


class Work(NamedTuple):
    """What is bound by bandwidth: the bytes that it must move, and the ways to do it."""

    name: str
    bytes: int
    ways: dict[str, Run]


def main() -> int:
    parser = argparse.ArgumentParser(description="bandwidth of the kernels, on a GPU")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=51200, help="of all tensor-parallel ranks")
    parser.add_argument("--tp", type=int, default=8)
    widths = [1024, 2048, 4096, 8192, 12288, 16384]
    parser.add_argument("--widths", type=int, nargs="*", default=widths, help="of LayerNorm")
    options = parse(parser, tokens=64, hidden=256, vocab=512, widths=[64])
    if not torch.cuda.is_available():
        return lacks("needs a GPU, and torch sees none", options.smoke)
    if not choice.on_triton(torch.empty(0, device=DEVICE)):
        return lacks(f"needs triton, and no {choice.VARIABLE}=reference", options.smoke)
    # Backwards are run again and again over the same activations.
    torch._functorch.config.donated_buffer = False
    copy = copied()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e9:.2f} TB/s")
    met = table(works(options), copy, milliseconds)
    for line in weight_gradients(options, milliseconds):
        print(line)
    print(f"goal {GOAL} of the copy: {'met' if met else 'missed'}")
    return 0


def table(given: Iterator[Work], copy: float, clock: Callable[[Run], float]) -> bool:
    """Print each work as it is measured, and what could not be; whether ours reach the goal."""
    met, failed = True, []
    print(f"{'operation':34} {'MB':>8} {'ms':>8}" + "".join(f"{way:>10}" for way in WAYS))
    for work in given:
        took = {}
        for way, run in work.ways.items():
            try:
                took[way] = clock(run)
            except Exception as error:
                if way == "ours":
                    raise
                failed.append(f"{work.name}, {way}: {type(error).__name__} {error}"[:200])
        share = {way: work.bytes / ms / copy for way, ms in took.items()}
        met = met and share["ours"] >= GOAL
        shares = "".join(f"{share[way]:10.2f}" if way in share else f"{'-':>10}" for way in WAYS)
        print(f"{work.name:34} {work.bytes / 1e6:8.1f} {took['ours']:8.3f}{shares}", flush=True)
    if find_spec("liger_kernel") is None:
        failed.append("Liger-Kernel is not installed (pip install liger-kernel)")
    for line in failed:
        print(f"not measured: {line}")
    return met


def milliseconds(run: Run, times: int = 30) -> float:
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
    return float(median(begin.elapsed_time(end) for begin, end in spans))


def copied() -> float:
    """Bytes that a copy reads and writes in a millisecond."""
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def works(options: argparse.Namespace) -> Iterator[Work]:
    """All that is bound by bandwidth, one after the other: each holds its memory while it lives."""
    T, t, k = options.tokens, options.tp, options.vocab // options.tp
    yield from cross_entropies(T, k)
    n = 4 * options.hidden // t
    yield from forward_and_backward(
        "bias + GELU",
        (3, 2),
        with_compiled(gelu.bias_gelu, gelu.bias_gelu_reference),
        [random(T, n), random(n)],
        [random(T, n)],
    )
    for n in options.widths:
        ways = with_compiled(layer_norm.add_layer_norm, layer_norm.add_layer_norm_reference)
        yield from forward_and_backward(
            f"residual + LayerNorm {n}",
            (4, 4),
            ways | liger_layer_norm(),
            [random(T, n), random(T, n), random(n), random(n)],
            [random(T, n), random(T, n)],
        )


def with_compiled(ours: Callable[..., Any], eager: Callable[..., Any]) -> dict[str, Any]:
    torch._dynamo.reset()  # each shape is compiled for itself
    return {"ours": ours, "eager": eager, "compiled": torch.compile(eager, dynamic=False)}


def forward_and_backward(
    name: str,
    moved: tuple[int, int],
    ways: dict[str, Callable[..., Any]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Iterator[Work]:
    """`moved`: how often backward, and forward, move as much as the first input."""
    inputs = [x.requires_grad_() for x in inputs]
    again, once = moved
    size = inputs[0].nbytes

    def backward(way: Callable[..., Any]) -> Run:
        graph: list[Any] = []  # made when it is first run, so that what fails is seen there

        def run() -> Any:
            if not graph:
                graph.append(way(*inputs))
            return torch.autograd.grad(graph[0], inputs, gradients, retain_graph=True)

        return run

    yield Work(
        f"{name}, forward",
        once * size,
        {key: partial(way, *inputs) for key, way in ways.items()},
    )
    yield Work(f"{name}, backward", again * size, {key: backward(way) for key, way in ways.items()})


def liger_layer_norm() -> dict[str, Any]:
    if find_spec("liger_kernel") is None:
        return {}

    def way(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        h = x + residual
        return h, LigerLayerNormFunction.apply(h, weight, bias, 1e-5)

    return {"Liger": way}


def cross_entropies(T: int, k: int) -> Iterator[Work]:
    logits, targets = random(T, k), torch.arange(T, device=DEVICE) % k
    parts = cross_entropy.statistics(logits, targets, 0).unsqueeze(0)
    rest = targets, parts, torch.ones((), device=DEVICE), 0, -1
    ways = with_compiled(cross_entropy.statistics, cross_entropy.statistics_reference)
    yield Work(
        "cross entropy, statistics",
        logits.nbytes,
        {key: partial(way, logits, targets, 0) for key, way in ways.items()},
    )
    ways = with_compiled(cross_entropy.gradient_, cross_entropy.gradient_reference_)
    each = {way: logits.clone() for way in ways}  # it is written over them
    yield Work(
        "cross entropy, gradient",
        2 * logits.nbytes,
        {key: partial(way, each[key], *rest) for key, way in ways.items()},
    )

    def torchs(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")

    def ligers(logits: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        given = logits, targets, None, -1, 0.0, 0.0, "sum"
        loss: Tensor = LigerCrossEntropyFunction.apply(*given)[0]
        return loss

    ways = with_compiled(fused_cross_entropy, torchs)
    if find_spec("liger_kernel") is not None:
        ways["Liger"] = ligers

    def whole(way: Callable[..., Tensor]) -> Run:
        leaf = logits.clone().requires_grad_()

        def run() -> Any:
            loss = way(leaf.view_as(leaf), targets)  # no leaf: who will may write over it
            return (loss.detach(), *torch.autograd.grad(loss, leaf))

        return run

    yield Work(
        "cross entropy, both",
        3 * logits.nbytes,
        {key: whole(way) for key, way in ways.items()},
    )


def weight_gradients(options: argparse.Namespace, clock: Callable[[Run], float]) -> Iterator[str]:
    """The rate of weight gradients, beside the plain way and the bare product."""
    T, h, k = options.tokens, options.hidden, 4 * options.hidden // options.tp
    dy, x = random(T, k), random(T, h)
    main = torch.zeros(k, h, device=DEVICE)
    ms = clock(lambda: weight_gradient.accumulate_(main, dy, x))
    plain, bare = clock(lambda: main.add_(dy.t() @ x)), clock(lambda: dy.t() @ x)
    yield (
        f"{'weight gradient':34} {2 * T * h * k / ms / 1e9:8.0f} TFLOP/s, {plain / ms:.2f} times a "
        f"product and a sum, {bare / ms:.2f} of the product alone"
    )


if __name__ == "__main__":
    sys.exit(main())
