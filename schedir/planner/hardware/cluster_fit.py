"""Fit a Cluster to measurements of a machine, and report the errors of the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.layer_time import layer_time
from schedir.planner.transformer.transformer_spec import TransformerSpec

_INFINITE_RATE: Final = 1e30  # Operations or bytes per second; so fast that the time is 0.


class MeasuredGemm(NamedTuple):
    """A measurement of a matrix product (m, k) x (k, n) with the two products of its backward.

    Attributes:
        m: The number of rows of the first factor.
        k: The inner dimension.
        n: The number of columns of the second factor.
        seconds: The total time of the three products.
    """

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """The floating-point operations per second of the three products."""
        return 6.0 * self.m * self.k * self.n / self.seconds


class MeasuredLayer(NamedTuple):
    """A measurement of the forward and the backward of one layer for one microbatch.

    Attributes:
        model: The model of the layer.
        plan: The plan with the size of the microbatch.
        seconds: The time of the forward and the backward.
    """

    model: TransformerSpec
    plan: ParallelPlan
    seconds: float


class MeasuredAllReduce(NamedTuple):
    """A measurement of an all-reduce within a node.

    Attributes:
        group: The number of processes.
        size: Bytes of the tensor.
        seconds: The time of the all-reduce.
    """

    group: int
    size: float
    seconds: float


class MachineMeasurements(NamedTuple):
    """Measurements of a node. All its processes ran the same operation at the same time.

    Attributes:
        processes: The number of processes, one per GPU if the node has GPUs.
        itemsize: Bytes of an element of a tensor.
        memory: Bytes of the memory of one process.
        gemms: Measured matrix products.
        copy_bandwidth: The sum of the bytes that a copy reads and writes per second.
        tiny_layers: Measurements of layers so small that issuing kernels takes most of the time.
        layers: Measurements of other layers.
        all_reduces: Measured all-reduces. Empty for a single process.
        processors: The number of processors that the processes of the node may use at the same
            time. None for a node with GPUs.
    """

    processes: int
    itemsize: int
    memory: float
    gemms: Sequence[MeasuredGemm]
    copy_bandwidth: float
    tiny_layers: Sequence[MeasuredLayer]
    layers: Sequence[MeasuredLayer]
    all_reduces: Sequence[MeasuredAllReduce] = ()
    processors: int | None = None


class FitRow(NamedTuple):
    """A measurement and its prediction by the fitted cluster, in seconds.

    Attributes:
        subject: A description of the operation.
        measured: The measured time.
        predicted: The predicted time.
    """

    subject: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """Relative error of the prediction: predicted / measured - 1."""
        return self.predicted / self.measured - 1


def fit_cluster(measurements: MachineMeasurements) -> Cluster:
    """Fit a cluster of one node to measurements.

    - `flops` is the median over matrix products.
    - `kernel_us` is the median over tiny layers of the time per kernel that the planner counts. On
      CPUs, the predicted time of compute is subtracted first.
    - `hbm_bandwidth` is the bandwidth at which the mean error of the other layers is 0. This
      bandwidth is at most `copy_bandwidth`, and at least `copy_bandwidth` / 100.
    - `latency` and `nvlink_bandwidth` are fitted to the all-reduces, by least squares of relative
      errors. Without all-reduces, `latency` is 0 and `nvlink_bandwidth` is `copy_bandwidth`.

    Args:
        measurements: The measurements.

    Raises:
        UsageError: There are no matrix products, no tiny layers or no other layers.

    Example:
        >>> from schedir import planner
        >>> from schedir.planner.hardware.cluster_fit import (
        ...     MachineMeasurements, MeasuredAllReduce, MeasuredGemm, MeasuredLayer, fit_cluster
        ... )
        >>> model = planner.TransformerSpec(layers=1, hidden=64, heads=4, vocab=64, sequence=32)
        >>> one = MeasuredLayer(model, planner.ParallelPlan(attention="flash"), 1e-3)
        >>> sums = [MeasuredAllReduce(2, 1e6, 1.02e-3), MeasuredAllReduce(2, 2e6, 2.02e-3)]
        >>> here = fit_cluster(MachineMeasurements(2, 4, 8e9, [MeasuredGemm(64, 64, 64, 1e-3)],
        ...     1e10,
        ...                                   [one], [one], sums, processors=2))
        >>> f"{here.flops:.4g} {here.nvlink_bandwidth:.3g} {here.latency:.2g}"
        '1.573e+09 1e+09 1e-05'
    """
    if not (measurements.gemms and measurements.tiny_layers and measurements.layers):
        raise UsageError("gemms, tiny_layers and layers must each have at least one measurement")
    latency, nvlink = (
        _fit_link(measurements.all_reduces)
        if measurements.all_reduces
        else (0.0, measurements.copy_bandwidth)
    )
    cluster = Cluster(
        nodes=1,
        gpus_per_node=measurements.processes,
        flops=_round_to_four_digits(median(gemm.flops_per_second for gemm in measurements.gemms)),
        memory=_round_to_four_digits(measurements.memory),
        hbm_bandwidth=_round_to_four_digits(measurements.copy_bandwidth),
        nvlink_bandwidth=_round_to_four_digits(nvlink),
        network_bandwidth=_round_to_four_digits(nvlink),
        latency=_round_to_four_digits(latency * 1e6) / 1e6,
        itemsize=measurements.itemsize,
        processors=measurements.processors,
    )
    cluster = replace(
        cluster, kernel_us=_round_to_four_digits(_fit_kernel_us(cluster, measurements.tiny_layers))
    )
    return replace(
        cluster, hbm_bandwidth=_round_to_four_digits(_fit_hbm_bandwidth(cluster, measurements))
    )


def compare_measurements(cluster: Cluster, measurements: MachineMeasurements) -> Iterator[FitRow]:
    """Yield each measurement with its prediction by a cluster.

    Args:
        cluster: The cluster.
        measurements: The measurements.
    """
    for m, k, n, seconds in measurements.gemms:
        yield FitRow(f"matrix products {m} x {k} x {n}", seconds, 6.0 * m * k * n / cluster.flops)
    for model, plan, seconds in (*measurements.tiny_layers, *measurements.layers):
        subject = f"layer h {model.hidden}, s {model.sequence}, b {plan.microbatch_size}"
        yield FitRow(subject, seconds, _predict_layer_time(cluster, model, plan))
    for group, size, seconds in measurements.all_reduces:
        subject = f"all-reduce of {size / 1e3:g} kB over {group}"
        yield FitRow(subject, seconds, cluster.all_reduce_time(size, group))


def _predict_layer_time(cluster: Cluster, model: TransformerSpec, plan: ParallelPlan) -> float:
    times = layer_time(model, cluster, plan).total
    return times.F + times.B


def _fit_kernel_us(cluster: Cluster, tiny_layers: Sequence[MeasuredLayer]) -> float:
    """Return the microseconds to issue a kernel, from layers with little other work."""
    kernels_only = replace(
        cluster, flops=_INFINITE_RATE, peak=None, hbm_bandwidth=_INFINITE_RATE, kernel_us=1.0
    )
    without_kernels = replace(cluster, kernel_us=0.0)
    if cluster.processors is None:  # Issuing kernels hides the compute of a tiny layer on a GPU.
        without_kernels = replace(kernels_only, kernel_us=0.0)
    return median(
        max(seconds - _predict_layer_time(without_kernels, model, plan), 0.0)
        / _predict_layer_time(kernels_only, model, plan)
        for model, plan, seconds in tiny_layers
    )


def _fit_hbm_bandwidth(cluster: Cluster, measurements: MachineMeasurements) -> float:
    """Return the bandwidth at which the mean relative error of the layers is 0."""

    def mean_error(hbm: float) -> float:
        candidate = replace(cluster, hbm_bandwidth=hbm)
        return sum(
            _predict_layer_time(candidate, m, c) / seconds - 1
            for m, c, seconds in measurements.layers
        )

    low, high = measurements.copy_bandwidth / 100, measurements.copy_bandwidth
    if mean_error(high) >= 0:  # Predictions are too long even at the highest bandwidth.
        return high
    for _ in range(60):
        middle = sqrt(low * high)
        low, high = (middle, high) if mean_error(middle) > 0 else (low, middle)
    return high


def _fit_link(all_reduces: Sequence[MeasuredAllReduce]) -> tuple[float, float]:
    """Return the latency and the bandwidth of a ring, fitted by least squares.

    An all-reduce over g processes takes 2(g-1) latency + 2(g-1)/g size/bandwidth
    (`Cluster.all_reduce_time`). A negative latency is replaced by 0.
    """
    table = np.array([[2 * (g - 1), 2 * (g - 1) / g * size] for g, size, _ in all_reduces])
    table /= np.array([seconds for *_, seconds in all_reduces])[:, None]
    ones = np.ones(len(table))
    solution: Any = np.linalg.lstsq(table, ones, rcond=None)[0]
    if solution[0] < 0:
        solution = np.array([0.0, table[:, 1].sum() / (table[:, 1] ** 2).sum()])
    if solution[1] <= 0:
        largest = max(all_reduces, key=lambda measured: measured.size)
        return float(solution[0]), largest.size / largest.seconds
    return float(solution[0]), float(1 / solution[1])


def _round_to_four_digits(value: float) -> float:
    """Round to four significant digits, because measurements are not more precise."""
    return float(f"{value:.4g}")
