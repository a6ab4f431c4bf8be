"""Tests of the GPU benchmark, run on a CPU or on virtual streams."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu as benchmark
from benchmarks import gpu_metrics
from benchmarks.gpu import (
    build_sleeping_ranks,
    compute_rank_metrics,
    count_layer_flop,
    measure_gpt_ranks,
    predict_peak_memory,
    record_timelines,
)
from benchmarks.gpu_metrics import Metric
from schedir import Costs, PipelineShape, compile, simulate
from schedir.ir.cost.sizes import Sizes
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.program_runner import ProgramRunner
from schedir.schedules import one_f_one_b
from schedir.testing import tiny_model
from tests.cases import ALL
from tests.cpu.virtual_gpu import Stream, charge_messages, install_virtual_gpu
from tests.gpu.stand_in import installed


def test_nan_misses_its_goal() -> None:
    def missed(target: gpu_metrics.Goal, *values: float) -> list[bool]:
        return [Metric("", v, "us", target).is_missed for v in values]

    assert missed(gpu_metrics.GAP, 9.0, 10.0, 10.1, math.nan) == [False, False, True, True]
    assert missed(gpu_metrics.STAGE, 89.9, 90.0, 91.0, math.nan) == [True, False, False, True]
    assert not Metric("", math.nan, "us").is_missed


def test_metrics_file_round_trip(tmp_path: Path) -> None:
    """A truncated file has all metrics except the one that was being written."""
    file = tmp_path / "metrics"
    expected = [Metric("a", 1.5, "us", gpu_metrics.GAP), Metric("b", math.inf, "")]
    assert gpu_metrics.read_metrics(file) == []
    for metric in expected:
        gpu_metrics.append_metric(file, metric)
    gpu_metrics.append_metric(None, expected[0])
    file.write_text(file.read_text() + '["c", 3')
    assert gpu_metrics.read_metrics(file) == expected


def test_rates_time_stated_number_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed products have as many operations as the benchmark states for the stage."""
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    counted = []

    def time_product(product: Callable[[], object]) -> float:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            product()
        counted.append(counter.get_total_flops())
        return 2.0

    monkeypatch.setattr(benchmark, "measure_seconds", time_product)
    rates = benchmark.measure_kernel_rate(256, 16, 3), benchmark.measure_stage_rate(256, 16, 3)
    flop = 3 * 3 * count_layer_flop(256, 16)
    assert rates == (flop / 2, flop / 2)
    assert counted == [flop, flop]


def test_failing_part_does_not_stop_other_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_part(options: argparse.Namespace) -> Iterator[Metric]:
        yield Metric("first", 1.0, "us")
        raise OSError("no driver")

    def complete_part(options: argparse.Namespace) -> Iterator[Metric]:
        yield Metric("second", options.value, "us", gpu_metrics.GAP)

    monkeypatch.setattr(benchmark, "PARTS", {"x": failing_part, "y": complete_part})
    file = tmp_path / "metrics"
    namespace = argparse.Namespace(only=None, metrics=file, value=1.0)
    assert not benchmark.print_metrics(namespace)
    out, err = capsys.readouterr()
    assert "not measured, or not all of it: x: OSError" in out and "no driver" in err
    assert [metric.name for metric in gpu_metrics.read_metrics(file)] == ["first", "second"]
    assert benchmark.print_metrics(argparse.Namespace(only=["y"], metrics=None, value=1.0))
    assert not benchmark.print_metrics(argparse.Namespace(only=["y"], metrics=None, value=11.0))


def test_every_part_runs_on_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU in place of the GPU gives all metrics, but their values have no meaning.

    The part `queues` is left out: streams of a CPU have no hardware queues. The parts that
    other tests of this file run are left out unless ALL_CASES=1 is set.
    """
    left_out = ["queues", *([] if ALL else ["stage", "sleep", "gpt"])]
    measure_overhead = partial(benchmark.measure_instruction_overhead, 4)
    monkeypatch.setattr(benchmark, "measure_instruction_overhead", measure_overhead)
    file = tmp_path / "metrics"
    options = argparse.Namespace(
        only=[name for name in benchmark.PARTS if name not in left_out], metrics=file, hidden=128,
        context=16, layers=1, product=16, microbatches=4, forward=1e-3, steps=2,
    )  # fmt: skip
    with installed(monkeypatch):
        benchmark.print_metrics(options)
    out, err = capsys.readouterr()
    assert "not measured" not in out and err == ""
    measured = gpu_metrics.read_metrics(file)
    if ALL:
        assert {metric.goal for metric in measured} == {None, *gpu_metrics.GOALS}
    assert len(measured) == (21 if ALL else 2)


def test_streams_that_share_queue_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(monkeypatch) as gpu:

        def advance_host_clock(seconds: float) -> None:
            gpu.host += seconds

        monkeypatch.setattr(time, "sleep", advance_host_clock)
        first, second, third = (Stream(gpu) for _ in range(3))
        assert benchmark.find_shared_queues([first, second, third]) == []
        assert benchmark.find_shared_queues([first, second, first]) == [(0, 2), (2, 0)]


def test_host_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> str:
            return "over"

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(benchmark, "SYNC_OWNERS", (torch.cuda, Event))
    with benchmark.record_host_waits() as waits:
        assert waits == [] and modes == ["warn"]
        torch.cuda.synchronize()
        assert Event().synchronize() == "over"
        warnings.warn(benchmark.SYNC_WARNING, stacklevel=1)
        warnings.warn(benchmark.SYNC_WARNING, stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(waits) == 4 and waits[1].endswith("Event.synchronize is called")
    Event().synchronize()
    assert len(waits) == 4


def test_sleeping_ranks_take_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything except the host runs on virtual streams with a virtual clock."""
    gpu = install_virtual_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.work(cycles * 1e-6))
    boundary = Boundary((1, 2, 4))
    inputs = torch.randn(16, *boundary.shape)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    ranks = build_sleeping_ranks(16, boundary, 1000)  # a millisecond

    def step() -> None:
        gpu.host = gpu.over
        with charge_messages(gpu, Costs(send=20e-6)):
            ranks.step(inputs, inputs)

    runs = record_timelines(ranks, step, 3)
    by_name = {metric.name.strip(): metric for metric in compute_rank_metrics("", runs)}
    assert not any(metric.is_missed for metric in by_name.values())
    assert by_name[": gap, median"].value == pytest.approx(0, abs=1e-3)
    costs = Costs(F=1, B=2, send=0.02)
    predicted = simulate(ranks.program, costs, progress_model="per_edge")
    assert by_name["step"].value == pytest.approx(predicted.span)
    assert by_name["step, predicted, off by"].value == pytest.approx(0, abs=1e-6)
    assert 0 < by_name["exposed transfers"].value < 2


def test_gpt_part_returns_all_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work of a GPU runs on virtual streams. The metrics have no meaning here."""
    gpu = install_virtual_gpu(monkeypatch)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    for name, value in (("memory_allocated", 100), ("max_memory_allocated", 2**20)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *value: None)
    config = gpt.GPTConfig(256, 4, 32, 2, 8, tied=False)
    run_instruction = ProgramRunner.run_instruction

    def run_slowly(runner: ProgramRunner, k: int) -> None:
        gpu.work(1e-3)
        run_instruction(runner, k)

    monkeypatch.setattr(ProgramRunner, "run_instruction", run_slowly)
    values = {metric.name.strip(): metric.value for metric in measure_gpt_ranks(config, 4, 2)}
    assert list(values)[-4:] == [
        "host waits in a step", "device asked for memory, in all steps",
        "peak memory", "peak memory, predicted, off by",
    ]  # fmt: skip
    assert values["host waits in a step"] == 0
    assert values["peak memory"] == pytest.approx((2**20 - 100) / 2**30)
    assert values["step"] > 1 and values["peak memory, predicted, off by"] > 0


def test_peak_of_all_ranks_follows_order_of_issue() -> None:
    sizes = Sizes(activation=1.0, saved=10.0, model_states=100.0)
    for ranks in (1, 3):
        shape, options = PipelineShape(ranks, 6), dict[str, Any](buffer_sharing="minimal")
        program = compile(one_f_one_b, shape, progress_model="per_edge", **options)
        stages, boundary = (
            tiny_model.make_tiny_stages(ranks),
            Boundary((2, tiny_model.WIDTH), torch.float64),
        )
        world = InProcessExecutor(program, stages, loss=tiny_model.squared_error, boundary=boundary)
        rank_peaks = simulate(program, sizes=sizes).peak_memory
        world_peak = predict_peak_memory(world, sizes)
        assert rank_peaks.max() <= world_peak <= rank_peaks.sum()
        # The ranks reach their maximum of 3, 2 and 1 microbatches at the same time.
        assert world_peak == rank_peaks.sum()
