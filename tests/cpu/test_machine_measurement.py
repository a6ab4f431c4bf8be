"""Tests that this machine can be measured quickly, and that the planner can use the result."""

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


def test_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = measure(2, quick=True, progress=True)
    cluster = found.cluster
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith(f"2 processes on {count_processors()} processor")
    assert said[-1] == "measuring all-reduces"
    assert (cluster.nodes, cluster.gpus_per_node, cluster.itemsize) == (1, 2, 4)
    assert cluster.processors == count_processors()
    assert 1e8 < cluster.flops < 1e13
    assert cluster.kernel_us > 0
    assert {*found.notes} <= {f.name for f in fields(Cluster)}
    # The table has a header, and lines for products, layers, sums and the head.
    assert len(found.table) == 1 + 2 + 1 + 1 + 2
    save_cluster(cluster, tmp_path / "here.toml", notes=found.notes)
    assert load_cluster(tmp_path / "here.toml") == cluster
    model = planner.TransformerSpec(layers=2, hidden=64, heads=4, vocab=256, sequence=64)
    assert 0 < planner.layer_time(model, cluster, planner.ParallelPlan(tp=2)).total.F < 1


def test_three_processes_have_pairs_and_all() -> None:
    found = measure(3, quick=True)
    assert sum("over 2" in line for line in found.table) == 2
    assert (
        sum("over 3" in line for line in found.table) == 1
    )  # three processes cannot divide four heads
    assert found.cluster.gpu_count == 3


def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("schedir.training.hardware_benchmark.measure", partial(measure, quick=True))
    path = tmp_path / "here.toml"
    assert main(["plan", "--measure", "--processes=2", f"-o={path}"]) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines()[-1] == f"wrote {path}"
    assert load_cluster(path).gpu_count == 2
    assert path.read_text().startswith("# Measured by schedir plan --measure with 2 processes")


@pytest.mark.parametrize("device", EXTENTS)
def test_ten_products_are_those_of_layers(device: str) -> None:
    assert len(EXTENTS[device].gemms) == 10


@pytest.mark.parametrize("processes", [0, -1, True, 1.5])
def test_what_is_no_number_of_processes(processes: Any) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        measure(processes)


def test_a_device_that_nobody_knows() -> None:
    device: Any = "tpu"
    with pytest.raises(UsageError, match="not known"):
        measure(1, device)
