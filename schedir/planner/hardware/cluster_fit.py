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

_INFINITE_RATE: Final = 1e30  # of a rate that takes no time


class MeasuredGemm(NamedTuple):
    """(m, k) x (k, n) and the two products of its backward, in so many seconds together."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations per second."""
        return 6.0 * self.m * self.k * self.n / self.seconds


class MeasuredLayer(NamedTuple):
    """A layer of `model`, forward and backward of one microbatch of `plan`, in seconds."""

    model: TransformerSpec
    plan: ParallelPlan
    seconds: float


class MeasuredAllReduce(NamedTuple):
    """An all-reduce of `size` bytes over a group of so many processes of a node, in seconds."""

    group: int
    size: float
    seconds: float


class MachineMeasurements(NamedTuple):
    """What was measured, each while all processes of the node did the same.

    `tiny_layers` are layers so small that only their issue takes time; `copy_bandwidth` the bytes
    per second of what reads and writes only; `memory` the bytes of one process, and `processors`
    those of the node, where what computes has no GPU.
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
    """Something that was measured beside what the Cluster says of it, in seconds."""

    subject: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """By how much the Cluster is off, of what was measured."""
        return self.predicted / self.measured - 1


def fit_cluster(measurements: MachineMeasurements) -> Cluster:
    """The Cluster of one node at whose rates the planner tells what was measured.

    `flops` is the median over products.  `kernel_us` is what the smallest layers take, by the
    kernels that the planner counts in them.  `hbm_bandwidth` is the rate at which the other layers
    come out as measured, in the mean: no more than what a copy reaches, and, as a bound, no less
    than a hundredth of that.  `latency` and `nvlink_bandwidth` are those of sums, by least squares
    of relative errors; where a process is alone nobody asks for them, and they are those of its own
    memory.

    Raises UsageError where there is nothing to go by.

    >>> from schedir import planner
    >>> from schedir.planner.hardware.cluster_fit import (
    ...     MachineMeasurements, MeasuredAllReduce, MeasuredGemm, MeasuredLayer, fit_cluster
    ... )
    >>> model = planner.TransformerSpec(layers=1, hidden=64, heads=4, vocab=64, sequence=32)
    >>> one = MeasuredLayer(model, planner.ParallelPlan(attention="flash"), 1e-3)
    >>> sums = [MeasuredAllReduce(2, 1e6, 1.02e-3), MeasuredAllReduce(2, 2e6, 2.02e-3)]
    >>> here = fit_cluster(MachineMeasurements(2, 4, 8e9, [MeasuredGemm(64, 64, 64, 1e-3)], 1e10,
    ...                                   [one], [one], sums, processors=2))
    >>> f"{here.flops:.4g} {here.nvlink_bandwidth:.3g} {here.latency:.2g}"
    '1.573e+09 1e+09 1e-05'
    """
    if not (measurements.gemms and measurements.tiny_layers and measurements.layers):
        raise UsageError("nothing was measured: products and layers are needed")
    latency, nvlink = (
        _fit_link(measurements.all_reduces)
        if measurements.all_reduces
        else (0.0, measurements.copy_bandwidth)
    )
    cluster = Cluster(
        nodes=1,
        gpus_per_node=measurements.processes,
        flops=_round_to_four_digits(median(one.flops_per_second for one in measurements.gemms)),
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
    """What was measured beside what a Cluster says of it."""
    for m, k, n, seconds in measurements.gemms:
        yield FitRow(f"products {m} x {k} x {n}", seconds, 6.0 * m * k * n / cluster.flops)
    for model, choice, seconds in (*measurements.tiny_layers, *measurements.layers):
        what = f"layer h {model.hidden}, s {model.sequence}, b {choice.microbatch_size}"
        yield FitRow(what, seconds, _predict_layer_time(cluster, model, choice))
    for group, size, seconds in measurements.all_reduces:
        what = f"all-reduce of {size / 1e3:g} kB over {group}"
        yield FitRow(what, seconds, cluster.all_reduce_time(size, group))


def _predict_layer_time(cluster: Cluster, model: TransformerSpec, plan: ParallelPlan) -> float:
    found = layer_time(model, cluster, plan).total
    return found.F + found.B


def _fit_kernel_us(cluster: Cluster, tiny_layers: Sequence[MeasuredLayer]) -> float:
    """Microseconds for each kernel of layers that take next to nothing else."""
    free = replace(
        cluster, flops=_INFINITE_RATE, peak=None, hbm_bandwidth=_INFINITE_RATE, kernel_us=1.0
    )
    rest = replace(cluster, kernel_us=0.0)
    if cluster.processors is None:  # a GPU works meanwhile
        rest = replace(free, kernel_us=0.0)
    return median(
        max(seconds - _predict_layer_time(rest, model, choice), 0.0)
        / _predict_layer_time(free, model, choice)
        for model, choice, seconds in tiny_layers
    )


def _fit_hbm_bandwidth(cluster: Cluster, measurements: MachineMeasurements) -> float:
    """The rate at which layers are told as long as they are, in the mean of relative errors."""

    def off(hbm: float) -> float:
        at = replace(cluster, hbm_bandwidth=hbm)
        return sum(
            _predict_layer_time(at, m, c) / seconds - 1 for m, c, seconds in measurements.layers
        )

    low, high = measurements.copy_bandwidth / 100, measurements.copy_bandwidth
    if off(high) >= 0:  # as long as they are, or longer, without any of it
        return high
    for _ in range(60):
        middle = sqrt(low * high)
        low, high = (middle, high) if off(middle) > 0 else (low, middle)
    return high


def _fit_link(all_reduces: Sequence[MeasuredAllReduce]) -> tuple[float, float]:
    """Latency and bytes per second of a ring's messages (`Cluster.all_reduce`), by least squares.

    2(g-1) latency + 2(g-1)/g size/bandwidth; where the latency would be negative there is none.
    """
    table = np.array([[2 * (g - 1), 2 * (g - 1) / g * size] for g, size, _ in all_reduces])
    table /= np.array([seconds for *_, seconds in all_reduces])[:, None]
    ones = np.ones(len(table))
    found: Any = np.linalg.lstsq(table, ones, rcond=None)[0]
    if found[0] < 0:
        found = np.array([0.0, table[:, 1].sum() / (table[:, 1] ** 2).sum()])
    if found[1] <= 0:
        largest = max(all_reduces, key=lambda one: one.size)
        return float(found[0]), largest.size / largest.seconds
    return float(found[0]), float(1 / found[1])


def _round_to_four_digits(value: float) -> float:
    """As many digits as a measurement has, and a person reads."""
    return float(f"{value:.4g}")
