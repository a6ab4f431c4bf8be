"""Tests of the quick measurement of this machine, whose result the planner can use."""

from __future__ import annotations

import multiprocessing
from contextlib import redirect_stderr
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schedir import Cluster, load_cluster, planner, save_cluster
from schedir.__main__ import main
from schedir.errors import UsageError
from schedir.training.hardware_benchmark import EXTENTS, BenchmarkResult, count_processors, measure
from tests.cpu.gloo_processes import CONTEXT


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchmarkResult, list[str]]:
    """Return the result of three processes, which are forks, and their lines on standard error."""
    path = tmp_path_factory.mktemp("progress") / "err"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file, redirect_stderr(file):
        patch.setattr(multiprocessing, "get_context", lambda _: CONTEXT)
        result = measure(3, quick=True, progress=True)
    return result, path.read_text().splitlines()


def test_three_processes_measure_usable_cluster(
    tmp_path: Path, run_of_three: tuple[BenchmarkResult, list[str]]
) -> None:
    measurement, _ = run_of_three
    cluster = measurement.cluster
    assert (cluster.nodes, cluster.gpus_per_node, cluster.itemsize) == (1, 3, 4)
    assert cluster.processors == count_processors()
    assert 1e8 < cluster.flops < 1e13
    assert cluster.kernel_us > 0
    assert {*measurement.notes} <= {f.name for f in fields(Cluster)}
    save_cluster(cluster, tmp_path / "here.toml", notes=measurement.notes)
    assert load_cluster(tmp_path / "here.toml") == cluster
    model = planner.TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=64)
    assert 0 < planner.layer_time(model, cluster, planner.ParallelPlan(tp=2)).total.F < 1


def test_three_processes_measure_pairs_and_all(
    run_of_three: tuple[BenchmarkResult, list[str]],
) -> None:
    """The table has a header, and lines for products, layers, sums and the head."""
    table = run_of_three[0].table
    assert sum("over 2" in line for line in table) == 2
    # Three processes cannot divide four heads.
    assert sum("over 3" in line for line in table) == 1
    assert len(table) == 1 + 2 + 1 + 1 + 3


def test_progress_names_each_kind_of_measurement(
    run_of_three: tuple[BenchmarkResult, list[str]],
) -> None:
    progress = run_of_three[1]
    assert progress[0].startswith(f"3 processes on {count_processors()} processor")


def test_measure_command_writes_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process is a new one. It prints the progress on the same standard error."""
    monkeypatch.setattr("schedir.training.hardware_benchmark.measure", partial(measure, quick=True))
    path = tmp_path / "here.toml"
    assert main(["plan", "--measure", "--processes=1", f"-o={path}"]) == 0
    captured = capfd.readouterr()
    assert captured.out.splitlines()[-1] == f"wrote {path}"
    assert captured.err.splitlines()[-1] == "measuring all-reduces"
    assert load_cluster(path).gpu_count == 1
    assert path.read_text().startswith("# Measured by schedir plan --measure with 1 process")


@pytest.mark.parametrize("device", EXTENTS)
def test_each_device_has_ten_matrix_products(device: str) -> None:
    assert len(EXTENTS[device].gemms) == 10


@pytest.mark.parametrize("processes", [0, -1, True, 1.5])
def test_invalid_number_of_processes_is_refused(processes: Any) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        measure(processes)


def test_unknown_device_is_refused() -> None:
    device: Any = "tpu"
    with pytest.raises(UsageError, match="not known"):
        measure(1, device)
