"""A Cluster from measurements: of a machine that is as it says, the same; of others, said how."""

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
    fitted,
    rows,
)

HERE = Cluster(
    1, 4, flops=50e9, memory=6e9, hbm=6e9, nvlink=0.8e9, network=0.8e9, latency=200e-6,
    kernel_us=25, itemsize=4, processors=2,
)  # fmt: skip
NODE = replace(
    HERE, flops=600e12, hbm=2e12, nvlink=400e9, network=400e9, latency=1e-5, itemsize=2,
    processors=None,
)  # fmt: skip


def block(cluster: Cluster, hidden: int, sequence: int, b: int) -> MeasuredLayer:
    """A layer that takes as long as the cluster says."""
    model = TransformerSpec(layers=1, hidden=hidden, heads=1, vocab=2, sequence=sequence)
    choice = ParallelPlan(microbatch_size=b, attention="flash")
    told = planner.layer_time(model, cluster, choice).total
    return MeasuredLayer(model, choice, told.F + told.B)


def seen(cluster: Cluster, copied: float = 10.0) -> MachineMeasurements:
    """What one measures on a machine that is just as a Cluster says."""
    products = [(m, h, h) for m in (128, 512) for h in (256, 512)]
    large = [(256, 128, 1), (512, 64, 2), (512, 128, 4)]
    if cluster.processors is None:
        large = [(4096, 2048, b) for b in (1, 2, 4)]
    return MachineMeasurements(
        processes=cluster.gpus_per_node,
        itemsize=cluster.itemsize,
        memory=cluster.memory,
        products=[MeasuredGemm(m, k, n, 6.0 * m * k * n / cluster.flops) for m, k, n in products],
        copied=copied * cluster.hbm,
        smallest=[block(cluster, 16, 8, 1)],
        layers=[block(cluster, *one) for one in large],
        sums=[
            MeasuredAllReduce(g, x, cluster.all_reduce(x, g))
            for g in (2, 4)
            for x in (4e3, 1e6, 2e7)
        ],
        processors=cluster.processors,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [HERE, NODE], ids=["processors", "GPUs"])
def test_what_is_as_it_says_comes_back(cluster: Cluster) -> None:
    """But for what the smallest layers take beside their issue, which on a GPU is hidden."""
    found = fitted(seen(cluster))
    for name in ("flops", "memory", "hbm", "nvlink", "latency", "kernel_us"):
        assert getattr(found, name) == pytest.approx(getattr(cluster, name), rel=0.05), name
    assert (found.gpus, found.itemsize, found.processors) == (
        4,
        cluster.itemsize,
        cluster.processors,
    )
    assert max(abs(row.error) for row in rows(found, seen(cluster))) < 0.05


@given(st.data())
def test_noise_stays_as_small_as_it_is(data: st.DataObject) -> None:
    """Each measurement off by at most a tenth: so is what is told, by little more."""
    wrong = st.floats(0.9, 1.1)
    true = seen(HERE)

    def noisy(some: Any) -> Any:
        return [one._replace(seconds=one.seconds * data.draw(wrong)) for one in some]

    measured = true._replace(
        products=noisy(true.products), smallest=noisy(true.smallest), layers=noisy(true.layers),
        sums=noisy(true.sums),
    )  # fmt: skip
    found = fitted(measured)
    assert max(abs(row.error) for row in rows(found, true)) < 0.25


def test_layers_faster_than_their_products_have_the_memory_of_a_copy() -> None:
    true = seen(HERE)
    quick = true._replace(layers=[one._replace(seconds=one.seconds / 2) for one in true.layers])
    assert fitted(quick).hbm == true.copied


def test_one_process_has_no_sums() -> None:
    alone = seen(HERE)._replace(processes=1, sums=[])
    found = fitted(alone)
    assert found.latency == 0
    assert found.nvlink == alone.copied


def test_no_latency_is_less_than_none() -> None:
    falling = [
        MeasuredAllReduce(2, 1e6, 1e-3),
        MeasuredAllReduce(2, 2e6, 2.2e-3),
        MeasuredAllReduce(2, 4e6, 4.6e-3),
    ]
    found = fitted(seen(HERE)._replace(sums=falling))
    assert found.latency == 0
    assert 0.8e9 < found.nvlink < 1e9


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was measured"):
        fitted(seen(HERE)._replace(layers=[]))
