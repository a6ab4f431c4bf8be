"""Tests of a Cluster that is fitted to measurements, and of the reported differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Cluster, planner
from schedir.errors import UsageError
from schedir.planner import ParallelPlan, TransformerSpec
from schedir.planner.hardware.cluster_fit import (
    MachineMeasurements,
    MeasuredAllReduce,
    MeasuredGemm,
    MeasuredLayer,
    compare_measurements,
    fit_cluster,
)

CPU_CLUSTER = Cluster(
    1, 4, flops=50e9, memory=6e9, hbm_bandwidth=6e9, nvlink_bandwidth=0.8e9,
    network_bandwidth=0.8e9, latency=200e-6,
    kernel_us=25, itemsize=4, processors=2,
)  # fmt: skip
GPU_NODE = replace(
    CPU_CLUSTER, flops=600e12, hbm_bandwidth=2e12, nvlink_bandwidth=400e9, network_bandwidth=400e9,
    latency=1e-5, itemsize=2,
    processors=None,
)  # fmt: skip


def measure_layer(cluster: Cluster, hidden: int, sequence: int, b: int) -> MeasuredLayer:
    """Return a measured layer with exactly the times of a cluster."""
    model = TransformerSpec(layers=1, hidden=hidden, heads=1, vocab=2, sequence=sequence)
    choice = ParallelPlan(microbatch_size=b, attention="flash")
    times = planner.layer_time(model, cluster, choice).total
    return MeasuredLayer(model, choice, times.F + times.B)


def measure_cluster(cluster: Cluster, copy_factor: float = 10.0) -> MachineMeasurements:
    """Return the measurements of a machine that is exactly like a Cluster."""
    products = [(m, h, h) for m in (128, 512) for h in (256, 512)]
    large_shapes = [(256, 128, 1), (512, 64, 2), (512, 128, 4)]
    if cluster.processors is None:
        large_shapes = [(4096, 2048, b) for b in (1, 2, 4)]
    return MachineMeasurements(
        processes=cluster.gpus_per_node,
        itemsize=cluster.itemsize,
        memory=cluster.memory,
        gemms=[MeasuredGemm(m, k, n, 6.0 * m * k * n / cluster.flops) for m, k, n in products],
        copy_bandwidth=copy_factor * cluster.hbm_bandwidth,
        tiny_layers=[measure_layer(cluster, 16, 8, 1)],
        layers=[measure_layer(cluster, *shape) for shape in large_shapes],
        all_reduces=[
            MeasuredAllReduce(g, x, cluster.all_reduce_time(x, g))
            for g in (2, 4)
            for x in (4e3, 1e6, 2e7)
        ],
        processors=cluster.processors,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [CPU_CLUSTER, GPU_NODE], ids=["processors", "GPUs"])
def test_fit_returns_measured_cluster(cluster: Cluster) -> None:
    """The fit returns the same Cluster, except the hidden time of the smallest layers."""
    fitted = fit_cluster(measure_cluster(cluster))
    for name in ("flops", "memory", "hbm_bandwidth", "nvlink_bandwidth", "latency", "kernel_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(cluster, name), rel=0.05), name
    assert (fitted.gpu_count, fitted.itemsize, fitted.processors) == (
        4,
        cluster.itemsize,
        cluster.processors,
    )
    assert (
        max(
            abs(row.relative_error)
            for row in compare_measurements(fitted, measure_cluster(cluster))
        )
        < 0.05
    )


@given(st.data())
def test_fit_error_stays_near_measurement_noise(data: st.DataObject) -> None:
    """If each measurement is wrong by a tenth at most, the fit is wrong by little more."""
    error_factors = st.floats(0.9, 1.1)
    exact_measurements = measure_cluster(CPU_CLUSTER)

    def add_noise(measurements: Any) -> Any:
        return [
            measurement._replace(seconds=measurement.seconds * data.draw(error_factors))
            for measurement in measurements
        ]

    measured = exact_measurements._replace(
        gemms=add_noise(exact_measurements.gemms),
        tiny_layers=add_noise(exact_measurements.tiny_layers),
        layers=add_noise(exact_measurements.layers),
        all_reduces=add_noise(exact_measurements.all_reduces),
    )
    fitted = fit_cluster(measured)
    assert (
        max(abs(row.relative_error) for row in compare_measurements(fitted, exact_measurements))
        < 0.25
    )


def test_fast_layers_use_copy_bandwidth() -> None:
    exact_measurements = measure_cluster(CPU_CLUSTER)
    quick = exact_measurements._replace(
        layers=[layer._replace(seconds=layer.seconds / 2) for layer in exact_measurements.layers]
    )
    assert fit_cluster(quick).hbm_bandwidth == exact_measurements.copy_bandwidth


def test_single_process_has_no_latency() -> None:
    alone = measure_cluster(CPU_CLUSTER)._replace(processes=1, all_reduces=[])
    fitted = fit_cluster(alone)
    assert fitted.latency == 0
    assert fitted.nvlink_bandwidth == alone.copy_bandwidth


def test_latency_is_not_negative() -> None:
    falling = [
        MeasuredAllReduce(2, 1e6, 1e-3),
        MeasuredAllReduce(2, 2e6, 2.2e-3),
        MeasuredAllReduce(2, 4e6, 4.6e-3),
    ]
    fitted = fit_cluster(measure_cluster(CPU_CLUSTER)._replace(all_reduces=falling))
    assert fitted.latency == 0
    assert 0.8e9 < fitted.nvlink_bandwidth < 1e9


def test_missing_measurements_are_refused() -> None:
    with pytest.raises(
        UsageError, match="gemms, tiny_layers and layers must each have at least one measurement"
    ):
        fit_cluster(measure_cluster(CPU_CLUSTER)._replace(layers=[]))
