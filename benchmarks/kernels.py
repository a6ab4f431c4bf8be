"""Measure the bandwidth of kernels, and the speedup of windowed attention.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only windows [--device cuda]

`bandwidth`, the default, needs a GPU and triton. For each operation, the table has the megabytes
that it must read and write, its time, and its bandwidth divided by that of a plain copy in the same
run. More columns have this share for eager torch, for torch.compile, and for Liger-Kernel if it is
installed and has the operation. All times are medians between CUDA events. The goal for schedir's
kernels is a share of 0.8. The matrix product limits the weight gradient, not the bytes. So the
script compares the weight gradient with a product and a sum, and with the product alone.

`windows` measures attention for each length and window: the forward, and forward and backward. The
speedup is the time without a window divided by the time with the window. The predicted speedup is
the number of all tiles divided by the number of visited tiles (`schedir.predict.window_tiles`). One
reference is the same kernel with a window over all tokens, to which the prediction applies. The
other is torch's `scaled_dot_product_attention`. The last two columns are the speedup of a GPT
layer: predicted from floating-point operations, and measured. In each round, all kernels of a
length run once, on one thread. Each ratio compares times of one round. The table has medians with
quartiles. On a CPU, times are processor time of the thread. On a GPU (`--device cuda`, in
bfloat16), they are between CUDA events, and the first rounds compile.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parse, print_header, print_row, report_missing
from schedir.kernels import backend_choice, cross_entropy, gelu, layer_norm, weight_gradient
from schedir.models.attention import attention
from schedir.models.gpt import Layer
from schedir.models.gpt_config import GPTConfig
from schedir.models.parameter_init import LayerParameters
from schedir.models.window_config import compute_device_tiles
from schedir.predict.window_tiles import count_layer_flops
from schedir.tensor_parallel.vocab_parallel import fused_cross_entropy

DEVICE = "cuda"
GOAL = 0.8
MAX_CLOCK_RATE = 2e9  # upper limit of a GPU's clock, in cycles per second
CACHE_BYTES = 1 << 28  # bytes, more than the cache of a GPU
IMPLEMENTATIONS = "ours", "eager", "compiled", "Liger"

Run = Callable[[], Any]
Window = tuple[int, int]
WINDOWS = "128:1", "256:1", "256:64", "256:256", "512:128", "512:512", "1024:256"
HEADER = (
    *("length", "window", "stride", "tiles", "predicted", "forward", "and backward", "over SDPA"),
    *("layer, predicted", "measured"),
)


class Operation(NamedTuple):
    """An operation: the bytes that it must read and write, and its implementations."""

    name: str
    bytes: int
    implementations: dict[str, Run]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="compare kernels with the bandwidth of a copy")
    parser.add_argument("--only", choices=("bandwidth", "windows"), default="bandwidth")
    group = parser.add_argument_group("bandwidth")
    group.add_argument("--tokens", type=int, default=4096)
    group.add_argument("--hidden", type=int, default=8192)
    group.add_argument(
        "--vocab", type=int, default=51200, help="vocabulary size of all tensor-parallel ranks"
    )
    group.add_argument("--tp", type=int, default=8)
    widths = [1024, 2048, 4096, 8192, 12288, 16384]
    group.add_argument(
        "--widths", type=int, nargs="*", default=widths, help="row sizes of LayerNorm"
    )
    group = parser.add_argument_group("windows")
    group.add_argument("--lengths", type=int, nargs="*", default=None)
    group.add_argument("--windows", nargs="*", default=WINDOWS, help="windows, as window:stride")
    group.add_argument("--heads", type=int, default=4)
    group.add_argument("--width", type=int, default=64, help="width of a head")
    group.add_argument("--rounds", type=int, default=9)
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parse(
        parser, argv, tokens=64, hidden=256, vocab=512, widths=[64],
        lengths=[200], windows=["64:64", "128:1"], rounds=2,
    )  # fmt: skip
    if options.smoke:
        print_windows(options)
    return print_windows(options) if options.only == "windows" else print_bandwidth(options)


def print_bandwidth(options: argparse.Namespace) -> int:
    """Print the bandwidth of each kernel as a share of a copy's. Return the exit code."""
    if not torch.cuda.is_available():
        return report_missing("needs a GPU, but torch finds none", options.smoke)
    if not backend_choice.uses_triton(torch.empty(0, device=DEVICE)):
        return report_missing(
            f"needs triton, and no {backend_choice.BACKEND_VARIABLE}=reference", options.smoke
        )
    # Each backward runs several times on the same activations: torch must not reuse their memory.
    torch._functorch.config.donated_buffer = False
    copy = measure_copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy / 1e9:.2f} TB/s")
    met = print_operations(list_operations(options), copy, measure_milliseconds)
    for rate in measure_weight_gradients(options, measure_milliseconds):
        print(rate)
    print(f"goal {GOAL} of the copy: {'met' if met else 'missed'}")
    return 0


def print_operations(
    operations: Iterator[Operation], copy: float, clock: Callable[[Run], float]
) -> bool:
    """Print each measurement and failure. Return whether all kernels of schedir meet the goal."""
    met, failed = True, []
    print(
        f"{'operation':34} {'MB':>8} {'ms':>8}" + "".join(f"{name:>10}" for name in IMPLEMENTATIONS)
    )
    for operation in operations:
        times = {}
        for name, run in operation.implementations.items():
            try:
                times[name] = clock(run)
            except Exception as error:
                if name == "ours":
                    raise
                failed.append(f"{operation.name}, {name}: {type(error).__name__} {error}"[:200])
        share = {name: operation.bytes / ms / copy for name, ms in times.items()}
        met = met and share["ours"] >= GOAL
        shares = "".join(
            f"{share[name]:10.2f}" if name in share else f"{'-':>10}" for name in IMPLEMENTATIONS
        )
        print(
            f"{operation.name:34} {operation.bytes / 1e6:8.1f} {times['ours']:8.3f}{shares}",
            flush=True,
        )
    if find_spec("liger_kernel") is None:
        failed.append("Liger-Kernel is not installed (pip install liger-kernel)")
    for reason in failed:
        print(f"not measured: {reason}")
    return met


def measure_milliseconds(run: Run, times: int = 30) -> float:
    """Return the median time on the GPU, with a cold cache and all kernels queued in advance."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = perf_counter()
    run()
    sleep_cycles = int(2 * (perf_counter() - start) * MAX_CLOCK_RATE)
    cache_filler, spans = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda"), []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache_filler.zero_()
        torch.cuda._sleep(
            sleep_cycles
        )  # so that the host issues all kernels before the first one runs
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in spans))


def measure_copy_bandwidth() -> float:
    """Return the bytes that a copy reads and writes in a millisecond."""
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure_milliseconds(lambda: target.copy_(source))


def make_random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def list_operations(options: argparse.Namespace) -> Iterator[Operation]:
    """Yield the operations one by one, because each keeps its tensors while it exists."""
    T, t, k = options.tokens, options.tp, options.vocab // options.tp
    yield from list_cross_entropies(T, k)
    n = 4 * options.hidden // t
    yield from list_forward_and_backward(
        "bias + GELU",
        (3, 2),
        collect_implementations(gelu.bias_gelu, gelu.bias_gelu_reference),
        [make_random_tensor(T, n), make_random_tensor(n)],
        [make_random_tensor(T, n)],
    )
    for n in options.widths:
        implementations = collect_implementations(
            layer_norm.add_layer_norm, layer_norm.add_layer_norm_reference
        )
        yield from list_forward_and_backward(
            f"residual + LayerNorm {n}",
            (4, 4),
            implementations | find_liger_layer_norm(),
            [
                make_random_tensor(T, n),
                make_random_tensor(T, n),
                make_random_tensor(n),
                make_random_tensor(n),
            ],
            [make_random_tensor(T, n), make_random_tensor(T, n)],
        )


def collect_implementations(
    function: Callable[..., Any], eager: Callable[..., Any]
) -> dict[str, Any]:
    torch._dynamo.reset()  # so that each shape is compiled separately
    return {"ours": function, "eager": eager, "compiled": torch.compile(eager, dynamic=False)}


def list_forward_and_backward(
    name: str,
    moved: tuple[int, int],
    implementations: dict[str, Callable[..., Any]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Iterator[Operation]:
    """Yield the forward and the backward of an operation.

    `moved` has the bytes of the backward and of the forward, in multiples of the first input.
    """
    inputs = [x.requires_grad_() for x in inputs]
    backward_factor, forward_factor = moved
    size = inputs[0].nbytes

    def backward(function: Callable[..., Any]) -> Run:
        graph: list[Any] = []  # built at the first run, so that its errors are reported there

        def run() -> Any:
            if not graph:
                graph.append(function(*inputs))
            return torch.autograd.grad(graph[0], inputs, gradients, retain_graph=True)

        return run

    yield Operation(
        f"{name}, forward",
        forward_factor * size,
        {key: partial(function, *inputs) for key, function in implementations.items()},
    )
    yield Operation(
        f"{name}, backward",
        backward_factor * size,
        {key: backward(function) for key, function in implementations.items()},
    )


def find_liger_layer_norm() -> dict[str, Any]:
    if find_spec("liger_kernel") is None:
        return {}

    def run_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        h = x + residual
        return h, LigerLayerNormFunction.apply(h, weight, bias, 1e-5)

    return {"Liger": run_layer_norm}


def list_cross_entropies(T: int, k: int) -> Iterator[Operation]:
    logits, targets = make_random_tensor(T, k), torch.arange(T, device=DEVICE) % k
    statistics = cross_entropy.compute_statistics(logits, targets, 0).unsqueeze(0)
    gradient_args = targets, statistics, torch.ones((), device=DEVICE), 0, -1
    implementations = collect_implementations(
        cross_entropy.compute_statistics, cross_entropy.compute_statistics_reference
    )
    yield Operation(
        "cross entropy, statistics",
        logits.nbytes,
        {key: partial(function, logits, targets, 0) for key, function in implementations.items()},
    )
    implementations = collect_implementations(
        cross_entropy.write_gradient_, cross_entropy.write_gradient_reference_
    )
    logit_copies = {
        function: logits.clone() for function in implementations
    }  # the kernels overwrite their logits
    yield Operation(
        "cross entropy, gradient",
        2 * logits.nbytes,
        {
            key: partial(function, logit_copies[key], *gradient_args)
            for key, function in implementations.items()
        },
    )

    def run_torch(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")

    def run_liger(logits: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        liger_args = logits, targets, None, -1, 0.0, 0.0, "sum"
        loss: Tensor = LigerCrossEntropyFunction.apply(*liger_args)[0]
        return loss

    implementations = collect_implementations(fused_cross_entropy, run_torch)
    if find_spec("liger_kernel") is not None:
        implementations["Liger"] = run_liger

    def make_forward_and_backward(function: Callable[..., Tensor]) -> Run:
        leaf = logits.clone().requires_grad_()

        def run() -> Any:
            loss = function(leaf.view_as(leaf), targets)  # a view, because kernels may overwrite it
            return (loss.detach(), *torch.autograd.grad(loss, leaf))

        return run

    yield Operation(
        "cross entropy, both",
        3 * logits.nbytes,
        {key: make_forward_and_backward(function) for key, function in implementations.items()},
    )


def measure_weight_gradients(
    options: argparse.Namespace, clock: Callable[[Run], float]
) -> Iterator[str]:
    """Measure the weight gradient of schedir, a product and a sum, and the product alone."""
    T, h, k = options.tokens, options.hidden, 4 * options.hidden // options.tp
    dy, x = make_random_tensor(T, k), make_random_tensor(T, h)
    main = torch.zeros(k, h, device=DEVICE)
    ms = clock(lambda: weight_gradient.accumulate_(main, dy, x))
    product_and_sum_ms, product_ms = clock(lambda: main.add_(dy.t() @ x)), clock(lambda: dy.t() @ x)
    yield (
        f"{'weight gradient':34} {2 * T * h * k / ms / 1e9:8.0f} TFLOP/s, "
        f"{product_and_sum_ms / ms:.2f} times a "
        f"product and a sum, {product_ms / ms:.2f} of the product alone"
    )


# ------------------------------------------------------------ windows


def print_windows(options: argparse.Namespace) -> int:
    """Print the predicted and measured speedups of windows. Return the exit code."""
    if options.device == "cuda" and not torch.cuda.is_available():
        return report_missing("needs a GPU, but torch finds none", options.smoke)
    torch.set_num_threads(1)
    lengths = options.lengths
    if lengths is None:
        lengths = (1024, 2048, 4096) if options.device == "cpu" else (4096, 16384, 65536)
    cpu = f"{platform.machine()}, {os.cpu_count()} processors"
    device_name = cpu if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{device_name}, torch {torch.__version__}, {options.heads} heads of {options.width}")
    print(f"{options.rounds} rounds; a measured number is a median, with its quartiles\n")
    print_header(*HEADER)
    for length in lengths:
        windows = [(int(w), int(s)) for w, _, s in (one.partition(":") for one in options.windows)]
        for row in _measure_rows(length, [one for one in windows if one[0] < length], options):
            print_row(*row)
    return 0


def _measure_rows(length: int, windows: list[Window], options: Any) -> list[list[str]]:
    """Measure one length, and return its table rows."""
    full_window, device = (2 * length, 1), options.device
    runs: dict[tuple[str, Window | None], Run] = {}
    for window in (None, full_window, *windows):
        forward, both = _build_attention(length, window, options)
        runs |= {("forward", window): forward, ("both", window): both}
        if window != full_window:
            runs["layer", window] = _build_layer(length, window, options)
    times = _measure_in_rounds(runs, options.rounds, device)

    def format_speedup(kind: str, base: Window | None, window: Window) -> str:
        low, middle, high = quantiles(
            [one / other for one, other in zip(times[kind, base], times[kind, window], strict=True)]
        )
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    rows, hidden = [], options.heads * options.width
    dense = count_layer_flops(compute_device_tiles(length, *full_window, device), hidden)
    for window in windows:
        tiles = compute_device_tiles(length, *window, device)
        rows.append(
            [
                *map(str, (length, *window)),
                f"{tiles.visited_count} of {tiles.dense_count}",
                f"{tiles.speedup:.2f}",
                format_speedup("forward", full_window, window),
                format_speedup("both", full_window, window),
                format_speedup("both", None, window),
                f"{dense / count_layer_flops(tiles, hidden):.2f}",
                format_speedup("layer", None, window),
            ]
        )
    return rows


def _make_tensor_options(options: Any) -> dict[str, Any]:
    return {
        "device": torch.device(options.device),
        "dtype": torch.float32 if options.device == "cpu" else torch.bfloat16,
    }


def _build_attention(length: int, window: Window | None, options: Any) -> tuple[Run, Run]:
    """Return functions for the forward, and for forward and backward."""
    shape = 1, length, options.heads, 3, options.width
    q, k, v = torch.randn(shape, **_make_tensor_options(options)).permute(3, 0, 2, 1, 4)
    for x in (q := q.detach(), k := k.detach(), v := v.detach()):
        x.requires_grad_()
    grad = torch.randn_like(q)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, window)

    def both() -> object:
        return torch.autograd.grad(attention(q, k, v, window), (q, k, v), grad)

    return forward, both


def _build_layer(length: int, window: Window | None, options: Any) -> Run:
    """Return a function that runs a layer of the GPT, forward and backward."""
    hidden = options.heads * options.width
    config = GPTConfig(vocab=2, layers=1, hidden=hidden, heads=options.heads, context=length)
    if window is not None:
        config = replace(config, window=window[0], stride=window[1])
    tensor_options: Any = _make_tensor_options(options)
    block = Layer(config, 0, LayerParameters.from_config(config, 0, None, tensor_options))
    x = torch.randn(1, length, hidden, **tensor_options).requires_grad_()
    grad = torch.randn_like(x)
    inputs = [x, *block.parameters()]
    return lambda: torch.autograd.grad(block(x), inputs, grad)


def _measure_in_rounds(runs: dict[Any, Run], rounds: int, device: str) -> dict[Any, list[float]]:
    """Return the seconds of each function in each round."""
    clock = _measure_cpu_seconds if device == "cpu" else _measure_gpu_seconds
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for k in range(2 + rounds):
        for name, run in runs.items():
            seconds = clock(run)
            if k >= 2:
                times[name].append(seconds)
    return times


def _measure_cpu_seconds(run: Run) -> float:
    start = thread_time()
    run()
    return thread_time() - start


def _measure_gpu_seconds(run: Run) -> float:
    """Return seconds on the GPU, measured over several calls, because one call is short."""
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
