"""Measure the machine as a Cluster for the planner.

Several processes run the same measurements at the same time: one process on each GPU, or any number
of processes on the CPU. The processes measure matrix products, the memory bandwidth, layers of the
trainer's GPT, and all-reduces.

On a CPU, a compute time is the processor time of the thread, so it does not include the load of
other programs. This processor time is multiplied by the number of processes that share a processor.
On GPUs, a compute time is wall time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from schedir.errors import UsageError, format_bytes
from schedir.ir.cost.cluster import Cluster
from schedir.models import gpt
from schedir.models.gpt_config import GPTConfig
from schedir.models.parameter_init import LayerParameters
from schedir.planner.hardware.cluster_fit import (
    MachineMeasurements,
    MeasuredAllReduce,
    MeasuredGemm,
    MeasuredLayer,
    compare_measurements,
    fit_cluster,
)
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.transports.local_processes import run_processes
from schedir.transports.registry import DEVICES, Device, load_object

TIMEOUT: Final = 300.0  # A benchmark that takes more seconds fails.
# A tensor-parallel layer has two all-reduces in the forward and two in the backward (arXiv
# 1909.08053, section 3).
ALL_REDUCES_PER_LAYER: Final = 4
# The smallest time of an all-reduce within a layer, in seconds. This time is computed as a
# difference, which noise can make negative.
_MIN_SECONDS: Final = 1e-6
# The benchmark warns if other programs use more than this share of the processors. It also computes
# by how much the rounds of each measurement differ, and warns if the median of these differences is
# more than this share.
BUSY_THRESHOLD: Final = 0.1


class BenchmarkExtent(NamedTuple):
    """The measurements that are made on a type of device.

    A layer is (hidden, heads, sequence, samples per microbatch).

    Args:
        gemms: Matrix products (m, k) x (k, n), as (m, k, n).
        smallest_layers: Layers that are so small that only kernel launches take time.
        layers: Layers of usual sizes.
        copy_bytes: Bytes of the tensor that measures the memory bandwidth. An in-place addition to
            this tensor reads and writes as many bytes as a copy.
        all_reduce_bytes: Bytes of each all-reduce.
        sharded_layers: Layers that tensor-parallel ranks share. Each has `ALL_REDUCES_PER_LAYER`
            all-reduces.
    """

    gemms: tuple[tuple[int, int, int], ...]
    smallest_layers: tuple[tuple[int, int, int, int], ...]
    layers: tuple[tuple[int, int, int, int], ...]
    copy_bytes: int
    all_reduce_bytes: tuple[int, ...]
    sharded_layers: tuple[tuple[int, int, int, int], ...] = ()


def _list_gemm_shapes(*shapes: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return the products (m, k, n) of layers. A shape is (tokens, hidden size).

    The last two products belong to a tensor-parallel shard of the first layer.
    """
    gemms = [(m, k, n) for m, h in shapes for k, n in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))]
    m, h = shapes[0]
    return (*gemms, (m, h, h // 4), (m, h // 4, h))


EXTENTS: Final[dict[str, BenchmarkExtent]] = {
    "cpu": BenchmarkExtent(
        _list_gemm_shapes((128, 256), (512, 512)),
        ((16, 1, 8, 1), (32, 2, 8, 1)),
        ((256, 8, 128, 1), (256, 8, 128, 4), (256, 4, 256, 2), (512, 8, 64, 2), (512, 8, 128, 4)),
        2**22,
        (2**21, 2**24),
        ((256, 8, 128, 1), (256, 8, 128, 4)),
    ),
    "cuda": BenchmarkExtent(
        _list_gemm_shapes((2048, 2048), (4096, 8192)),
        ((64, 1, 32, 1), (128, 2, 32, 1)),
        ((2048, 16, 2048, 2), (4096, 32, 2048, 1), (4096, 32, 2048, 4), (8192, 64, 2048, 1)),
        2**28,
        (2**12, 2**20, 2**24, 2**27),
    ),
}
QUICK: Final = BenchmarkExtent(
    ((32, 32, 32), (32, 64, 64)), ((16, 1, 8, 1),), ((64, 2, 32, 2),), 2**16, (2**16,),
    ((64, 4, 32, 2),),
)  # fmt: skip


class BenchmarkResult(NamedTuple):
    """The Cluster that was fitted to the measurements of a machine.

    Args:
        cluster: The speeds and the memory of the machine.
        notes: Field of the Cluster -> the source of its value.
        table: Lines that compare each measurement with the prediction of the Cluster.
        warnings: Possible reasons why the measurements are wrong.
    """

    cluster: Cluster
    notes: dict[str, str]
    table: tuple[str, ...]
    warnings: tuple[str, ...]


def measure(
    processes: int | None = None,
    device: Device = "cpu",
    *,
    quick: bool = False,
    progress: bool = False,
) -> BenchmarkResult:
    """Measure this machine, and fit a Cluster to the measurements.

    The measurements take about half a minute.

    Args:
        processes: The number of processes. By default one for each processor or GPU.
        device: The device, "cpu" or "cuda".
        quick: Measure for a few seconds only. The result is less accurate.
        progress: Print each kind of measurement on standard error.

    Raises:
        UsageError: The device is unknown or missing, or `processes` is less than 1.
    """
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not known", hint=" or ".join(DEVICES))
    number = max(_count_devices(device), 1) if processes is None else processes
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"processes must be 1 or more, not {processes!r}", fields=["processes"])
    load_object(DEVICES[device].require_path)(number)
    shared = count_processors() if device == "cpu" else None
    extent = QUICK if quick else EXTENTS[device]
    context = multiprocessing.get_context("spawn")
    seconds = 0.02 if quick else 0.3
    if progress:
        processors_text = f"{shared} processor{'s' * (shared > 1)}" if shared else "a GPU each"
        _print_progress(f"{number} process{'es' * (number > 1)} on {processors_text}")
    arguments = device, extent, seconds, progress
    samples = run_processes(_measure_process, number, *arguments, context=context, timeout=TIMEOUT)
    return _combine_samples(samples, number, shared, device, extent)


def count_processors() -> int:
    """Return the number of processors that this process may use at the same time.

    The result is the number in the CPU affinity, limited by the CPU quota of the cgroup.
    """
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(available, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # The cgroup has no limit.
        return available


def _compute_slowdown(processes: int, processor_count: int | None) -> float:
    """Return the factor by which a process is slower if all processes compute at the same time."""
    return 1.0 if processor_count is None else max(1.0, processes / processor_count)


def _count_devices(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else count_processors()


# ---------------------------------------------------------------- one process


class MeasuredSamples(NamedTuple):
    """The measurements of one process.

    Args:
        gemms: Seconds of each product, in each round.
        smallest_layers: Seconds of each of the smallest layers, in each round.
        layers: Seconds of each layer, in each round.
        copy_seconds: Seconds of the in-place addition to a tensor of `copy_bytes`, in each round.
        all_reduces: For each all-reduce, the number of processes in the group, the bytes, and the
            seconds in each round. The list of seconds is empty if this process was in no group.
        memory_bytes: Bytes of memory of the process.
        processor_share: Processor time divided by wall time, during the matrix products.
    """

    gemms: list[list[float]]
    smallest_layers: list[list[float]]
    layers: list[list[float]]
    copy_seconds: list[float]
    all_reduces: list[tuple[int, int, list[float]]]
    memory_bytes: float
    processor_share: float


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure_process(
    rank: int, device: str, extent: BenchmarkExtent, seconds: float, progress: bool
) -> MeasuredSamples:
    """Run all measurements in one process. All processes run this at the same time."""
    say = _print_progress if progress and rank == 0 else lambda line: None
    say(f"measuring {len(extent.gemms)} matrix products and a copy")
    watch = _Stopwatch(device, seconds)
    if device == "cuda":
        torch.cuda.set_device(rank)
    tensor_options = {"device": torch.device(device), "dtype": watch.dtype}
    start_times = time.perf_counter(), time.process_time()
    products = [watch.time_rounds(_make_gemm(*shape, tensor_options)) for shape in extent.gemms]
    share = (time.process_time() - start_times[1]) / (time.perf_counter() - start_times[0])
    copied = watch.time_rounds(partial(torch.ones(extent.copy_bytes // 4, device=device).add_, 1.0))
    say(f"measuring {len(extent.smallest_layers) + len(extent.layers)} layers")
    smallest, layers = (
        [watch.time_rounds(_make_layer_step(*shape, tensor_options)) for shape in shapes]
        for shapes in (extent.smallest_layers, extent.layers)
    )
    say("measuring all-reduces")
    slower = _compute_slowdown(
        dist.get_world_size(), count_processors() if device == "cpu" else None
    )
    sums = (
        [*_measure_all_reduces(extent, watch, tensor_options, slower)]
        if dist.get_world_size() > 1
        else []
    )
    memory = _get_memory_bytes(device)
    return MeasuredSamples(products, smallest, layers, copied, sums, memory, share)


class _Stopwatch:
    """A stopwatch that runs a function repeatedly for some seconds, in several rounds."""

    ROUNDS = 5

    def __init__(self, device: str, seconds: float) -> None:
        self.device = device
        self.round_seconds = seconds / self.ROUNDS
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def time_rounds(self, run: Callable[[], object], *, wall: bool = False) -> list[float]:
        """Return the seconds per run in each round: wall time on GPUs, processor time on CPUs.

        With `wall`, the result is wall time on CPUs, too. All processes must call this at the same
        point, with an equivalent function.
        """
        wall = wall or self.device == "cuda"
        return [round_times[not wall] for round_times in self.time_wall_and_processor(run)]

    def time_wall_and_processor(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        """Return the seconds of wall time and of thread processor time per run, in each round."""
        for _ in range(3):
            run()
        self._synchronize()
        start_time = time.perf_counter()
        run()
        self._synchronize()
        # All processes must run the function equally often, because the function may contain
        # collectives.
        run_count = torch.tensor(self.round_seconds / max(time.perf_counter() - start_time, 1e-7))
        dist.all_reduce(run_count, dist.ReduceOp.MIN)
        times = min(max(int(run_count), 1), 10_000)
        rounds = []
        for _ in range(self.ROUNDS):
            dist.barrier()
            start_time = time.perf_counter()
            worked = time.thread_time()
            for _ in range(times):
                run()
            self._synchronize()
            worked = time.thread_time() - worked
            rounds.append(((time.perf_counter() - start_time) / times, worked / times))
        return rounds

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _make_gemm(m: int, k: int, n: int, tensor_options: Any) -> Callable[[], object]:
    """Return a function that multiplies by a weight, and runs the two products of the backward."""
    x, w, dy = (torch.randn(*shape, **tensor_options) for shape in ((m, k), (n, k), (m, n)))

    def run() -> object:
        return F.linear(x, w), dy @ w, dy.t() @ x

    return run


def _make_layer_step(
    hidden: int, heads: int, sequence: int, size: int, tensor_options: Any, group: Any = None
) -> Callable[[], object]:
    """Return a function that runs a layer of the trainer's GPT forward and backward.

    With a `group`, the layer is this rank's tensor-parallel shard. The gradients of the weights are
    allocated only once, as in training.
    """
    config = GPTConfig(vocab=2, layers=1, hidden=hidden, heads=heads, context=sequence)
    block = gpt.Layer(config, 0, LayerParameters.from_config(config, 0, group, tensor_options))
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(size, sequence, hidden, **tensor_options).requires_grad_()
    dy = torch.randn(size, sequence, hidden, **tensor_options)

    def run() -> object:
        y: Tensor = block(x)
        y.backward(dy)
        x.grad = None
        return None

    return run


def _measure_all_reduces(
    extent: BenchmarkExtent, watch: _Stopwatch, tensor_options: Any, slowdown: float
) -> Iterator[tuple[int, int, list[float]]]:
    """Measure all-reduces over pairs of processes, and over all processes.

    All groups of a size run at the same time. The all-reduces run first without compute, and then
    inside tensor-parallel layers. In a layer, the time of all its all-reduces is the wall time
    minus `slowdown` times the processor time of the thread.

    Yields:
        The number of processes in the group, the bytes, and the seconds in each round. The list of
        seconds is empty if this process was in no group.
    """
    world = dist.get_world_size()
    backend = "gloo" if watch.device == "cpu" else "nccl"
    for size in sorted({2, world}):
        group_ranks = [range(k, k + size) for k in range(0, world - size + 1, size)]
        groups = [dist.new_group([*ranks], backend=backend) for ranks in group_ranks]
        group_number = dist.get_rank() // size
        # If `size` does not divide the processes, the last processes are in no group.
        group = groups[group_number] if group_number < len(groups) else None
        for number in extent.all_reduce_bytes:
            x = torch.zeros(number // 4, device=watch.device)
            round_times = watch.time_rounds(partial(_all_reduce, x, group), wall=True)
            yield size, number, [] if group is None else round_times
        for hidden, heads, sequence, b in extent.sharded_layers:
            if heads % size or 4 * hidden % size:
                continue
            block = (
                _do_nothing
                if group is None
                else _make_layer_step(hidden, heads, sequence, b, tensor_options, group)
            )
            times = [
                (wall - slowdown * worked) / ALL_REDUCES_PER_LAYER
                for wall, worked in watch.time_wall_and_processor(block)
            ]
            seconds = [] if group is None else [max(value, _MIN_SECONDS) for value in times]
            yield size, 4 * b * sequence * hidden, seconds
        for group in groups:
            dist.destroy_process_group(group)


def _all_reduce(x: Tensor, group: Any) -> None:
    if group is not None:
        dist.all_reduce(x, group=group)


def _do_nothing() -> None:
    """Do nothing. A process that is in no group runs this function instead of a layer."""


def _get_memory_bytes(device: str) -> float:
    """Return the bytes of memory of this process: its GPU, or its share of the machine."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # The cgroup has no limit.
        machine_bytes = min(machine_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine_bytes / dist.get_world_size()


# ---------------------------------------------------------------- all processes


def _combine_samples(
    samples: list[MeasuredSamples],
    processes: int,
    processor_count: int | None,
    device: str,
    extent: BenchmarkExtent,
) -> BenchmarkResult:
    slower = _compute_slowdown(processes, processor_count)

    def middle(name: str, k: int) -> float:
        result: float = median(x for sample in samples for x in getattr(sample, name)[k])
        return slower * result

    def blocks(name: str) -> list[MeasuredLayer]:
        result = []
        for k, (hidden, heads, sequence, size) in enumerate(getattr(extent, name)):
            model = TransformerSpec(
                layers=1, hidden=hidden, heads=heads, vocab=2, sequence=sequence
            )
            result.append(
                MeasuredLayer(
                    model, ParallelPlan(microbatch_size=size, attention="flash"), middle(name, k)
                )
            )
        return result

    sums = [
        MeasuredAllReduce(
            group, size, median(x for sample in samples for x in sample.all_reduces[k][2])
        )
        for k, (group, size, _) in enumerate(samples[0].all_reduces)
    ]
    measured = MachineMeasurements(
        processes=processes,
        itemsize=4 if device == "cpu" else 2,
        memory=min(sample.memory_bytes for sample in samples),
        gemms=[MeasuredGemm(*shape, middle("gemms", k))
                  for k, shape in enumerate(extent.gemms)],
        copy_bandwidth=2 * extent.copy_bytes
        / (slower * median(x for sample in samples for x in sample.copy_seconds)),
        tiny_layers=blocks("smallest_layers"),
        layers=blocks("layers"),
        all_reduces=sums,
        processors=processor_count,
    )  # fmt: skip
    cluster = fit_cluster(measured)
    return BenchmarkResult(
        cluster,
        _describe_sources(measured, device),
        _format_errors(cluster, measured),
        tuple(_find_warnings(samples, processes, processor_count)),
    )


def _describe_sources(measured: MachineMeasurements, device: str) -> dict[str, str]:
    """Return, for each field of the fitted cluster, how it was measured."""
    rates = sorted(gemm.flops_per_second for gemm in measured.gemms)
    return {
        "flops": f"the median of {len(rates)} products, from {rates[0] / 1e9:.4g} to "
        f"{rates[-1] / 1e9:.4g} GFLOP/s; per process, while all processes compute",
        "memory": "a process's share of the machine" if measured.processors else "of the device",
        "hbm_bandwidth": f"fitted to {len(measured.layers)} layers; a copy reaches "
        f"{format_bytes(measured.copy_bandwidth)}/s",
        "nvlink_bandwidth": f"{len(measured.all_reduces)} all-reduces"
        if measured.all_reduces
        else "not measured: there is one process",
        "network_bandwidth": "not measured: there is one machine",
        "latency": "not measured: there is one machine",
        "kernel_us": "from layers so small that only kernel launches take time",
        "itemsize": "float32" if device == "cpu" else "bfloat16",
    }


def _format_errors(cluster: Cluster, measured: MachineMeasurements) -> tuple[str, ...]:
    """Return a table of the measured and the predicted times, a line each."""
    table = [f"{'measured':>10}  {'predicted':>10}  {'error':>6}"]
    for row in compare_measurements(cluster, measured):
        table.append(
            f"{_format_milliseconds(row.measured)}  {_format_milliseconds(row.predicted)}  "
            f"{row.relative_error:>+6.0%}  {row.subject}"
        )
    return tuple(table)


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:7.3f} ms"


def _find_warnings(
    samples: list[MeasuredSamples], processes: int, processor_count: int | None
) -> Iterator[str]:
    if processor_count is not None:
        processor_share = sum(sample.processor_share for sample in samples)
        could = min(processes, processor_count)
        if processor_share < (1 - BUSY_THRESHOLD) * could:
            yield (
                f"the machine is busy: other programs used {1 - processor_share / could:.0%} of "
                f"{could} processors; measured all-reduces are too slow by about as much"
            )
    spreads = [
        max(rounds) / min(rounds) - 1
        for sample in samples for rounds in (*sample.gemms, *sample.layers)
    ]  # fmt: skip
    if (spread := median(spreads)) > BUSY_THRESHOLD:
        yield f"repeated measurements differ by {spread:.0%} (median)"
