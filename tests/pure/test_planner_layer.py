"""Tests of the time of a layer: operations, monotone times, hosts, and recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import planner
from schedir.errors import UsageError
from schedir.ir.cost.cluster import Cluster
from schedir.planner import ParallelPlan, SoftwareConstants, TransformerSpec
from schedir.planner.transformer.layer_ops import Gemm, list_head_ops, list_layer_ops
from schedir.planner.transformer.op_time import OpTimes
from tests import published_runs

NODE = planner.cluster_preset("a100")
GPT = TransformerSpec(layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048)


@st.composite
def models(draw: st.DrawFn) -> TransformerSpec:
    heads = 8 * draw(st.integers(1, 4))
    experts = draw(st.sampled_from([1, 1, 4, 8]))
    return TransformerSpec(
        layers=draw(st.integers(1, 9)),
        hidden=heads * draw(st.sampled_from([32, 64, 128])),
        heads=heads,
        vocab=8 * draw(st.integers(10, 9000)),
        sequence=64 * draw(st.integers(1, 40)),
        ffn=64 * draw(st.integers(0, 300)),
        kv_heads=draw(st.sampled_from([0, 1, 2, 4, 8])),
        gated=draw(st.booleans()),
        experts=experts,
        active=1 if experts == 1 else draw(st.integers(1, experts)),
    )


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    return ParallelPlan(
        pp=2,
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        microbatch_size=draw(st.integers(1, 8)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        sequence_parallel=draw(st.booleans()),
        cp=draw(st.sampled_from([1, 2, 4])),
        attention=draw(st.sampled_from(["softmax", "flash"])),
        schedule=draw(st.sampled_from(["one_f_one_b", "zb_h1"])),
        rank_order=draw(st.sampled_from(["tp-pp-dp", "tp-dp-pp"])),
    )


@given(models(), plans())
def test_gemm_flops_match_model(model: TransformerSpec, choice: ParallelPlan) -> None:
    per_layer, head_ops = (
        sum(3 * gemm.forward_flops for gemm in pieces(model, choice).gemms if gemm.name != "router")
        for pieces in (list_layer_ops, list_head_ops)
    )
    copies = max(choice.tp // model.kv_heads, 1)  # copies if there are fewer key heads than slices
    repeated_key_flops = (
        6
        * choice.microbatch_size
        * model.sequence
        * 2
        * model.hidden
        * (model.hidden // model.heads)
    )
    repeated_key_flops *= model.kv_heads * (copies - 1)
    total_flops = (
        model.layers * (per_layer * choice.tp * choice.cp - repeated_key_flops)
    ) + head_ops * choice.tp * choice.cp
    assert total_flops == pytest.approx(model.count_flops(choice.microbatch_size), rel=1e-9)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (ParallelPlan(tp=5), "tp 5 does not divide heads 64"),
        (ParallelPlan(cp=3), "cp 3 does not divide sequence 2048"),
        (
            ParallelPlan(tp=64, cp=64, sequence_parallel=True),
            "cp x tp 4096 does not divide sequence 2048",
        ),
        (ParallelPlan(dp=2, ep=2), "ep 2 does not divide experts 1"),
        (ParallelPlan(tp=16), "processes must be different numbers from 0 to 7"),
    ],
)
def test_indivisible_degrees_are_refused(choice: ParallelPlan, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner.layer_time(GPT, NODE, choice)


@given(models(), plans())
def test_recompute_time_is_forward_time(model: TransformerSpec, choice: ParallelPlan) -> None:
    cluster = replace(NODE, nodes=4)
    none, core, full = (
        planner.layer_time(model, cluster, replace(choice, recompute=r))
        for r in ("none", "selective", "full")
    )
    assert none.total.R == 0
    assert pytest.approx(full.total.F) == full.total.R
    assert 0 < core.total.R <= full.total.R
    assert none.total.F == core.total.F == full.total.F


@given(models(), plans())
def test_larger_microbatch_takes_longer(model: TransformerSpec, choice: ParallelPlan) -> None:
    cluster = replace(NODE, nodes=4)
    smaller, two = (
        planner.layer_time(
            model, cluster, replace(choice, microbatch_size=choice.microbatch_size + increase)
        ).total
        for increase in (0, 1)
    )
    assert two.F >= smaller.F * (1 - 1e-9)
    assert two.B >= smaller.B * (1 - 1e-9)


@given(models(), plans())
def test_tensor_parallel_compute_is_bounded(model: TransformerSpec, choice: ParallelPlan) -> None:
    cluster = replace(NODE, nodes=4, kernel_us=0)
    full_times, sliced_times = (
        planner.layer_time(model, cluster, replace(choice, tp=t, sequence_parallel=cuts)).compute
        for t, cuts in ((1, False), (choice.tp, choice.sequence_parallel))
    )
    for full_time, sliced in zip(full_times, sliced_times, strict=True):
        assert full_time / choice.tp * (1 - 1e-9) <= sliced <= full_time * (1 + 1e-9)


@given(models(), plans())
def test_stage_takes_at_most_sum_of_parts(model: TransformerSpec, choice: ParallelPlan) -> None:
    cluster = replace(NODE, nodes=4)
    layer_times = planner.layer_time(model, cluster, choice)
    end_times = [
        planner.embedding_time(model, cluster, choice),
        planner.head_time(model, cluster, choice),
    ]
    sum_of_parts = end_times[0].plus(end_times[1]).plus(layer_times, 3).total
    stage_times = planner.stage_time(model, cluster, choice, 3, True, True).total
    assert stage_times.F <= sum_of_parts.F * (1 + 1e-9)
    assert stage_times.B <= sum_of_parts.B * (1 + 1e-9)


def test_small_layer_is_limited_by_kernel_launch() -> None:
    small_model = TransformerSpec(layers=4, hidden=256, heads=4, vocab=1000, sequence=64)
    slow, fast = (
        planner.layer_time(small_model, replace(NODE, kernel_us=us), ParallelPlan())
        for us in (20, 10)
    )
    assert pytest.approx(2 * fast.total.F) == slow.total.F
    assert pytest.approx(2 * fast.total.B) == slow.total.B
    assert planner.layer_time(
        GPT, replace(NODE, kernel_us=20), ParallelPlan(microbatch_size=8)
    ) == planner.layer_time(GPT, replace(NODE, kernel_us=10), ParallelPlan(microbatch_size=8))


def test_layer_times_match_published_22b_model() -> None:
    """Each forward and backward is within 2 % of times that are printed to 0.1 ms."""
    for row in published_runs.read_layer_times():
        times = planner.layer_time(row.model, NODE, row.choice).total
        assert pytest.approx(row.seconds, rel=0.02) == (times.F, times.B), row.name


def test_stage_times_match_second_paper() -> None:
    """A microbatch in an inner stage is within 8 %, and no constant was fitted to these."""
    for row in published_runs.read_stage_times():
        cluster = replace(NODE, nodes=row.choice.pp // 8)
        times = planner.stage_time(row.model, cluster, row.choice, row.layers).total
        assert sum(times) == pytest.approx(sum(row.seconds), rel=0.08), row.name


def test_tensor_collectives_hide_under_full_backwards_only() -> None:
    choice = ParallelPlan(tp=8, microbatch_size=4)
    full_backward, split, bare = (
        planner.layer_time(
            GPT, NODE, replace(choice, schedule=schedule), constants
        ).layer_collectives
        for schedule, constants in (
            ("one_f_one_b", SoftwareConstants()),
            ("zb_h1", SoftwareConstants()),
            ("one_f_one_b", SoftwareConstants(tensor_overlap_share=0)),
        )
    )
    assert (
        pytest.approx((1 - SoftwareConstants().tensor_overlap_share) * split.I) == full_backward.I
    )
    assert split == bare and full_backward.F == split.F > 0


def test_gemm_time_counts_full_tiles_and_waves() -> None:
    one_node = replace(NODE, flops=108e12, peak=None, hbm_bandwidth=1e18)  # 1e12 per multiprocessor
    prices = OpTimes(one_node, ParallelPlan(), SoftwareConstants(max_splits=1), True)
    tile = 2 * 128 * 256 * 4096 / 1e12

    def product(m: int, n: int) -> float:
        return prices.time_gemm(Gemm("one", m, n, 4096)).F

    assert product(128, 256) == product(256, 128) == product(1, 1) == pytest.approx(tile)
    assert product(128 * 108, 256) == pytest.approx(tile)
    assert product(128 * 108 + 1, 256) == pytest.approx(2 * tile)
    fine = OpTimes(replace(one_node, num_sms=None), ParallelPlan(), SoftwareConstants(), True)
    assert pytest.approx(2 * 4096 / 108e12) == fine.time_gemm(Gemm("one", 1, 1, 4096)).F
    split = OpTimes(one_node, ParallelPlan(), SoftwareConstants(), True)
    assert pytest.approx(tile / 8) == split.time_gemm(Gemm("one", 128, 256, 4096)).F


def test_expert_and_context_parallel_collective_times() -> None:
    mixture = replace(GPT, experts=8, active=2)
    without_ep = planner.layer_time(mixture, NODE, ParallelPlan(microbatch_size=4))
    one_node = planner.layer_time(mixture, NODE, ParallelPlan(microbatch_size=4, dp=8, ep=8))
    many_nodes = planner.layer_time(
        mixture, replace(NODE, nodes=8), ParallelPlan(microbatch_size=4, dp=8, pp=8, ep=8)
    )
    by_replicas = planner.layer_time(
        mixture,
        replace(NODE, nodes=8),
        ParallelPlan(microbatch_size=4, dp=8, pp=8, ep=8, rank_order="tp-dp-pp"),
    )
    assert (
        without_ep.layer_collectives.F
        == 0
        < one_node.layer_collectives.F
        < many_nodes.layer_collectives.F
    )
    assert by_replicas == one_node
    size = 2.0 * 4 * 2048 * 6144 * 2
    assert pytest.approx(2 * NODE.all_to_all_time(size, 8)) == one_node.layer_collectives.F
    slow = replace(NODE, nodes=2, network_bandwidth=1e9)
    context_collectives = planner.layer_time(
        GPT, slow, ParallelPlan(cp=16, microbatch_size=4)
    ).layer_collectives
    keys = 2 * 2.0 * 4 * 2048 * 6144
    assert 0 < context_collectives.F < slow.all_gather_time(keys, 16)  # partly hidden by attention
    # The collectives are completely hidden.
    assert (
        planner.layer_time(GPT, NODE, ParallelPlan(cp=2, microbatch_size=4)).layer_collectives.F
        == 0
    )


def test_flash_attention_skips_score_memory_passes() -> None:
    softmax, flash = (
        planner.layer_time(
            GPT,
            NODE,
            ParallelPlan(tp=8, microbatch_size=4, attention=attention, recompute="selective"),
        )
        for attention in ("softmax", "flash")
    )
    assert flash.total.F < softmax.total.F and flash.total.R < softmax.total.R / 4
    # The forward has two products on half of the scores, and the backward has five.
    product = 2.0 * 4 * 2048**2 * 6144 / 8 / NODE.flops
    constants = SoftwareConstants()
    assert pytest.approx(product / constants.flash_forward_efficiency) == flash.compute.R
    prices = OpTimes(NODE, ParallelPlan(), constants, True)
    gemms = list_layer_ops(GPT, ParallelPlan(tp=8, microbatch_size=4, attention="flash")).gemms
    backward = sum(prices.time_gemm(gemm).I for gemm in gemms if gemm.is_flash)
    assert pytest.approx(2.5 * product / constants.flash_backward_efficiency) == backward


def test_software_constants_are_bounded() -> None:
    for constant in SoftwareConstants().list_constants():
        assert constant.min_value <= constant.value <= constant.max_value
        assert constant.meaning
        assert constant.source
        for beyond in (constant.min_value - 1, constant.max_value + 1, float("nan"), "many"):
            with pytest.raises(UsageError, match=constant.name):
                SoftwareConstants(**{constant.name: beyond})  # type: ignore[arg-type]


def test_cluster_presets_are_complete() -> None:
    for name in planner.cluster_presets():
        known = planner.cluster_preset(name, nodes=3)
        assert known.nodes == 3 and known.peak is not None and known.flops < known.peak
        assert known.num_sms is not None and known.kernel_us > 0
    with pytest.raises(UsageError, match="there is no cluster preset 'a10'"):
        planner.cluster_preset("a10")


def test_peak_flops_is_at_least_flops() -> None:
    usual: dict[str, Any] = dict(memory=1, hbm_bandwidth=1, nvlink_bandwidth=1, network_bandwidth=1)
    assert Cluster(1, 1, flops=10, **usual).peak_flops == 10
    with_peak: dict[str, Any] = dict(peak="2GFLOP/s")
    assert Cluster(1, 1, flops=10, **usual, **with_peak).peak_flops == 2e9
    with pytest.raises(UsageError, match="flops must be at most peak"):
        Cluster(1, 1, flops=10, peak=9, **usual)
    with pytest.raises(UsageError, match="num_sms must be an integer"):
        Cluster(1, 1, flops=10, **usual, **dict(with_peak, num_sms=1.5))
