"""Plans of the planner: which plans exist, their predicted time and memory, and errors."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Cluster, activation_bytes_per_layer, zero_model_states
from schedir.errors import UsageError
from schedir.planner import (
    ParallelPlan,
    SoftwareConstants,
    TransformerSpec,
    estimate_step,
    peak_memory,
    plan,
)
from schedir.planner.estimate.link_time import (
    build_process_mesh,
    build_replica_rings,
    compute_link_times,
    place_plans_on_nodes,
)
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS
from schedir.planner.plan_columns import PlanColumns
from schedir.planner.plan_enumeration import build_field_filter, enumerate_plans
from schedir.planner.plan_estimate import strip_estimates
from schedir.planner.plan_table import estimate_closed_form
from schedir.planner.transformer.layer_division import get_layers_per_stage
from schedir.planner.transformer.memory_estimate import (
    ADAM,
    compute_saved_bytes,
    count_end_params,
    count_layer_params,
    estimate_by_rank,
)

SMALL = TransformerSpec(layers=12, hidden=1024, heads=16, vocab=51200, sequence=1024)
NODE: dict[str, Any] = {
    "gpus_per_node": 8, "flops": "250TFLOP/s", "memory": "80GB", "hbm_bandwidth": "1.7TB/s",
    "nvlink_bandwidth": "230GB/s", "network_bandwidth": "20GB/s", "latency": "5us", "kernel_us": 8,
}  # fmt: skip


def make_cluster(nodes: int = 1, **fields: Any) -> Cluster:
    return Cluster(nodes=nodes, **{**NODE, **fields})


models = st.builds(
    lambda heads, width, layers, kv, dim, gated, experts, tied: TransformerSpec(
        layers=layers, hidden=heads * width, heads=heads, head_dim=dim, vocab=50304, sequence=1024,
        kv_heads=heads // kv, gated=gated, experts=experts, active=min(experts, 2), tied=tied,
    ),
    st.sampled_from([8, 16]), st.sampled_from([64, 128]), st.integers(4, 14), st.integers(1, 2),
    st.sampled_from([0, 128]), st.booleans(), st.sampled_from([1, 4]), st.booleans(),
)  # fmt: skip
ALL_SCHEDULES = tuple(SCHEDULE_FORMULAS)


@settings(max_examples=8)
@given(
    models, st.sampled_from([1, 2, 3]), st.sampled_from([8, 24]),
    st.sampled_from(["tp-pp-dp", "tp-dp-pp"]), st.sampled_from(["softmax", "flash"]), st.data(),
)  # fmt: skip
def test_batch_estimate_equals_single_estimates(
    model: TransformerSpec, nodes: int, batch: int, order: Any, attention: Any, data: Any
) -> None:
    cluster = make_cluster(nodes)
    e = data.draw(st.sampled_from([1, 2])) if model.experts > 1 else 1
    c = data.draw(st.sampled_from([1, 2]))
    field_filter = build_field_filter(
        schedules=ALL_SCHEDULES, rank_order=order, attention=attention, cp=c, ep=e
    )
    plans = enumerate_plans(model, cluster, batch, field_filter)
    estimates = estimate_closed_form(model, cluster, plans, SoftwareConstants(), ADAM)
    for i in data.draw(st.lists(st.integers(0, len(plans) - 1), min_size=8, max_size=8)):
        choice = plans.plan_at(model, i)
        assert (choice.gpus, choice.batch) == (cluster.gpu_count, batch)
        assert sum(get_layers_per_stage(model, choice)) == model.layers
        alone, among = (
            estimate_step(model, cluster, choice, closed_form_only=True),
            estimates.estimate_at(model, cluster, i),
        )
        assert among.step_time == pytest.approx(alone.step_time, rel=1e-12)
        assert among.breakdown == pytest.approx(alone.breakdown, rel=1e-9, abs=1e-12)
        assert among.memory == pytest.approx(alone.memory, rel=1e-12)
        assert alone.step_time == pytest.approx(sum(alone.breakdown)) and min(alone.breakdown) >= 0
        fullest = max(estimate_by_rank(model, cluster, choice), key=lambda rank: rank.total)
        assert alone.memory.total == pytest.approx(fullest.total)


def test_closed_form_is_near_program() -> None:
    """Compare step time and memory of different plans with simulations of their programs."""
    shapes: list[dict[str, Any]] = [
        dict(pp=4, microbatches=12),
        dict(pp=4, microbatches=12, schedule="gpipe", recompute="full"),
        dict(pp=4, microbatches=12, recompute="selective", zero=1, rank_order="tp-dp-pp"),
        dict(pp=4, microbatches=12, schedule="interleaved", stages_per_rank=3),
        dict(pp=4, microbatches=12, schedule="zb_h1"),
        dict(pp=4, microbatches=12, schedule="zb_h2", zero=1),
        dict(pp=3, dp=5, microbatches=9, schedule="eager_1f1b"),
        dict(pp=3, dp=5, stages_per_rank=2, microbatches=9, schedule="interleaved_zb"),
        dict(pp=2, stages_per_rank=2, microbatches=6, schedule="zb_v"),
        dict(pp=2, stages_per_rank=6, microbatches=6, schedule="interleaved", zero=3),
        dict(pp=2, stages_per_rank=3, microbatches=6, zero=2, schedule="interleaved"),
        dict(pp=1, stages_per_rank=12, microbatches=4, schedule="looped_bfs", zero=3),
        dict(pp=5, dp=3, microbatches=10, layers_per_stage=(3, 3, 2, 2, 2)),
    ]
    cluster = make_cluster(2)
    errors: list[list[float]] = []
    for shape in shapes:
        choice = ParallelPlan(microbatch_size=4, **{"dp": 16 // shape["pp"], **shape})
        node = cluster if choice.gpus == 16 else make_cluster(1, gpus_per_node=15)
        closed, simulated = (
            estimate_step(SMALL, node, choice, closed_form_only=c) for c in (True, False)
        )
        errors.append([closed.step_time / simulated.step_time - 1,
                    closed.memory.total / simulated.memory.total - 1])  # fmt: skip
    steps, memories = np.abs(errors).T
    assert steps.mean() <= 0.01 and steps.max() <= 0.03, steps
    assert memories.mean() <= 0.005 and memories.max() <= 0.02, memories


@pytest.mark.parametrize("tied", [True, False])
def test_slow_network_reductions_are_near_program(tied: bool) -> None:
    """Reductions over replicas, and of a tied embedding, take most of the step."""
    model, cluster = replace(SMALL, tied=tied), make_cluster(2, network_bandwidth="1GB/s")
    for t, d, zero in ((1, 8, 0), (1, 8, 1), (8, 1, 0)):
        choice = ParallelPlan(pp=2, tp=t, dp=d, zero=zero, microbatches=16)
        closed, exact = (
            estimate_step(model, cluster, choice, closed_form_only=c) for c in (True, False)
        )
        assert closed.step_time == pytest.approx(exact.step_time, rel=0.03)
        # With ZeRO, the rank that waits for gathers of the head may not be the busiest rank.
        if not choice.zero:
            assert closed.breakdown.data_parallel == pytest.approx(
                exact.breakdown.data_parallel, rel=0.02
            )
        assert closed.memory.weights == pytest.approx(exact.memory.weights)


def test_best_plans_are_simulated_and_ranked_again() -> None:
    cluster = make_cluster(1, memory="4GB")
    closed, simulated = (plan(SMALL, cluster, 32, top=5, closed_form_only=c) for c in (True, False))
    steps = [estimate.step_time for estimate in simulated]
    assert steps == sorted(steps)
    assert all(estimate.is_simulated and estimate.fits for estimate in simulated)
    for estimate in simulated:
        assert estimate.step_time == pytest.approx(
            estimate_step(SMALL, cluster, strip_estimates(estimate)).step_time
        )
        assert estimate.step_time == pytest.approx(sum(estimate.breakdown)) and estimate.explanation
    assert steps[0] <= min(
        estimate_step(SMALL, cluster, strip_estimates(estimate)).step_time for estimate in closed
    )


@settings(max_examples=4)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([16, 64]), st.booleans())
def test_faster_cluster_never_slows_best_plan(nodes: int, batch: int, sp: bool) -> None:
    def find_best_time(**fields: Any) -> float:
        cluster = make_cluster(nodes, **{"memory": "16GB", **fields})
        return plan(SMALL, cluster, batch, top=1, sequence_parallel=sp, closed_form_only=True)[
            0
        ].step_time

    base_time = find_best_time()
    for changed_field in (
        "memory",
        "nvlink_bandwidth",
        "network_bandwidth",
        "hbm_bandwidth",
        "flops",
    ):
        larger_value = {"memory": "40GB", "flops": "500TFLOP/s"}.get(changed_field, "3TB/s")
        assert find_best_time(**{changed_field: larger_value}) <= base_time * (1 + 1e-12), (
            changed_field
        )


def test_plans_are_ranked_with_bottleneck() -> None:
    cluster = make_cluster(2, memory="16GB")
    plans_found = plan(SMALL, cluster, 64, top=40, closed_form_only=True)
    assert len(plans_found) == 40 and all(estimate.fits for estimate in plans_found)
    steps = [estimate.step_time for estimate in plans_found]
    assert steps == sorted(steps)
    best, last = plans_found[0], plans_found[-1]
    assert best.mfu == pytest.approx(SMALL.count_flops(64) / best.step_time / 16 / 250e12)
    for estimate in plans_found:
        assert estimate.bottleneck in (
            *estimate.breakdown._fields,
            "memory",
        )
        assert estimate.explanation.startswith(estimate.bottleneck)
    assert ". Its step takes " in last.explanation and "% less" in last.explanation


def test_memory_bottleneck_names_faster_plan() -> None:
    """With the missing memory, the planner finds the faster plan that the explanation names."""
    best = plan(SMALL, make_cluster(1, memory="3GB"), 32, top=1, closed_form_only=True)[0]
    pattern = (
        r"memory: a faster plan needs ([\d.]+) MB more than a GPU has\. "
        r"Its step takes ([\d.]+) s, .*% less: pp .*"
    )
    match = re.fullmatch(pattern, best.explanation)
    assert match is not None and best.bottleneck == "memory"
    missing_megabytes, step = map(float, match.groups())
    larger = make_cluster(1, memory=3e9 + missing_megabytes * 1.001e6)
    assert (
        plan(SMALL, larger, 32, top=1, closed_form_only=True)[0].step_time
        <= step * 1.001
        < best.step_time
    )


def test_saved_bytes_match_paper() -> None:
    """Compare with arXiv 2205.05198, table 2. Flash attention (2307.08691) saves no scores."""
    for t, recompute, sp in [
        (1, "none", False),
        (8, "none", True),
        (8, "selective", False),
    ]:
        choice = ParallelPlan(tp=t, microbatch_size=2, recompute=recompute, sequence_parallel=sp)  # type: ignore[arg-type]
        saved_bytes, recomputed_bytes = compute_saved_bytes(SMALL, choice)
        options: dict[str, Any] = {
            "sequence": 1024,
            "microbatch_size": 2,
            "hidden": 1024,
            "heads": 16,
        }
        options["tp"] = t
        total_bytes = activation_bytes_per_layer(**options, sequence_parallel=sp)
        assert saved_bytes == activation_bytes_per_layer(
            **options, recompute=choice.recompute, sequence_parallel=sp
        )
        assert saved_bytes + recomputed_bytes == total_bytes
        # In 32-bit types, everything except the one-byte dropout masks is twice as large.
        masks = 2 * 1024 * 1024 * 2 / (t if sp else 1)
        masks += (recompute == "none") * 16 * 1024**2 * 2 / t
        assert compute_saved_bytes(SMALL, choice, 4)[0] == pytest.approx(2 * saved_bytes - masks)
    grouped, _ = compute_saved_bytes(
        replace(SMALL, kv_heads=4), ParallelPlan(tp=8, microbatch_size=2)
    )
    tokens = 1024 * 2 * 1024 / 8  # numbers of the queries; keys and values have a quarter each
    assert (
        compute_saved_bytes(SMALL, ParallelPlan(tp=8, microbatch_size=2))[0] - grouped
        == 2 * 2 * 3 / 4 * tokens
    )
    gated, _ = compute_saved_bytes(
        replace(SMALL, gated=True, ffn=2048), ParallelPlan(tp=8, microbatch_size=2)
    )
    assert (
        compute_saved_bytes(SMALL, ParallelPlan(tp=8, microbatch_size=2))[0] - gated
        == (4 * 4 - 6 * 2) * tokens
    )
    flash, _ = compute_saved_bytes(SMALL, ParallelPlan(tp=8, microbatch_size=2, attention="flash"))
    assert (
        flash
        == activation_bytes_per_layer(**options, recompute="selective") + 4 * 16 * 1024 * 2 / 8
    )


def test_activation_bytes_depend_on_itemsize() -> None:
    """Compare 32-bit with 16-bit training in closed forms, simulations and `peak_memory`."""
    cluster = make_cluster(1, itemsize=4)
    for changes in (
        {},
        {"recompute": "full"},
        {"schedule": "zb_h1"},
        {"tp": 2, "pp": 4, "sequence_parallel": True},
    ):
        choice = ParallelPlan(**({"pp": 8, "microbatches": 8, "attention": "flash"} | changes))  # type: ignore[arg-type]
        model = replace(SMALL, layers=16)
        half, full = (
            estimate_step(model, c, choice, closed_form_only=True).memory
            for c in (make_cluster(1), cluster)
        )
        assert full == peak_memory(model, cluster, choice)
        assert 1.1 < full.activations / half.activations <= 2  # logits always have 32 bits
        program = estimate_step(model, cluster, choice).memory
        assert full.activations == pytest.approx(program.activations, rel=0.02)
        assert full.weights == program.weights == 2 * half.weights


def test_plan_that_fits_only_in_closed_form_is_replaced() -> None:
    """In the simulation, rank 0 needs a little more memory than in the closed form."""
    model = TransformerSpec(layers=32, hidden=6144, heads=48, vocab=128256, sequence=4096)
    options: dict[str, Any] = {
        "schedules": "interleaved",
        "pp": 2,
        "tp": 1,
        "microbatch_size": 1,
        "zero": 1,
        "stages_per_rank": 4,
    }
    options["recompute"] = "selective"
    large_node = make_cluster(1, memory="1TB")
    closed, exact = (
        plan(model, large_node, 64, top=1, closed_form_only=c, **options)[0] for c in (True, False)
    )
    assert closed.memory.total < exact.memory.total
    between = make_cluster(1, memory=(closed.memory.total + exact.memory.total) / 2)
    with pytest.raises(UsageError, match="none of 1 plans fits"):
        plan(model, between, 64, **options)
    plans_found = plan(
        model,
        between,
        64,
        **(options | {"microbatch_size": (1, 2), "recompute": None, "stages_per_rank": (2, 4, 8)}),
    )
    assert plans_found and all(estimate.fits for estimate in plans_found)


def test_model_state_memory_matches_zero_paper() -> None:
    """Compare with arXiv 1910.02054, table 1: shards of 1/d, and a few unsharded stages.

    With 96 stages per rank, the weights of two stages are unsharded, one of them with the
    embedding, and the gradients of one stage.
    """
    model = TransformerSpec(layers=96, hidden=1024, heads=16, vocab=1024, sequence=1024)
    numbers, largest_stage_params = model.params, count_layer_params(model)[0] + 2048 * 1024
    for zero in range(4):
        v, schedule = (96, "looped_bfs") if zero > 1 else (1, "one_f_one_b")
        memory = peak_memory(
            model,
            make_cluster(2),
            ParallelPlan(dp=16, stages_per_rank=v, microbatches=1, zero=zero, schedule=schedule),
        )
        expected = zero_model_states(2 * numbers, 2 * numbers, 12 * numbers, zero=zero, dp=16)
        assert memory.optimizer == pytest.approx(expected.optimizer)
        assert memory.weights == pytest.approx(
            expected.params
            + (zero == 3) * 2 * (largest_stage_params + count_layer_params(model)[0])
        )
        assert memory.gradients == pytest.approx(
            expected.grads + (zero >= 2) * 2 * largest_stage_params
        )


def test_parameter_counts_sum_to_model() -> None:
    for model in (SMALL, replace(SMALL, kv_heads=4, gated=True, ffn=2048, tied=False)):
        common, experts = count_layer_params(model)
        table, norm, matrix = count_end_params(model)
        end_params = table + norm + (0 if model.tied else matrix)
        assert model.layers * (common + experts) + end_params == model.params


def test_tensor_parallel_across_nodes_warns() -> None:
    with pytest.warns(UserWarning, match="tp 16 is more than the 8 GPUs of a node"):
        plans_found = plan(SMALL, make_cluster(2), 16, tp=16, closed_form_only=True)
    assert plans_found[0].tp == 16
    with pytest.warns(
        UserWarning, match="tp 16 is more than the 8 GPUs of a node"
    ) as warning_records:
        estimate_step(SMALL, make_cluster(2), ParallelPlan(tp=16), closed_form_only=True)
    assert warning_records[0].filename == __file__
    with pytest.raises(UsageError, match="no plan with tp 16 uses all 8 GPUs"):
        plan(SMALL, make_cluster(1), 16, tp=16)
    assert (
        max(
            estimate.tp
            for estimate in plan(SMALL, make_cluster(2), 16, top=5000, closed_form_only=True)
        )
        == 8
    )


def test_plan_over_memory_is_still_estimated() -> None:
    cluster = make_cluster(1, memory="2GB")
    choice = ParallelPlan(pp=4, tp=2, microbatches=8)
    estimate = estimate_step(SMALL, cluster, choice, closed_form_only=True)
    assert not estimate.fits and estimate.bottleneck == "memory"
    assert "more than a GPU has" in estimate.explanation
    with_memory = estimate_step(SMALL, make_cluster(1), choice, closed_form_only=True)
    assert with_memory.bottleneck in estimate.breakdown._fields


def test_requested_stages_on_one_rank_are_planned() -> None:
    for zero in (0, 1):
        options: dict[str, Any] = {
            "pp": 1,
            "tp": 1,
            "stages_per_rank": 12,
            "schedules": "interleaved",
            "zero": zero,
        }
        plans_found = plan(SMALL, make_cluster(), 32, closed_form_only=True, **options)
        assert {
            (estimate.pp, estimate.stages_per_rank, estimate.zero) for estimate in plans_found
        } == {(1, 12, zero)}


def test_link_times_match_process_mesh() -> None:
    """Compare with `Cluster.send_time` and `Cluster.all_reduce_time` for the actual processes."""
    for t, p, d, order in product((1, 2, 4), (2, 3, 4), (1, 2, 3), ("tp-pp-dp", "tp-dp-pp")):
        choice = ParallelPlan(pp=p, tp=t, dp=d, rank_order=order)  # type: ignore[arg-type]
        strides = (p * t, t) if order == "tp-pp-dp" else (t, d * t)
        for coordinates in np.ndindex(d, p, t):
            assert (
                build_process_mesh(choice)[coordinates]
                == coordinates[0] * strides[0] + coordinates[1] * strides[1] + coordinates[2]
            )
        mesh, cluster, plans = (
            build_process_mesh(choice),
            make_cluster(12, gpus_per_node=4),
            PlanColumns.from_plan(choice),
        )
        placed = place_plans_on_nodes(cluster, plans)
        size = 2.0 * 1024 * 1024 / t  # each tensor-parallel rank sends 1/t of the boundary
        path = 0.0
        for rank in range(p - 1):
            pairs = zip(mesh[:, rank].flat, mesh[:, rank + 1].flat, strict=True)
            path += max(cluster.send_time(size, int(a), int(b)) for a, b in pairs)
        sequence_parallel_plans = replace(plans, sequence_parallel=np.array([1]))
        assert compute_link_times(
            SMALL, cluster, sequence_parallel_plans, placed
        ).neighbors.item() == pytest.approx(path)
        groups = mesh.reshape(d, -1).T
        ring = build_replica_rings(cluster, plans, placed)[0]
        expected = max(cluster.all_gather_time(1e9, group) for group in groups)
        assert ring.compute_gather_time(np.array([[1e9]])).item() == pytest.approx(expected)


def test_simplest_of_equal_plans_is_first() -> None:
    """Without a pipeline, split backwards have no advantage, so plans without them come first."""
    options: dict[str, Any] = {
        "pp": 1,
        "tp": 1,
        "stages_per_rank": 1,
        "microbatch_size": 1,
        "zero": 0,
        "attention": "flash",
    }
    plans_found = plan(
        SMALL,
        make_cluster(),
        8,
        schedules=("zb_h1", "one_f_one_b"),
        recompute=("full", "none"),
        **options,
    )
    assert len({f"{estimate.step_time:.6g}" for estimate in plans_found}) < len(plans_found)
    best = plans_found[0]
    assert (best.schedule, best.recompute) == ("one_f_one_b", "none")
    times = [
        (float(f"{estimate.step_time:.6g}"), [*SCHEDULE_FORMULAS].index(estimate.schedule))
        for estimate in plans_found
    ]
    assert times == sorted(times)
