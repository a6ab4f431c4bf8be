"""Tests of plans for processes that share processors, where others work in a rank's bubble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedir import Cluster, planner
from schedir.planner import ParallelPlan

MODEL = planner.TransformerSpec(layers=8, hidden=256, heads=8, vocab=256, sequence=128)
CPU_CLUSTER = Cluster(
    1, 4, flops=50e9, memory=6e9, hbm_bandwidth=6e9, nvlink_bandwidth=1e9, network_bandwidth=1e9,
    latency=200e-6, kernel_us=25,
    itemsize=4, processors=2,
)  # fmt: skip
PLANS = [
    ParallelPlan(
        pp=p,
        tp=t,
        dp=d,
        microbatch_size=b,
        microbatches=16 // (d * b),
        stages_per_rank=v,
        schedule=schedule,
        attention="flash",
    )
    for p, t, d in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4))
    for b in (1, 2)
    for schedule, v in (("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1))
    if p > 1 or schedule == "one_f_one_b"
]


def estimate_step_time(
    choice: ParallelPlan, *, closed_form_only: bool, **changes: Any
) -> planner.PlanEstimate:
    return planner.estimate_step(
        MODEL, replace(CPU_CLUSTER, **changes), choice, closed_form_only=closed_form_only
    )


@pytest.mark.parametrize(
    "choice", PLANS, ids=lambda c: f"{c.pp}-{c.tp}-{c.dp} {c.microbatch_size} {c.schedule}"
)
def test_closed_form_is_near_program(choice: ParallelPlan) -> None:
    closed_form, exact = (estimate_step_time(choice, closed_form_only=e) for e in (True, False))
    assert closed_form.step_time == pytest.approx(exact.step_time, rel=0.12)
    for estimate in (closed_form, exact):
        assert estimate.memory.process == estimate.memory.allocator == 0


def test_shared_processors_hide_bubble() -> None:
    """While the pipeline of 2 ranks x 2 replicas fills, two processes compute."""
    two = ParallelPlan(pp=2, dp=2, microbatch_size=1, microbatches=8, attention="flash")
    assert estimate_step_time(two, closed_form_only=True).breakdown.bubble == 0
    assert estimate_step_time(two, closed_form_only=True, processors=4).breakdown.bubble > 0


@pytest.mark.parametrize("closed_form_only", [False, True])
def test_single_processor_step_is_at_least_total_work(closed_form_only: bool) -> None:
    """With a single processor, every pipeline takes the sum of its ranks' work."""
    alone = estimate_step_time(
        ParallelPlan(pp=1, dp=4, microbatch_size=1, microbatches=4, attention="flash"),
        closed_form_only=closed_form_only,
        processors=1,
    )
    piped = estimate_step_time(
        ParallelPlan(pp=4, microbatch_size=1, microbatches=16, attention="flash"),
        closed_form_only=closed_form_only,
        processors=1,
    )
    work = alone.breakdown.compute
    assert piped.step_time >= 0.97 * work
    assert piped.breakdown.bubble < 0.2 * work


def test_processor_per_process_acts_like_gpu() -> None:
    choice = ParallelPlan(pp=4, microbatch_size=1, microbatches=16, attention="flash")
    many, eight_processors = (
        estimate_step_time(choice, closed_form_only=False, processors=n) for n in (4, 8)
    )
    assert many.step_time == eight_processors.step_time
    assert many.step_time > estimate_step_time(choice, closed_form_only=False).step_time
