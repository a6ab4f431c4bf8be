"""Tests of the quick measurement of this machine, whose result the planner can use."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schedir import Cluster, load_cluster, planner, save_cluster
from schedir.__main__ import main
from schedir.errors import UsageError
from schedir.training.hardware_benchmark import EXTENTS, count_processors, measure


def test_two_processes_measure_usable_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    measurement = measure(2, quick=True, progress=True)
    cluster = measurement.cluster
    progress = capfd.readouterr().err.splitlines()
    assert progress[0].startswith(f"2 processes on {count_processors()} processor")
    assert progress[-1] == "measuring all-reduces"
    assert (cluster.nodes, cluster.gpus_per_node, cluster.itemsize) == (1, 2, 4)
    assert cluster.processors == count_processors()
    assert 1e8 < cluster.flops < 1e13
    assert cluster.kernel_us > 0
    assert {*measurement.notes} <= {f.name for f in fields(Cluster)}
    # The table has a header, and lines for products, layers, sums and the head.
    assert len(measurement.table) == 1 + 2 + 1 + 1 + 2
    save_cluster(cluster, tmp_path / "here.toml", notes=measurement.notes)
    assert load_cluster(tmp_path / "here.toml") == cluster
    model = planner.TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=64)
    assert 0 < planner.layer_time(model, cluster, planner.ParallelPlan(tp=2)).total.F < 1


def test_three_processes_measure_pairs_and_all() -> None:
    measurement = measure(3, quick=True)
    assert sum("over 2" in line for line in measurement.table) == 2
    assert (
        sum("over 3" in line for line in measurement.table) == 1
    )  # three processes cannot divide four heads
    assert measurement.cluster.gpu_count == 3


def test_measure_command_writes_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("schedir.training.hardware_benchmark.measure", partial(measure, quick=True))
    path = tmp_path / "here.toml"
    assert main(["plan", "--measure", "--processes=2", f"-o={path}"]) == 0
    captured = capfd.readouterr()
    assert captured.out.splitlines()[-1] == f"wrote {path}"
    assert load_cluster(path).gpu_count == 2
    assert path.read_text().startswith("# Measured by schedir plan --measure with 2 processes")


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
