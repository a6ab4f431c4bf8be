"""Measure stages, instructions and four virtual ranks on one GPU, and compare metrics with goals.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --only stage

The script prints the machine and its versions, and then one table with a row per metric: name,
value, unit, goal and "missed". Without a GPU, it ends with exit code 2. If a metric misses its goal
or a part fails, the script runs the other parts and ends with exit code 1. All times are between
CUDA events.

- `machine`: prints only the machine and its versions.
- `queues`: counts the pairs of streams of a process that share a hardware queue. Such streams wait
  for each other. For each stream, the script starts a kernel that occupies the stream for a while,
  and short kernels on all other streams. A short kernel that ends late shares the queue.
- `stage`: the model FLOP/s of transformer layers in bfloat16, forward and backward. The same run
  measures the FLOP/s of their matrix products and attention alone, and of a large bfloat16 product.
- `instruction`: the overhead of an instruction. One rank runs a step of tiny stages whose inputs
  are always ready, and a plain loop runs the same forwards and backwards.

In the next parts, four virtual ranks run and record 1F1B, each on its own streams. `gap` is the
time between two instructions of a compute lane, if the inputs of the second are ready. It includes
the recording. `two events` is the time of the recording alone. `exposed transfers` is the share of
the steady phase in which ranks wait for a message. `step, predicted` is the error of a simulation
with the costs of the previous step.

- `sleep`: a stage keeps one multiprocessor busy for a set time and sends activations of a real
  size. Ranks then share almost no resource, as if each had a GPU. This part measures the executor,
  its waits and the simulation.
- `gpt`: transformer stages share the multiprocessors, so the time of an instruction depends on the
  other ranks. The costs are means of the run. At the beginning and the end of a step, fewer ranks
  are busy, and instructions are faster than the mean. So the prediction is too long. It has m + 3
  times the mean of a forward and a backward, and a rank has m of them. The error is at most 3 / m.
  `host waits` counts the waits of the host for the GPU in a step with clipping and AdamW. `peak
  memory, predicted` is the error of the predicted peak, compared with torch's allocator. The peak
  includes weights, gradients, optimizer state and saved activations of all ranks, in the order in
  which the host issues instructions.

No part uses NCCL. Processes that share a GPU run in time slices of milliseconds, so metrics of
overlap would mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedir
from benchmarks import gpu_metrics
from benchmarks.gpu_metrics import Metric
from benchmarks.harness import parse, report_missing
from schedir import Costs, PipelineShape, Program, Timeline, compile
from schedir.errors import UsageError
from schedir.ir.cost.sizes import Sizes
from schedir.kernels.weight_gradient import accumulate_
from schedir.models import gpt
from schedir.predict.bubble_causes import compute_exposed_share, find_ready_gaps
from schedir.predict.calibrate import calibrate
from schedir.predict.timeline import build_spans
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import WARM_UP_STEPS
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.runtime.recording.allocator_growth import count_allocations
from schedir.schedules import one_f_one_b
from schedir.testing import tiny_model
from schedir.transports.gpu_selection import require_gpus

RANKS = 4
DEVICE = "cuda"
BUSY_CYCLES = 40_000_000  # cycles of the kernel that occupies a stream, about 20 ms
SHORT_KERNEL_SECONDS = 0.005  # seconds in which a short kernel ends if its queue is free
SYNC_WARNING: Final = (
    "called a synchronizing CUDA operation"  # torch's warning about an implicit wait
)
SYNC_OWNERS: Final = (
    torch.cuda,
    torch.cuda.Event,
    torch.cuda.Stream,
)  # owners of `synchronize` methods


def main() -> int:
    parser = argparse.ArgumentParser(
        description="measure stages, instructions and ranks on one GPU"
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="run only this part; can be repeated"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2, help="number of layers of a stage")
    parser.add_argument(
        "--product", type=int, default=8192, help="size of the large matrix product"
    )
    parser.add_argument("--microbatches", type=int, default=64, help="microbatches of part gpt")
    parser.add_argument(
        "--streams", type=int, default=24, help="streams of normal priority, in part queues"
    )
    parser.add_argument(
        "--high", type=int, default=8, help="streams of high priority, in part queues"
    )
    parser.add_argument("--forward", type=float, default=1.0, help="ms of a forward in part sleep")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each kind")
    parser.add_argument("--metrics", type=Path, help="append each metric to this file")
    options = parse(
        parser, hidden=128, context=16, layers=1, product=128, microbatches=4, steps=2,
        forward=0.1, streams=2, high=1,
    )  # fmt: skip
    for line in describe_machine():
        print(line, flush=True)
    # Streams that share a hardware queue wait for each other, and four ranks have more than 8.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        require_gpus(1)
    except UsageError as error:
        return report_missing(str(error), options.smoke)
    print()
    return int(not print_metrics(options))


def print_metrics(options: argparse.Namespace) -> bool:
    """Print and write each metric. Return whether all parts ran and met their goals."""
    print(f"{'':44} {'':>9} {'':8} {'goal':>6}")
    met = True
    for name in options.only or PARTS:
        try:
            for metric in PARTS[name](options):
                print(metric, flush=True)
                gpu_metrics.append_metric(options.metrics, metric)
                met = met and not metric.is_missed
        except Exception as error:
            traceback.print_exc()
            print(f"not measured, or not all of it: {name}: {type(error).__name__}", flush=True)
            met = False
    return met


def measure_machine(options: argparse.Namespace) -> Iterator[Metric]:
    """Measure nothing, because `main` prints the machine."""
    yield from ()


def measure_queues(options: argparse.Namespace) -> Iterator[Metric]:
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(options.streams))]
    streams += [torch.cuda.Stream(priority=-1) for _ in range(options.high)]
    pairs = find_shared_queues(streams)
    for first, second in pairs:
        print(f"stream {second} waits for stream {first}")
    yield Metric("pairs of streams that share a queue", len(pairs), "")
    yield Metric("  of pairs", len(streams) * (len(streams) - 1), "")


def measure_stage(options: argparse.Namespace) -> Iterator[Metric]:
    shape = options.hidden, options.context, options.layers
    product_rate = measure_product_rate(options.product)
    yield Metric(f"product of side {options.product}", product_rate / 1e12, "TFLOP/s")
    kernel_rate, stage_rate = measure_kernel_rate(*shape), measure_stage_rate(*shape)
    yield Metric(f"products of a stage of hidden {options.hidden}", kernel_rate / 1e12, "TFLOP/s")
    yield Metric(f"stage of hidden {options.hidden}", stage_rate / 1e12, "TFLOP/s")
    yield Metric("  of the large product's", 100 * stage_rate / product_rate, "%")
    yield Metric("  of its own products'", 100 * stage_rate / kernel_rate, "%", gpu_metrics.STAGE)


def measure_instruction(options: argparse.Namespace) -> Iterator[Metric]:
    yield Metric("one rank, an instruction", measure_instruction_overhead(), "us", gpu_metrics.GAP)
    yield Metric("two events, one after the other", 1e6 * measure_event_gap(), "us")


def measure_sleeping_ranks(options: argparse.Namespace) -> Iterator[Metric]:
    boundary = Boundary((1, options.context, options.hidden), torch.bfloat16)
    ranks = build_sleeping_ranks(16, boundary, round(options.forward / 1e3 * measure_clock_rate()))
    inputs = torch.randn(16, *boundary.shape, device=DEVICE, dtype=boundary.dtype)
    step = partial(ranks.step, inputs, inputs)
    yield from compute_rank_metrics(
        "ranks that sleep", record_timelines(ranks, step, options.steps)
    )


def measure_gpt(options: argparse.Namespace) -> Iterator[Metric]:
    layers, hidden, context = RANKS * options.layers, options.hidden, options.context
    config = gpt.GPTConfig(256, layers, hidden, max(1, hidden // 128), context, tied=False)
    yield from measure_gpt_ranks(config, options.microbatches, options.steps)


PARTS: Final[dict[str, Callable[[argparse.Namespace], Iterator[Metric]]]] = {
    "machine": measure_machine,
    "queues": measure_queues,
    "stage": measure_stage,
    "instruction": measure_instruction,
    "sleep": measure_sleeping_ranks,
    "gpt": measure_gpt,
}


# ---------------------------------------------------------------- the machine


def read_command_output(*command: str) -> str:
    """Return the output of a command in one line, or an empty text if the command fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(result.stdout.strip().splitlines())


def format_package_versions(*names: str) -> str:
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def describe_machine() -> Iterator[str]:
    """Yield lines that describe the machine and the versions of its software."""
    yield f"commit: {read_command_output('git', 'rev-parse', '--short', 'HEAD') or 'not known'}"
    yield f"processor: {platform.machine()}, {os.cpu_count()} cores"
    yield (
        f"versions: python {platform.python_version()}, torch {torch.__version__}, "
        f"{format_package_versions('triton', 'numpy', 'pytest', 'hypothesis', 'liger-kernel')}"
    )
    if not torch.cuda.is_available():
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield f"CUDA: {torch.version.cuda}, NCCL {nccl}"
    for k in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(k)
        yield (
            f"GPU: {card.name}, {card.total_memory / 2**30:.0f} GiB, "
            f"{card.multi_processor_count} multiprocessors"
        )
    query = "driver_version,clocks.max.sm,power.limit"
    driver = read_command_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    yield f"driver: {driver}"


# ---------------------------------------------------------------- streams that share a queue


def find_shared_queues(streams: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the pairs of streams whose second stream waits while the first is busy."""
    tensor = torch.zeros(1, device="cuda")
    for stream in streams:  # the first use of a stream may wait for all streams of the device
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
            tensor.add_(1)
    pairs = []
    for k, busy_stream in enumerate(streams):
        others = [i for i in range(len(streams)) if i != k]
        end_events = {i: torch.cuda.Event() for i in others}
        busy_end = torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(busy_stream):
            torch.cuda._sleep(BUSY_CYCLES)
            busy_end.record()
        for i in others:
            with torch.cuda.stream(streams[i]):
                tensor.add_(1)
                end_events[i].record()
        time.sleep(SHORT_KERNEL_SECONDS)
        waiting = [i for i in others if not end_events[i].query()]
        if busy_end.query():
            raise RuntimeError("the host is too slow for this probe: a stream was free too soon")
        pairs += [(k, i) for i in waiting]
    torch.cuda.synchronize()
    return pairs


# ---------------------------------------------------------------- one stage


def measure_seconds(run: Callable[[], object], times: int = 10, warm: int = 3) -> float:
    """Return the median time on the GPU from the first to the last kernel of `run`."""
    samples: list[float] = []
    for _ in range(warm + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return median(samples[warm:])


def measure_product_rate(side: int) -> float:
    """Return the FLOP/s of a square matrix product in bfloat16."""
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / measure_seconds(lambda: a @ b)


def count_layer_flop(hidden: int, context: int) -> int:
    """Return the operations of matrix products in the forward of a layer over one sequence.

    24 T h^2 + 4 T^2 h (Narayanan et al., arXiv 2104.04473, appendix), which counts the full
    attention matrix, although half of it is masked. Other publications count in the same way.
    """
    return 24 * context * hidden**2 + 4 * context**2 * hidden


def build_gpt_stage(config: gpt.GPTConfig, stage: int, stages: int) -> nn.Module:
    """Return a stage in bfloat16 on the GPU, with gradients in float32."""
    device = torch.device(DEVICE)
    module = gpt.build_stage(config, stage, stages, device=device, dtype=torch.bfloat16)
    use_float32_gradients(module)
    return module


def measure_stage_rate(hidden: int, context: int, layers: int) -> float:
    """Return the model FLOP/s of a middle stage. A backward counts as two forwards."""
    stage = build_gpt_stage(gpt.GPTConfig(256, 3 * layers, hidden, hidden // 128, context), 1, 3)
    x = torch.randn(1, context, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    flop = 3 * layers * count_layer_flop(hidden, context)
    return flop / measure_seconds(lambda: stage(x).backward(dy))


def measure_kernel_rate(hidden: int, context: int, layers: int) -> float:
    """Return the model FLOP/s that the matrix products and the attention of a stage reach alone.

    They run forward and backward, one after the other, without other kernels between them. Each
    product runs as in the stage: y = x W', dx = dy W, and dW accumulates in float32.
    """

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    products = [
        (new(context, n), new(k, n), new(context, k),
         torch.zeros(k, n, device=DEVICE))
        for k, n in shapes
    ]  # fmt: skip
    q, k, v, dy = (new(1, hidden // 128, context, 128) for _ in range(4))
    qkv = [part.requires_grad_() for part in (q, k, v)]

    def run() -> None:
        for _ in range(layers):
            for x, weight, _, _ in products:
                F.linear(x, weight)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(heads, qkv, dy)
            for x, weight, gradient, main in products:
                torch.mm(gradient, weight)
                accumulate_(main, gradient, x)

    return 3 * layers * count_layer_flop(hidden, context) / measure_seconds(run)


# ---------------------------------------------------------------- one instruction


def measure_instruction_overhead(microbatches: int = 256) -> float:
    """Return the overhead of a Forward or Backward in us, on one rank without a recorder."""
    (stage,) = tiny_model.make_tiny_stages(1)
    stage.to(DEVICE)
    inputs, targets = (x.to(DEVICE) for x in tiny_model.make_batch(microbatches))
    boundary = Boundary((2, tiny_model.WIDTH), torch.float64)
    program = compile(one_f_one_b, PipelineShape(1, microbatches))
    world = InProcessExecutor(
        program,
        [stage],
        loss=tiny_model.squared_error,
        boundary=boundary,
        execution=ExecutionOptions(record_timestamps=False),
    )
    rank = world.executors[0]

    def run_plain_loop() -> None:
        for x, target in zip(inputs, targets, strict=True):
            tiny_model.squared_error(stage(x), target).backward()

    overhead = measure_seconds(lambda: rank.step(inputs, targets)) - measure_seconds(run_plain_loop)
    return overhead / (2 * microbatches) * 1e6


def measure_event_gap(times: int = 100) -> float:
    """Return the seconds between two events that are recorded one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * times)]
    torch.cuda._sleep(10_000_000)  # the host records all events in this time
    for event in events:
        event.record()
    torch.cuda.synchronize()
    event_pairs = zip(events[::2], events[1::2], strict=True)
    return float(median(first.elapsed_time(second) / 1e3 for first, second in event_pairs))


# ---------------------------------------------------------------- virtual ranks


class _Sleep(torch.autograd.Function):
    """Multiply by a weight after `cycles` cycles on one multiprocessor; twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        ctx.save_for_backward(weight)
        torch.cuda._sleep(cycles)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        torch.cuda._sleep(2 * ctx.cycles)
        return dy[0] * weight, torch.zeros_like(weight), None


class Sleeper(nn.Module):
    """A stage whose forward and backward take a set time."""

    def __init__(self, cycles: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cycles = cycles
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self.cycles)  # type: ignore[no-untyped-call]
        return y


def measure_clock_rate() -> float:
    """Return the frequency of the clock that a sleeping kernel counts."""
    return 1e8 / measure_seconds(lambda: torch.cuda._sleep(100_000_000), times=3, warm=1)


def compile_1f1b(microbatches: int, clip: bool = False) -> Program:
    """Compile 1F1B for four ranks, with early receives and as few slots as it needs."""
    costs, shape = Costs(F=1, B=2, send=0.02), PipelineShape(RANKS, microbatches)
    return compile(
        one_f_one_b,
        shape,
        progress_model="per_edge",
        costs=costs,
        overlap=True,
        buffer_sharing="latency_preserving",
        clip_grad_norm=clip,
    )


def build_sleeping_ranks(microbatches: int, boundary: Boundary, cycles: int) -> InProcessExecutor:
    """Return virtual ranks whose forwards take a number of cycles."""
    stages = [Sleeper(cycles, boundary.dtype).to(DEVICE) for _ in range(RANKS)]
    return InProcessExecutor(
        compile_1f1b(microbatches),
        stages,
        loss=lambda y, _: y.sum(dtype=torch.float32),
        boundary=boundary,
    )


def record_timelines(
    ranks: InProcessExecutor, step: Callable[[], object], steps: int
) -> list[Timeline]:
    """Return the Timelines of `steps` steps, after warm-up steps."""
    timelines = []
    for _ in range(WARM_UP_STEPS + steps):
        step()
        timelines.append(ranks.timeline())
    return timelines[WARM_UP_STEPS:]


def compute_rank_metrics(name: str, runs: Sequence[Timeline]) -> Iterator[Metric]:
    """Yield the metrics of at least two Timelines of virtual ranks."""
    gaps = 1e6 * np.concatenate([find_ready_gaps(run) for run in runs])
    yield Metric(f"{name}: gap, median", float(np.median(gaps)), "us", gpu_metrics.GAP)
    yield Metric("  gap, 9 of 10 are less", float(np.percentile(gaps, 90)), "us")
    yield Metric(
        "  exposed transfers",
        100 * median(map(compute_exposed_share, runs)),
        "%",
        gpu_metrics.EXPOSED,
    )
    yield Metric("  step", 1e3 * median(run.span for run in runs), "ms")
    errors = [
        schedir.simulate(
            run.program,
            calibrate(run),
            progress_model=run.progress_model,
            blocking_hosts=run.blocking_hosts,
        ).span
        / next_run.span
        - 1
        for run, next_run in pairwise(runs)
    ]
    yield Metric("  step, predicted, off by", 100 * median(map(abs, errors)), "%", gpu_metrics.STEP)


def measure_gpt_ranks(config: gpt.GPTConfig, microbatches: int, steps: int) -> Iterator[Metric]:
    """Yield the metrics of the ranks of a GPT, and of their memory."""
    gc.collect()
    torch.cuda.empty_cache()
    bytes_before = torch.cuda.memory_allocated()
    boundary = Boundary((1, config.context, config.hidden), torch.bfloat16)
    stages = [build_gpt_stage(config, s, RANKS) for s in range(RANKS)]
    inputs, targets = torch.randint(
        0, config.vocab, (2, microbatches, 1, config.context), device=DEVICE
    )
    sizes = measure_sizes(
        stages, inputs[0], targets[0], loss=gpt.loss, boundary=boundary, optimizer_state=12.0
    )  # fmt: skip
    ranks = InProcessExecutor(
        compile_1f1b(microbatches, clip=True),
        stages,
        loss=gpt.loss,
        boundary=boundary,
        optimizer=lambda p: MainOptimizer(p, partial(torch.optim.AdamW, lr=1e-5, fused=True)),
    )
    scale = 1 / targets.numel()
    for _ in range(WARM_UP_STEPS):
        ranks.step(inputs, targets, scale)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    device = torch.device(DEVICE)
    allocations_before = count_allocations(device)
    runs = record_timelines(ranks, partial(ranks.step, inputs, targets, scale), steps)
    peak_bytes = torch.cuda.max_memory_allocated() - bytes_before
    yield from compute_rank_metrics("ranks of a GPT", runs)
    with record_host_waits() as waits:
        ranks.step(inputs, targets, scale)
    yield Metric("  host waits in a step", len(waits), "", gpu_metrics.WAITS)
    yield Metric(
        "  device asked for memory, in all steps",
        count_allocations(device) - allocations_before,
        "",
    )
    predicted = predict_peak_memory(ranks, sizes) + inputs.nbytes + targets.nbytes
    yield Metric("  peak memory", peak_bytes / 2**30, "GiB")
    yield Metric(
        "  peak memory, predicted, off by",
        100 * abs(predicted / peak_bytes - 1),
        "%",
        gpu_metrics.MEMORY,
    )


def predict_peak_memory(ranks: InProcessExecutor, sizes: Sizes) -> float:
    """Return the peak memory of all ranks if instructions run when the host issues them.

    The allocator allocates in this order, no matter when the GPU runs the instructions.
    """
    offsets = ranks.program.offsets
    issue_order = ranks.execution_orders[ranks.program.digest].round_robin_order
    positions = np.array([offsets[rank] + index for rank, index in issue_order])
    issue_times = np.empty(len(positions))
    issue_times[positions] = np.arange(len(positions))
    spans = build_spans(ranks.program, issue_times, issue_times + 0.5)
    return Timeline(ranks.program, spans, sizes=sizes).peak_over_all_ranks


# ---------------------------------------------------------------- waits of the host


@contextmanager
def record_host_waits() -> Iterator[list[str]]:
    """Record each call that makes the host wait for the GPU.

    torch warns about some of these calls; others are explicit synchronizations.
    """
    calls: list[str] = []
    with ExitStack() as stack:
        for owner in SYNC_OWNERS:
            recording_wait = _record_calls(getattr(owner, "synchronize"), calls)  # noqa: B009
            stack.enter_context(mock.patch.object(owner, "synchronize", recording_wait))
        caught_warnings = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield calls
        finally:
            torch.cuda.set_sync_debug_mode("default")
            calls += [str(w.message) for w in caught_warnings if SYNC_WARNING in str(w.message)]


def _record_calls(wait: Callable[..., object], calls: list[str]) -> Callable[..., object]:
    # The replacement must be a plain function, so that Python binds it to the object as a method.
    def record_and_wait(*args: Any, **kwargs: Any) -> object:
        calls.append(f"{wait.__qualname__} is called")
        return wait(*args, **kwargs)

    return record_and_wait


if __name__ == "__main__":
    sys.exit(main())
