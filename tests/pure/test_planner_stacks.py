"""Tests that closed forms and simulated programs agree on all constants of training software."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedir import planner
from schedir.errors import UsageError
from schedir.planner import ParallelPlan, SoftwareConstants, TransformerSpec
from schedir.planner.transformer.layer_division import divide_layers
from schedir.planner.transformer.memory_estimate import compute_saved_bytes

MODEL = TransformerSpec(16, 2048, 32, vocab=131072, sequence=4096, ffn=8192, gated=True)
NANOTRON = planner.stack_preset("nanotron")


@pytest.mark.parametrize("name", planner.stack_presets())
@pytest.mark.parametrize(
    "degrees",
    [
        ParallelPlan(dp=16, microbatches=4, zero=1),
        ParallelPlan(dp=16, microbatches=1),
        ParallelPlan(pp=2, dp=8, microbatches=8),
        ParallelPlan(pp=2, tp=8, microbatches=8, sequence_parallel=True),
        ParallelPlan(pp=4, tp=2, dp=2, microbatches=16, zero=1, sequence_parallel=True),
    ],
    ids=["dp with ZeRO", "dp", "pp and dp", "tp", "pp"],
)
def test_closed_form_and_program_agree(name: str, degrees: ParallelPlan) -> None:
    stack, cluster = planner.stack_preset(name), planner.cluster_preset("h100-efa", nodes=2)
    cluster = replace(cluster, fp4_peak=4 * cluster.peak_flops)
    plan = stack.complete(MODEL, degrees)
    formula, program = (
        planner.estimate_step(
            MODEL, cluster, plan, closed_form_only=closed_form_only,
            constants=stack.constants, state_bytes=stack.state_bytes,
        )
        for closed_form_only in (True, False)
    )  # fmt: skip
    assert formula.step_time == pytest.approx(program.step_time, rel=0.05)  # stages are uneven
    assert formula.memory.total == pytest.approx(program.memory.total, rel=0.03)


def estimate_seconds(plan: ParallelPlan, nodes: int = 2, **changes: float) -> float:
    constants = replace(NANOTRON.constants, **changes)
    cluster = planner.cluster_preset("h100-efa", nodes=nodes)
    return planner.estimate_step(
        MODEL, cluster, NANOTRON.complete(MODEL, plan), closed_form_only=True, constants=constants
    ).step_time


def test_time_constants_affect_only_their_plans() -> None:
    """A constant of one kind of parallelism does not change plans without it."""
    sliced = ParallelPlan(tp=8, pp=2, microbatches=8, sequence_parallel=True)
    within = ParallelPlan(tp=8, dp=2, microbatches=8, sequence_parallel=True)
    assert estimate_seconds(sliced, crossing_us=400) > estimate_seconds(sliced) * 1.5
    assert estimate_seconds(within, crossing_us=400) == estimate_seconds(within)
    sharded = replace(within, zero=1)
    copies = 6 * 16 * 2 * 1e-6  # 6 weights of 16 layers, for 2 replicas
    extra_time = estimate_seconds(sharded, shard_copy_us=5) - estimate_seconds(
        sharded, shard_copy_us=4
    )
    assert extra_time == pytest.approx(copies, rel=0.1)
    assert estimate_seconds(within, shard_copy_us=5) == estimate_seconds(within, shard_copy_us=4)
    busy = ParallelPlan(dp=16, microbatches=4)
    assert estimate_seconds(busy, speed_share=0.37) == pytest.approx(
        2 * estimate_seconds(busy), rel=0.1
    )
    # The GPU is slower than the host.
    assert estimate_seconds(busy, kernels_per_op=1) == estimate_seconds(busy)
    assert estimate_seconds(within, kernels_per_op=6) > 1.5 * estimate_seconds(within)


def test_only_all_reduces_have_buckets_and_overlap() -> None:
    """The embedding is 268 of 1343 million parameters, and its reduction does not overlap."""
    single = ParallelPlan(dp=16, microbatch_size=2, microbatches=1)
    sharded = replace(single, zero=1)
    hidden, exposed, one_bucket = (
        estimate_seconds(single, **changes)
        for changes in (
            {}, {"all_reduce_overlap_share": 0}, {"all_reduce_overlap_share": 0, "bucket_params": 0}
        )
    )  # fmt: skip
    params, embedding = MODEL.params, 131072 * 2048 + 4096 * 2048
    cluster = planner.cluster_preset("h100-efa", nodes=2)
    buckets = 6 * 16 + 1  # Each weight of 16 layers has a bucket, and the embedding has one.
    latency = 2 * 15 * cluster.compute_mean_latency(16, 2)
    reduction = cluster.all_reduce_time(2.0 * params, 16) + (buckets - 1) * latency
    assert exposed - hidden == pytest.approx(reduction * (1 - embedding / params), rel=0.1)
    assert exposed - one_bucket == pytest.approx((buckets - 1) * latency, rel=0.1)
    for changes in ({"all_reduce_overlap_share": 0}, {"bucket_params": 1e6}):
        assert estimate_seconds(sharded, **changes) == estimate_seconds(sharded)


def test_accumulation_takes_time_in_each_microbatch() -> None:
    """The kernels move 10 bytes for each of the 1.07 billion weights of the layers."""
    few, many = (ParallelPlan(dp=16, microbatches=m) for m in (2, 8))
    extra_few, extra_many = (
        estimate_seconds(each) - estimate_seconds(each, accumulation_bytes=0)
        for each in (few, many)
    )
    seconds = 10 * 16 * (MODEL.attention_weights + 3 * 2048 * 8192) / 2850e9 / 0.75
    head = 10 * 131072 * 2048 / 2850e9 / 0.75
    assert extra_many - extra_few == pytest.approx(6 * (seconds + head), rel=0.1)


def test_replicas_wait_for_slowest() -> None:
    plan = NANOTRON.complete(MODEL, ParallelPlan(dp=16, microbatches=4))
    even, uneven = (
        planner.estimate_step(
            MODEL, replace(planner.cluster_preset("h100", nodes=2), jitter=jitter), plan,
            closed_form_only=True,
        ).step_time
        for jitter in (0, 0.1)
    )  # fmt: skip
    assert uneven / even == pytest.approx(1 + 0.1 * 1.766, rel=1e-3)  # the largest of 16 normals


def test_layers_divide_by_compute() -> None:
    """The head has the weights of four layers in this model."""
    assert divide_layers(MODEL, 2, "compute") == (10, 6)
    assert divide_layers(MODEL, 4, "compute") == (5, 5, 5, 1)
    assert divide_layers(MODEL, 20, "compute") == (1,) * 16 + (0,) * 4
    assert divide_layers(MODEL, 2, "even") == (8, 8)


def test_plan_search_with_stack_options() -> None:
    cluster = planner.cluster_preset("h100-efa", nodes=2)
    best = planner.plan(
        MODEL, cluster, 256, top=1, closed_form_only=True, pp=4, **NANOTRON.options
    )[0]
    assert best.layers_per_stage == (5, 5, 5, 1)


def test_unknown_stack_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        planner.stack_preset("megatorn")
    assert caught.value.hint == "did you mean 'megatron'?"


@pytest.mark.parametrize(("stack", "speedup"), [("megatron-fp8", 1.6), ("megatron-fp4", 2.2)])
def test_low_precision_speeds_up_weight_gemms_only(stack: str, speedup: float) -> None:
    """Attention, memory passes and collectives take as long as before."""
    low, plain = planner.stack_preset(stack).constants, planner.SoftwareConstants()
    cluster, plan = planner.cluster_preset("b200"), ParallelPlan(tp=8, attention="flash")
    plan = replace(plan, sequence_parallel=True, microbatch_size=8)
    for estimate_time in (planner.layer_time, planner.head_time, planner.embedding_time):
        fast, slow = (estimate_time(MODEL, cluster, plan, constants) for constants in (low, plain))
        assert fast.layer_collectives.F == slow.layer_collectives.F
        if estimate_time is planner.layer_time:
            assert slow.compute.F / speedup < fast.compute.F < slow.compute.F
        else:
            assert fast == slow


FP4 = "fp4_speedup"


@pytest.mark.parametrize(
    ("cluster", "name", "speedup", "message"),
    [
        ("a100", "fp8_speedup", 1.6, "fp8_speedup 1.6 needs GPUs that compute in FP8"),
        ("h100", "fp8_speedup", 2.1, "more than the fp8_peak of the cluster divided by its peak"),
        *((name, FP4, 2.2, "fp4_speedup 2.2 needs GPUs that compute in FP4, and the cluster has no "
           "fp4_peak") for name in ("a100", "h100", "h200", "mi300x")),
        ("b200", FP4, 4.1, "more than the fp4_peak of the cluster divided by its peak_flops, 4"),
        ("gb200", FP4, 4.1, "more than the fp4_peak of the cluster divided by its peak_flops, 4"),
    ],
)  # fmt: skip
def test_low_precision_needs_supporting_gpu(
    cluster: str, name: str, speedup: float, message: str
) -> None:
    constants = planner.SoftwareConstants(**{name: speedup})
    node = planner.cluster_preset(cluster)
    with pytest.raises(UsageError, match=message) as caught:
        planner.estimate_step(MODEL, node, ParallelPlan(dp=node.gpu_count), constants=constants)
    assert caught.value.fields[0] == name
    with pytest.raises(UsageError, match=message):
        planner.plan(MODEL, node, 8 * node.gpu_count, constants=constants, closed_form_only=True)


def test_product_has_one_precision() -> None:
    with pytest.raises(UsageError, match="a product is computed either in FP8 or in FP4"):
        planner.SoftwareConstants(fp8_speedup=1.6, fp4_speedup=2.2)
    with pytest.raises(UsageError, match="fp4_peak must be at least peak"):
        replace(planner.cluster_preset("b200"), fp4_peak=1e15)


def test_no_plan_has_stage_without_weights() -> None:
    """nanotron's division of 16 layers over 16 ranks leaves stages without a layer."""
    assert 0 in divide_layers(MODEL, 16, "compute")[:-1]
    cluster = planner.cluster_preset("h100-efa", nodes=2)
    sizes = [
        {*planner.all_plans(MODEL, cluster, 64, **options).plans.pp.tolist()}
        for options in (NANOTRON.options, {})
    ]
    assert sizes == [{1, 2, 4, 8}, {1, 2, 4, 8, 16}]


def test_constants_of_saved_tensors_change_their_terms() -> None:
    """Nanotron's gate saves an additional tensor, and its Llama saves no masks of dropout."""
    plan = ParallelPlan(tp=2, microbatch_size=2, attention="flash", sequence_parallel=True)
    numbers = 4096 * 2 / 2  # tokens of a tensor-parallel rank
    saved, with_gate, without_masks = (
        compute_saved_bytes(MODEL, plan, 2, SoftwareConstants(**changes))[0]
        for changes in ({}, {"gate_bytes": 2}, {"mask_bytes": 0})
    )
    assert with_gate - saved == 2 * numbers * 8192
    assert saved - without_masks == 2 * numbers * 2048
    plain = replace(MODEL, gated=False)
    assert compute_saved_bytes(plain, plan, 2, SoftwareConstants(gate_bytes=2)) == (
        compute_saved_bytes(plain, plan, 2)
    )


def predict_memory(tp: int, microbatch_size: int, memory: float = 80e9, **changes: float) -> float:
    plan = NANOTRON.complete(
        MODEL,
        ParallelPlan(tp=tp, microbatch_size=microbatch_size, sequence_parallel=True),
    )
    cluster = replace(planner.cluster_preset("h100-efa", nodes=4), memory=memory)
    constants = replace(NANOTRON.constants, **changes)
    return planner.peak_memory(
        MODEL, cluster, plan, constants, state_bytes=NANOTRON.state_bytes
    ).total


def test_gathered_tensors_take_only_free_memory_across_nodes() -> None:
    """With tp 32, the allocator reclaims gathered tensors. With tp 8, they need more memory."""
    assert predict_memory(32, 128) == pytest.approx(80e9, rel=1e-6)
    assert predict_memory(32, 128) <= 80e9 < predict_memory(32, 128, 200e9)
    needed_bytes = predict_memory(32, 128, gathered_bytes=0)
    assert predict_memory(32, 128, 30e9) == pytest.approx(needed_bytes) and needed_bytes > 30e9
    assert predict_memory(32, 16, 200e9) == predict_memory(32, 16) < 80e9
    assert predict_memory(8, 64) == predict_memory(8, 64, 200e9) > 80e9


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_simulated_memory_has_the_parts_of_the_closed_form(zero: int) -> None:
    """Unsharded buffers and weights of experts are not activations."""
    model = replace(MODEL, experts=8, active=2)
    plan = ParallelPlan(pp=2, dp=8, ep=8, microbatches=8, zero=zero, attention="flash")
    formula, program = (
        planner.estimate_step(
            model, planner.cluster_preset("h100-efa", nodes=2), plan,
            constants=NANOTRON.constants, state_bytes=NANOTRON.state_bytes,
            closed_form_only=closed_form_only,
        ).memory
        for closed_form_only in (True, False)
    )  # fmt: skip
    # The closed form has at least one more buffer of a message than the simulation.
    tolerance = 2 * plan.microbatch_size * model.sequence * model.hidden * 2
    assert program == pytest.approx(formula, abs=tolerance, rel=1e-9)
    assert (formula.buffers > 5e8) == (zero == 1)


@pytest.mark.filterwarnings("ignore:tp 16 is more than the 8 GPUs of a node")
def test_simulated_plan_also_reclaims_gathered_tensors() -> None:
    """A plan that fits because of reclaimed memory also fits after its simulation."""
    plan = NANOTRON.complete(
        MODEL, ParallelPlan(pp=2, tp=16, microbatch_size=64, microbatches=8, sequence_parallel=True)
    )
    formula, program, program_with_more_memory = (
        planner.estimate_step(
            MODEL, replace(planner.cluster_preset("h100-efa", nodes=4), memory=memory), plan,
            constants=NANOTRON.constants, state_bytes=NANOTRON.state_bytes,
            closed_form_only=closed_form_only,
        )
        for memory, closed_form_only in ((70e9, True), (70e9, False), (80e9, False))
    )  # fmt: skip
    assert formula.fits and program.fits
    assert program.memory.total == pytest.approx(70e9, rel=1e-6)
    assert program.memory.total == pytest.approx(formula.memory.total)
    assert program_with_more_memory.memory.total > 75e9
