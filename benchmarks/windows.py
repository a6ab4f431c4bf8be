"""What windows gain: predicted from the tiles that are visited, beside measured, in one run.

    python benchmarks/windows.py

For each length and window: attention's forward, and its forward and backward, with the window, over
the same without one.  Predicted is dense over visited tiles (`schedir.predict.windows`).  It is
held beside two that attend to all: the same tiles, by a window over all, which is what the
prediction speaks of; and `scaled_dot_product_attention`, which is what one would run.  The last two
columns are a layer of the GPT, by floating-point operations and measured, over the same without.

All of a length run in turn, round after round, on one thread, and ratios are of the same round; the
median is printed, with its quartiles.  On a CPU, times are those of the thread's processor; on a
GPU (--device cuda, in bfloat16) they are between events, and the first rounds compile.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from time import thread_time
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import head, lacks, line, parse
from schedir.models.attention import attention
from schedir.models.tiles import tiles_of
from schedir.predict.windows import layer_flops
from schedir.training.gpt import Layer
from schedir.training.gpt_config import GPTConfig

Window = tuple[int, int]
Run = Callable[[], object]
WINDOWS = "128:1", "256:1", "256:64", "256:256", "512:128", "512:512", "1024:256"
HEAD = (
    *("length", "window", "stride", "tiles", "predicted", "forward", "and backward", "over SDPA"),
    *("layer, predicted", "measured"),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="predicted beside measured speed-ups of windows")
    parser.add_argument("--lengths", type=int, nargs="*", default=None)
    parser.add_argument("--windows", nargs="*", default=WINDOWS, help="window:stride")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parse(parser, words, lengths=[200], windows=["64:64", "128:1"], rounds=2)
    if options.device == "cuda" and not torch.cuda.is_available():
        return lacks("needs a GPU, and torch sees none", options.smoke)
    torch.set_num_threads(1)
    lengths = options.lengths
    if lengths is None:
        lengths = (1024, 2048, 4096) if options.device == "cpu" else (4096, 16384, 65536)
    cpu = f"{platform.machine()}, {os.cpu_count()} processors"
    where = cpu if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, {options.heads} heads of {options.width}")
    print(f"{options.rounds} rounds; a measured number is a median, with its quartiles\n")
    head(*HEAD)
    for length in lengths:
        given = [(int(w), int(s)) for w, _, s in (one.partition(":") for one in options.windows)]
        for row in _rows(length, [one for one in given if one[0] < length], options):
            line(*row)
    return 0


def _rows(length: int, windows: list[Window], options: Any) -> list[list[str]]:
    """The rows of a length."""
    whole, device = (2 * length, 1), options.device
    runs: dict[tuple[str, Window | None], Run] = {}
    for window in (None, whole, *windows):
        forward, both = _attention(length, window, options)
        runs |= {("forward", window): forward, ("both", window): both}
        if window != whole:
            runs["layer", window] = _layer(length, window, options)
    took = _measured(runs, options.rounds, device)

    def over(kind: str, base: Window | None, window: Window) -> str:
        low, middle, high = quantiles(
            [one / other for one, other in zip(took[kind, base], took[kind, window], strict=True)]
        )
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    rows, hidden = [], options.heads * options.width
    dense = layer_flops(tiles_of(length, *whole, device), hidden)
    for window in windows:
        found = tiles_of(length, *window, device)
        rows.append(
            [
                *map(str, (length, *window)), f"{found.visited} of {found.dense}",
                f"{found.speedup:.2f}", over("forward", whole, window),
                over("both", whole, window), over("both", None, window),
                f"{dense / layer_flops(found, hidden):.2f}", over("layer", None, window),
            ]
        )  # fmt: skip
    return rows


def _where(options: Any) -> dict[str, Any]:
    return {
        "device": torch.device(options.device),
        "dtype": torch.float32 if options.device == "cpu" else torch.bfloat16,
    }


def _attention(length: int, window: Window | None, options: Any) -> tuple[Run, Run]:
    """Its forward, and its forward and backward."""
    shape = 1, length, options.heads, 3, options.width
    q, k, v = torch.randn(shape, **_where(options)).permute(3, 0, 2, 1, 4)
    for x in (q := q.detach(), k := k.detach(), v := v.detach()):
        x.requires_grad_()
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, window)

    def both() -> object:
        return torch.autograd.grad(attention(q, k, v, window), (q, k, v), grad)

    return forward, both


def _layer(length: int, window: Window | None, options: Any) -> Run:
    """A layer of the GPT, forward and backward."""
    hidden = options.heads * options.width
    config = GPTConfig(vocab=2, layers=1, hidden=hidden, heads=options.heads, context=length)
    if window is not None:
        config = replace(config, window=window[0], stride=window[1])
    where: Any = _where(options)
    block = Layer(config, 0, None, where)
    x = torch.randn(1, length, hidden, **where).requires_grad_()
    grad = torch.randn_like(x)
    inputs = [x, *block.parameters()]
    return lambda: torch.autograd.grad(block(x), inputs, grad)


def _measured(runs: dict[Any, Run], rounds: int, device: str) -> dict[Any, list[float]]:
    """Seconds of each, of each round."""
    clock = _on_cpu if device == "cpu" else _on_gpu
    took: dict[Any, list[float]] = {name: [] for name in runs}
    for k in range(2 + rounds):
        for name, run in runs.items():
            seconds = clock(run)
            if k >= 2:
                took[name].append(seconds)
    return took


def _on_cpu(run: Run) -> float:
    began = thread_time()
    run()
    return thread_time() - began


def _on_gpu(run: Run) -> float:
    """Of the GPU: several, for one is short."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e4


if __name__ == "__main__":
    sys.exit(main())
