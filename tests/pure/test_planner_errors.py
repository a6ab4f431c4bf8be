"""Tests of wrong arguments of the planner, and of plans that are impossible."""

import re
from dataclasses import replace
from typing import Any

import pytest

from schedir.errors import UsageError
from schedir.planner import (
    ParallelPlan,
    all_plans,
    estimate_step,
    peak_memory,
    plan,
)
from tests.pure.test_planner_plans import SMALL, make_cluster


@pytest.mark.parametrize(
    ("asked_for", "fact", "hint"),
    [
        ({"batch": 0}, "batch must be an integer from 1 to 1073741824, not 0", ""),
        ({"batch": 30, "dp": 4},
         "batch 30 does not fit any plan with dp 4", "fit: 28 and 32"),
        ({"batch": 3, "dp": 4}, "batch 3 does not fit any plan with dp 4", "fit: 4"),
        ({"batch": 32, "dp": 4, "microbatch_size": 3}, "dp 4 and microbatch_size 3",
         "fit: 24 and 36"),
        ({"tp": 3}, "tp 3 does not divide heads 16", "tp = 1 or 2 or 4 or 8"),
        ({"pp": 3, "tp": 2},
         "no plan with pp 3 x tp 2 uses all 16 GPUs", "must be 16 = 2 x 2 x 2 x 2"),
        ({"ep": 2}, "ep 2 does not divide experts 1", ""),
        ({"cp": 3}, "cp 3 does not divide sequence 1024", ""),
        ({"pp": 16, "layers": 8}, "pp 16 exceeds the 8 layers of the model", ""),
        ({"schedules": "1f1b"}, "no formulas for schedule '1f1b'", "did you mean 'one_f_one_b'?"),
        ({"schedules": "xx"}, "schedules: the planner has no formulas", "default is all but eager"),
        ({"schedules": ()}, "schedules is empty: it must have at least one value", ""),
        ({"zero": 4}, "zero must be an integer from 0 to 3, not 4", ""),
        ({"recompute": "some"}, "recompute must be none or selective or full, not 'some'", ""),
        ({"microbatch_size": 0}, "microbatch_size must be an integer from 1 to", ""),
        ({"top": 0}, "top must be an integer, 1 or more, not 0", ""),
        ({"pp": 16, "stages_per_rank": 7, "layers": 32},
         "no plan of 32 layers has the requested", ""),
        ({"memory": "300MB"}, "plans fits into the 300 MB of a GPU: the smallest plan needs",
         "the smallest plan is pp "),
    ],
)  # fmt: skip
def test_wrong_plan_options_are_refused(asked_for: dict[str, Any], fact: str, hint: str) -> None:
    model = replace(SMALL, layers=asked_for.pop("layers", 12))
    cluster = make_cluster(2, memory=asked_for.pop("memory", "80GB"))
    with pytest.raises(UsageError) as caught:
        plan(model, cluster, asked_for.pop("batch", 64), closed_form_only=True, **asked_for)
    assert fact in caught.value.fact and hint in caught.value.hint


def test_unknown_filter_is_refused() -> None:
    with pytest.raises(UsageError, match="no filter 'schedule'") as caught:
        all_plans(SMALL, make_cluster(2), 64, schedule="zb_v")
    assert caught.value.hint == "did you mean 'schedules'?"


@pytest.mark.parametrize(
    ("field", "fact", "hint"),
    [
        ("flops", "flops = 312 is a number of operations per second", 'flops="312TFLOP/s"'),
        ("nvlink_bandwidth", "nvlink_bandwidth = 312 is", 'nvlink_bandwidth="312GB/s"'),
        ("latency", "latency = 312 is a number of seconds", 'latency="312us"'),
    ],
)
def test_clusters_with_forgotten_units_are_refused(field: str, fact: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(SMALL, make_cluster(2, **{field: 312}), 64, closed_form_only=True)
    assert fact in caught.value.fact and caught.value.hint == hint


def test_hinted_batches_are_nearest_valid() -> None:
    cluster = make_cluster(2)
    for batch in (30, 33, 50):
        with pytest.raises(UsageError) as caught:
            plan(SMALL, cluster, batch, dp=4, microbatch_size=3, closed_form_only=True)
        nearest = [int(size) for size in re.findall(r"\d+", caught.value.hint)]
        for size in range(nearest[0], nearest[1] + 1):
            if size in nearest:
                assert plan(SMALL, cluster, size, dp=4, microbatch_size=3, closed_form_only=True)
            else:
                with pytest.raises(UsageError):
                    plan(SMALL, cluster, size, dp=4, microbatch_size=3, closed_form_only=True)


@pytest.mark.parametrize(
    ("choice", "fact"),
    [
        (ParallelPlan(pp=4), "pp 4 x tp 1 x dp 1 x cp 1 = 4 GPUs, but the cluster has 8 GPUs"),
        (ParallelPlan(pp=8, microbatches=8), "12 layers cannot be divided evenly among pp 8 x"),
        (
            ParallelPlan(pp=2, dp=4, stages_per_rank=2),
            "schedule one_f_one_b needs stages_per_rank 1, not 2",
        ),
        (
            ParallelPlan(pp=4, dp=2, stages_per_rank=3, microbatches=6, schedule="interleaved"),
            "interleaved needs a number of microbatches that is a multiple of pp 4, not 6",
        ),
        (
            ParallelPlan(pp=4, dp=2, microbatches=6, schedule="zb_h2"),
            "zb_h2 needs at least 7 microbatches, not 6",
        ),
        (ParallelPlan(tp=8, dp=1, schedule="zb"), "no formulas for schedule 'zb'"),
    ],
)
def test_impossible_plans_are_refused(choice: ParallelPlan, fact: str) -> None:
    with pytest.raises(UsageError) as caught:
        estimate_step(SMALL, make_cluster(1), choice, closed_form_only=True)
    assert fact in caught.value.fact


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"zero": 4}, "zero must be an integer from 0 to 3, not 4"),
        ({"sequence_parallel": 1}, "sequence_parallel must be True or False, not 1"),
        ({"layers_per_stage": "ab"}, "must have the number of layers of each stage, not 'ab'"),
        (
            {"layers_per_stage": (6.0, 6)},
            "layers_per_stage must have the number of layers of each stage, not (6.0, 6)",
        ),
    ],
)
def test_invalid_plan_fields_are_refused(fields: dict[str, Any], fact: str) -> None:
    with pytest.raises(UsageError) as caught:
        ParallelPlan(**fields)
    assert fact in caught.value.fact


def test_wrong_model_or_cluster_is_refused() -> None:
    wrong_arguments: list[tuple[Any, Any]] = [("gpt-22b", make_cluster()), (SMALL, "a100")]
    for model, cluster in wrong_arguments:
        with pytest.raises(UsageError, match=r"(model|cluster) must be a"):
            plan(model, cluster, 8)
        with pytest.raises(UsageError, match=r"(model|cluster) must be a"):
            estimate_step(model, cluster, ParallelPlan(tp=8))
    with pytest.raises(UsageError, match="tp 3 does not divide heads 16"):
        peak_memory(SMALL, make_cluster(), ParallelPlan(tp=3))
    with pytest.raises(UsageError, match="no formulas for schedule 'zz'"):
        peak_memory(SMALL, make_cluster(), ParallelPlan(schedule="zz"))
