"""Tests that `save_cluster` writes complete files, which `load_cluster` reads back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Cluster, load_cluster, planner, save_cluster
from schedir.errors import ConfigError, UsageError
from schedir.ir.cost.number_parsing import MAX_GPUS, MIN_RATE
from schedir.ir.cost.units import get_physical_bounds
from schedir.planner.calibration import CONSTANTS

COUNTS = st.integers(1, 10**6)
COUNT_FIELDS = (
    "nodes", "gpus_per_node", "num_sms", "itemsize", "processors", "calibrated_gpus",
)  # fmt: skip
DELAY_FIELDS = (
    "latency", "network_latency", "kernel_us", "data_loading_us", "jitter", "uncertainty",
)  # fmt: skip


def choose_strategy(name: str) -> st.SearchStrategy[float]:
    """Return a strategy for the values of a field that the file of a cluster may have."""
    high = get_physical_bounds(name)[1]
    if name in COUNT_FIELDS:
        return COUNTS
    if name in DELAY_FIELDS:
        return st.just(0.0) | st.floats(MIN_RATE, min(high, 1.0))
    return st.floats(1e3 if name in ("memory", "host_memory") else 1e-3, high)


_OPTIONAL_FIELDS = (
    "host_bandwidth", "host_memory", "disk_bandwidth", "peak", "fp8_peak", "fp4_peak", "num_sms",
    "processors", "network_latency", "calibrated_gpus",
)  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw any Cluster, with some of its optional fields."""
    values = {
        f.name: draw(choose_strategy(f.name))
        for f in fields(Cluster)
        if f.name not in _OPTIONAL_FIELDS or draw(st.booleans())
    }
    values["peak"] = max(values.get("peak", 0), values["flops"])
    for name in {"fp8_peak", "fp4_peak"} & values.keys():
        values[name] = max(values[name], values["peak"])
    values["gpus_per_node"] = min(values["gpus_per_node"], MAX_GPUS // int(values["nodes"]))
    return Cluster(**values)  # type: ignore[arg-type]


@given(clusters())
def test_saved_cluster_is_read_back(cluster: Cluster) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        save_cluster(
            cluster, path, comment="One\n\ntwo", notes={"hbm_bandwidth": "measured\nhere # so"}
        )
        assert load_cluster(path) == cluster
        assert [p.name for p in Path(folder).iterdir()] == ["cluster.toml"]
        assert path.read_text().startswith("# One\n#\n# two\nnodes = ")


def test_preset_is_saved_with_short_numbers(tmp_path: Path) -> None:
    save_cluster(planner.cluster_preset("a100"), tmp_path / "a100.toml", notes={"flops": "of 312"})
    assert 'flops = "252TFLOP/s"  # of 312\n' in (tmp_path / "a100.toml").read_text()


def test_refused_save_keeps_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("nodes = 1\n")
    with pytest.raises(UsageError, match="no field 'hmb'"):
        save_cluster(planner.cluster_preset("a100"), path, notes={"hmb": "?"})
    assert path.read_text() == "nodes = 1\n"
    with pytest.raises(UsageError, match="cannot write"):
        save_cluster(planner.cluster_preset("a100"), tmp_path / "none" / "cluster.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        save_cluster(planner.cluster_preset("a100"), tmp_path)
    a_dict: Any = {"nodes": 1}
    with pytest.raises(UsageError, match="load_cluster"):
        save_cluster(a_dict, path)


def test_preset_name_as_file_hints_at_cluster_preset() -> None:
    with pytest.raises(UsageError, match="cannot read a100") as caught:
        load_cluster("a100")
    assert caught.value.hint == "schedir.planner.cluster_preset('a100') returns a cluster by name"


def make_cluster(**overrides: Any) -> Cluster:
    """Return a Cluster of four processes with simple rates."""
    defaults: dict[str, Any] = {
        "flops": 1e10, "memory": 1e9, "hbm_bandwidth": 1e9, "nvlink_bandwidth": 1e9,
        "network_bandwidth": 1e9, "kernel_us": 10,
        "itemsize": 4,
    }  # fmt: skip
    return Cluster(1, 4, **(defaults | overrides))


def test_jitter_in_percent_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cluster: jitter must be from .* to 1, not 5") as caught:
        make_cluster(jitter=5)
    assert caught.value.hint == "a number such as 0.02"


@pytest.mark.parametrize(
    ("setting", "fact", "unit"),
    [
        ("memory = 80", "is a number of bytes", "GB"),
        ("host_memory = 256", "is a number of bytes", "GB"),
        ("flops = 312", "is a number of operations per second", "TFLOP/s"),
        ("hbm_bandwidth = 2039", "is a number of bytes per second", "GB/s"),
        ("network_bandwidth = 25.5", "is a number of bytes per second", "GB/s"),
        ("latency = 5", "is a number of seconds", "us"),
    ],
)
def test_number_with_forgotten_unit_is_refused(
    tmp_path: Path, setting: str, fact: str, unit: str
) -> None:
    (tmp_path / "small.toml").write_text(f"nodes = 1\n{setting}\n")
    with pytest.raises(UsageError, match=f"{setting} {fact}") as caught:
        load_cluster(tmp_path / "small.toml")
    name, number = setting.split(" = ")
    assert caught.value.hint == f'{name} = "{number}{unit}"'


@pytest.mark.parametrize("rate", ["400Gb/s", "400 Gbps", "400Gbit/s", "400 Gbits/s"])
def test_bits_per_second_are_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="must be a number such as 300GB/s") as caught:
        make_cluster(network_bandwidth=rate)
    assert caught.value.hint == '8 bits are a byte: network_bandwidth = "50GB/s"'


def test_small_rates_are_written_in_quotes(tmp_path: Path) -> None:
    cluster = make_cluster(flops=10, memory=80, nvlink_bandwidth=2)
    save_cluster(cluster, tmp_path / "slow.toml")
    assert load_cluster(tmp_path / "slow.toml") == cluster


@pytest.mark.parametrize(("name", "value"), [
    ("kernel_us", 1e9), ("flops", 1e19), ("jitter", 0.5), ("network_latency", 0.6),
    ("network_bandwidth", 3e12), ("memory", 1e16), ("data_loading_us", 1e10),
])  # fmt: skip
def test_number_that_no_machine_has_is_refused(name: str, value: float, tmp_path: Path) -> None:
    cluster = make_cluster(**{name: value})  # In Python, such a number is an idealized machine.
    path = tmp_path / "cluster.toml"
    save_cluster(cluster, path)
    with pytest.raises(ConfigError, match=f"{name} must be at most") as caught:
        load_cluster(path)
    assert caught.value.fields == (name,) and caught.value.line > 0
    save_cluster(make_cluster(**{name: get_physical_bounds(name)[1]}), path)
    if name != "network_latency":  # Half a second without a unit is probably 0.5us.
        assert getattr(load_cluster(path), name) == get_physical_bounds(name)[1]


def test_presets_are_within_physical_bounds() -> None:
    for preset in planner.cluster_presets():
        cluster = planner.cluster_preset(preset)
        for name in CONSTANTS:
            low, high = get_physical_bounds(name)
            assert not getattr(cluster, name) or low <= getattr(cluster, name) <= high


def test_numbers_without_unit_that_are_plausible_are_read(tmp_path: Path) -> None:
    save_cluster(make_cluster(latency=1e-6), tmp_path / "plain.toml")
    text = (
        "nodes = 1\ngpus_per_node = 4\nflops = 1e10\nmemory = 1e9\nhbm_bandwidth = 1e9\n"
        "nvlink_bandwidth = 1e9\nnetwork_bandwidth = 1e9\nkernel_us = 10\nitemsize = 4\n"
        "latency = 1e-6\n"
    )
    (tmp_path / "numbers.toml").write_text(text)
    assert load_cluster(tmp_path / "numbers.toml") == load_cluster(tmp_path / "plain.toml")


def test_compute_memory_and_issue_times_add_up_on_cpus() -> None:
    """On CPUs, compute, memory and issue times add up, and no collective overlaps with compute."""
    model = planner.TransformerSpec(layers=1, hidden=64, heads=4, vocab=128, sequence=32)
    plan = planner.ParallelPlan(tp=2, microbatch_size=1, attention="flash")
    gpus, cpus = (planner.layer_time(model, make_cluster(processors=n), plan) for n in (None, 2))
    faster: list[dict[str, float]] = [{"flops": 1e30}, {"hbm_bandwidth": 1e30}, {"kernel_us": 0}]
    faster_layers = [
        planner.layer_time(model, make_cluster(processors=2, **changes), plan) for changes in faster
    ]
    shares = [cpus.compute.F - layer.compute.F for layer in faster_layers]
    assert pytest.approx(sum(shares)) == cpus.compute.F
    assert min(shares) > 0
    assert cpus.layer_collectives.I > gpus.layer_collectives.I


def test_solo_speedup_of_shared_processors() -> None:
    assert [make_cluster(processors=n).solo_speedup for n in (None, 1, 2, 4, 8)] == [1, 4, 2, 1, 1]


def test_four_byte_items_take_twice_as_long_as_two_byte_items() -> None:
    model = planner.TransformerSpec(layers=1, hidden=64, heads=4, vocab=128, sequence=32)
    plan = planner.ParallelPlan(tp=2, microbatch_size=1, attention="flash")
    two_byte, four_byte = (
        planner.layer_time(model, make_cluster(itemsize=n, kernel_us=0, flops=1e30), plan)
        for n in (2, 4)
    )
    for a, b in (
        (two_byte.layer_collectives.F, four_byte.layer_collectives.F),
        (two_byte.compute.F, four_byte.compute.F),
    ):
        assert pytest.approx(2 * a) == b
