"""Tests of exact estimates of the planner: a plan's program, its breakdown and its division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import Cluster, Costs, compile, planner, simulate
from schedir.errors import UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.planner.estimate import closed_form
from schedir.planner.estimate.instruction_costs import (
    compute_costs,
    compute_stage_times,
    time_joined_pair,
)
from schedir.planner.estimate.simulated_estimate import simulate_plan
from schedir.planner.parallel_plan import PhaseTimes, StageTimes
from schedir.planner.plan_columns import PlanColumns
from schedir.planner.plan_compilation import build_pipeline_shape, plan_program
from schedir.planner.schedule_improvement import improve_schedule
from schedir.planner.transformer.layer_division_search import (
    balance_layers,
    optimize_layer_division,
)
from schedir.planner.transformer.memory_estimate import ADAM, count_layer_params
from schedir.predict.layer_activation_bytes import Recompute
from schedir.schedules.schedule_algebra import B, F, overlapped_pair

MODEL = planner.TransformerSpec(layers=12, hidden=768, heads=12, vocab=8192, sequence=512)
NODE = Cluster(nodes=1, gpus_per_node=8, flops=250e12, memory=80e9, hbm_bandwidth=1.7e12,
               nvlink_bandwidth=230e9, network_bandwidth=25e9, latency=5e-6,
               kernel_us=2)  # fmt: skip
SCHEDULES = {"one_f_one_b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}


def resize_node(gpus: int, **changes: Any) -> Cluster:
    return replace(NODE, gpus_per_node=gpus, **changes)


@st.composite
def plans_with_models(draw: st.DrawFn) -> tuple[planner.ParallelPlan, planner.TransformerSpec]:
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    p, t, d = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    v = SCHEDULES[schedule]
    v = draw(st.sampled_from([2, 3])) if schedule == "interleaved" else v
    m = p * draw(st.integers(2, 4))
    recompute = draw(st.sampled_from(get_args(Recompute)))
    zero = draw(st.integers(0, 3))
    cut_too = draw(st.booleans()) and t > 1
    stages = p * v
    layers = np.array(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    b = draw(st.sampled_from([1, 2]))
    choice = planner.ParallelPlan(pp=p, tp=t, dp=d, stages_per_rank=v, microbatch_size=b,
                                  microbatches=m, schedule=schedule, zero=zero,
                            recompute=recompute, sequence_parallel=cut_too,
                            layers_per_stage=tuple(layers.tolist()))  # fmt: skip
    return choice, replace(MODEL, layers=int(layers.sum()), tied=draw(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(plans_with_models())
def test_breakdown_sums_to_step_and_work_bounds_it(
    case: tuple[planner.ParallelPlan, planner.TransformerSpec],
) -> None:
    choice, model = case
    node = resize_node(choice.gpus)
    estimate = simulate_plan(model, node, choice)
    assert estimate.is_simulated
    assert sum(estimate.breakdown) == pytest.approx(estimate.step_time, rel=1e-9)
    assert min(estimate.breakdown) >= 0
    # The step takes at least the compute of the busiest rank.
    times = compute_stage_times(model, node, choice)
    stages_by_rank = plan_program(choice, tied_weights=model.tied).shape.stages_on_rank
    work = [
        sum(sum(times[s].total) for s in stages) * choice.microbatches for stages in stages_by_rank
    ]
    assert estimate.step_time >= max(work) * (1 - 1e-9)
    busy = (
        estimate.breakdown.compute
        + estimate.breakdown.recompute
        + estimate.breakdown.layer_collectives
    )
    assert min(abs(busy - rank_work) for rank_work in work) <= 1e-9 * busy


def make_uniform_plan(
    p: int, m: int, **plan_fields: Any
) -> tuple[planner.TransformerSpec, Cluster, planner.ParallelPlan]:
    """Return a plan whose stages all take equal time, and whose messages take no time."""
    free_network = resize_node(p, nvlink_bandwidth=1e30, network_bandwidth=1e30, latency=0.0)
    model = planner.TransformerSpec(layers=2 * p, hidden=256, heads=4, vocab=1, sequence=64)
    return model, free_network, planner.ParallelPlan(pp=p, microbatches=m, **plan_fields)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 13), (8, 32)])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_balanced_stages_match_closed_formula(
    monkeypatch: pytest.MonkeyPatch, p: int, m: int, schedule: str, recompute: str
) -> None:
    """The time is (m + p - 1)(F + B) as in SC21, section 2.2.1, with recomputation in B."""
    model, free_network, choice = make_uniform_plan(p, m, schedule=schedule, recompute=recompute)
    inner = planner.stage_time(model, free_network, choice, 2)
    monkeypatch.setattr(
        import_module("schedir.planner.estimate.instruction_costs"),
        "stage_time",
        lambda *args: inner,
    )
    estimate = simulate_plan(model, free_network, choice)
    microbatch_time = sum(inner.total)
    step = estimate.breakdown.optimizer + estimate.breakdown.data_parallel
    assert estimate.step_time - step == pytest.approx((m + p - 1) * microbatch_time, rel=1e-12)
    assert estimate.breakdown.bubble == pytest.approx((p - 1) * microbatch_time, rel=1e-9)
    assert estimate.breakdown.transfers == 0
    assert estimate.breakdown.recompute == pytest.approx(m * inner.compute.R, rel=1e-12)


def compositions(total: int, parts: int, min_parts: list[int]) -> Iterator[tuple[int, ...]]:
    for division in product(*(range(low, total + 1) for low in min_parts)):
        if sum(division) == total and len(division) == parts:
            yield division


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_balance_layers_is_optimal(data: st.DataObject) -> None:
    ranks, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    number = st.one_of(st.integers(0, 9).map(float), st.just(np.inf))
    row = st.lists(number, min_size=layers + 1, max_size=layers + 1)
    seconds = np.array(data.draw(st.lists(row, min_size=ranks, max_size=ranks)))
    best = min(
        max(seconds[r, n] for r, n in enumerate(division))
        for division in compositions(layers, ranks, [0] * ranks)
    )
    if np.isinf(best):
        with pytest.raises(UsageError):
            balance_layers(seconds)
        return
    balanced = balance_layers(seconds)
    assert sum(balanced) == layers
    assert max(seconds[r, n] for r, n in enumerate(balanced)) == best


@pytest.mark.parametrize(("p", "v", "schedule", "layers"), [
    (3, 1, "one_f_one_b", 6), (2, 2, "interleaved", 8), (2, 2, "zb_v", 7), (4, 1, "zb_h1", 7),
])  # fmt: skip
def test_layer_division_is_near_best_division(p: int, v: int, schedule: str, layers: int) -> None:
    """No division of a small model is more than 2 % faster than the chosen one.

    All divisions are simulated. The head takes as long as some layers.
    """
    model = planner.TransformerSpec(layers=layers, hidden=512, heads=8, vocab=16384, sequence=256)
    choice = planner.ParallelPlan(pp=p, stages_per_rank=v, microbatches=4 * p, schedule=schedule)
    stages = p * v
    min_layers = [0, *[1] * (stages - 2), 0]
    steps = {
        division: simulate_plan(
            model, resize_node(p), replace(choice, layers_per_stage=division)
        ).step_time
        for division in compositions(layers, stages, min_layers)
        if max(division) - min(division) <= 4
    }
    best_division = optimize_layer_division(model, resize_node(p), choice)
    assert steps[best_division] <= min(steps.values()) * 1.02
    if layers % stages == 0:
        assert steps[best_division] <= steps[(layers // stages,) * stages]


def test_layer_division_respects_memory() -> None:
    """The first rank of 1F1B needs most memory, and with less memory it gets fewer layers."""
    model = planner.TransformerSpec(layers=12, hidden=2048, heads=16, vocab=1024, sequence=2048)
    choice = planner.ParallelPlan(pp=4, microbatches=16, microbatch_size=4)
    wide = optimize_layer_division(model, resize_node(4), choice)
    fullest = simulate_plan(
        model, resize_node(4), replace(choice, layers_per_stage=wide)
    ).memory.total
    small_memory = resize_node(4, memory=0.95 * fullest)
    estimate = simulate_plan(
        model,
        small_memory,
        replace(choice, layers_per_stage=optimize_layer_division(model, small_memory, choice)),
    )
    assert estimate.fits and estimate.layers_per_stage[0] < wide[0]
    with pytest.raises(UsageError):
        optimize_layer_division(model, resize_node(4, memory="1MB"), choice)


# ---------------------------------------------------------------- a shorter schedule from a search


def test_improved_schedule_fits_memory() -> None:
    choice = planner.ParallelPlan(
        pp=2,
        stages_per_rank=2,
        dp=2,
        microbatches=8,
        schedule="interleaved",
        zero=1,
        recompute="full",
    )
    unimproved = simulate_plan(MODEL, resize_node(choice.gpus), choice)
    tight = resize_node(choice.gpus, memory=1.02 * unimproved.memory.total)
    improved = improve_schedule(MODEL, tight, choice, time_limit=60, max_evaluations=40)
    estimate = improved.estimate
    assert estimate.step_time <= unimproved.step_time
    assert improved.lower_bound <= estimate.step_time and estimate.fits
    assert sum(estimate.breakdown) == pytest.approx(estimate.step_time, rel=1e-9)
    assert (estimate.pp, estimate.microbatches, estimate.zero) == (
        choice.pp,
        choice.microbatches,
        choice.zero,
    )
    run = simulate(improved.program)  # checked, with all options of the plan
    assert (run.program.dp, run.program.zero) == (choice.dp, choice.zero)


MIXED = planner.TransformerSpec(layers=16, hidden=2048, heads=16, kv_heads=8, vocab=32000,
                                sequence=2048,
                      ffn=4096, gated=True, experts=8, active=2, tied=False)  # fmt: skip
DENSE = planner.TransformerSpec(layers=16, hidden=4096, heads=32, vocab=32000, sequence=2048)


@pytest.mark.parametrize(("model", "choice"), [
    (DENSE, planner.ParallelPlan(pp=4, tp=2, dp=2, microbatches=16, recompute="full")),
    (DENSE, planner.ParallelPlan(pp=4, tp=2, dp=4, microbatches=16, rank_order="tp-dp-pp", zero=1,
                                 sequence_parallel=True)),
    (DENSE, planner.ParallelPlan(pp=2, tp=2, dp=2, cp=2, stages_per_rank=2, microbatches=16,
                                 schedule="interleaved", zero=1)),
    (MIXED, planner.ParallelPlan(pp=2, tp=2, dp=4, ep=4, microbatches=16)),
    (MIXED, planner.ParallelPlan(pp=2, tp=2, dp=4, ep=2, stages_per_rank=2, microbatches=16,
                                 schedule="interleaved", zero=1)),
    (MIXED, planner.ParallelPlan(pp=1, dp=8, ep=4, stages_per_rank=4, microbatches=4,
                                 schedule="looped_bfs", zero=3)),
])  # fmt: skip
def test_simulation_is_near_closed_form(
    model: planner.TransformerSpec, choice: planner.ParallelPlan
) -> None:
    """The simulation and the closed form are independent, and give nearly the same numbers."""
    node = replace(resize_node(4), nodes=choice.gpus // 4)
    simulated = simulate_plan(model, node, choice)
    closed_form = planner.estimate_step(model, node, choice, closed_form_only=True)
    assert simulated.step_time == pytest.approx(closed_form.step_time, rel=0.05)
    assert simulated.memory.total == pytest.approx(closed_form.memory.total, rel=0.05)
    assert simulated.breakdown.data_parallel == pytest.approx(
        closed_form.breakdown.data_parallel, abs=0.05 * simulated.step_time
    )
    assert simulated.breakdown.optimizer == pytest.approx(
        closed_form.breakdown.optimizer, rel=0.02, abs=1e-4
    )


@pytest.mark.parametrize(("model", "e"), [(DENSE, 1), (MIXED, 1), (MIXED, 2)])
@pytest.mark.parametrize("zero", [0, 1])
def test_sequence_parallel_gradient_sum_costs(
    model: planner.TransformerSpec, zero: int, e: int
) -> None:
    """The sum of gradients over tensor-parallel ranks costs the time of an all-reduce.

    Its bytes are those of weights that the ranks do not divide. The closed form has the same
    costs, and without sequence parallelism there are none.
    """
    choice = planner.ParallelPlan(pp=2, tp=4, dp=2, stages_per_rank=2, microbatches=4,
                                  schedule="interleaved", zero=zero,
                            sequence_parallel=True, ep=e)  # fmt: skip
    nodes = replace(resize_node(8), nodes=2)
    undivided, two = (np.array(count_layer_params(model, t, e)) for t in (1, 2))
    full_params, of_experts = (2 * two - undivided) * model.layers / 4
    # Experts are divided among e times fewer replicas.
    full_params += of_experts * (e if zero else 1)
    numbers = [
        full_params + model.position_params,
        full_params,
        full_params,
        full_params + 2 * model.hidden,
    ]

    def compute_plan_costs(choice: planner.ParallelPlan) -> Costs:
        times = compute_stage_times(model, nodes, choice)
        return compute_costs(
            model, nodes, choice, build_pipeline_shape(choice), times, planner.SoftwareConstants()
        )

    sizes = [2 * number / (2 if zero else 1) for number in numbers]
    ring = [nodes.all_reduce_time(size, 4) for size in sizes]
    tree = [nodes.small_all_reduce_time(size, 4) for size in sizes]
    sum_costs: Any = compute_plan_costs(choice).reduce_sequence_parallel_grads
    assert sum_costs == pytest.approx(tuple(map(min, ring, tree)), rel=1e-9)
    assert (
        compute_plan_costs(replace(choice, sequence_parallel=False)).reduce_sequence_parallel_grads
        is None
    )
    assert (
        Opcode.ReduceSequenceParallelGrads
        in plan_program(choice, tied_weights=model.tied).used_opcodes
    )
    plans = PlanColumns.from_plan(choice)
    closed_form_times = closed_form._estimate_sequence_sums(
        model, nodes, plans, plans.compute_shares(model), ADAM
    )
    assert closed_form_times == pytest.approx(
        [max(sum_costs[0] + sum_costs[2], sum_costs[1] + sum_costs[3])], rel=1e-9
    )


@pytest.mark.parametrize("sent", [0.1, 0.5, 2.0])
def test_overlapped_pair_time_matches_segment_program(sent: float) -> None:
    """The pair takes the span of a program without its first forward and its last backward."""
    layers = 3
    segments = 2 * layers + 1
    program = compile(
        lambda *_: F + overlapped_pair(F, B) + B, ranks=1, microbatches=2, dp=2, ep=2,
        stage_segments="dc" * layers,
    )  # fmt: skip
    span = simulate(program, Costs(F=1, B=2, dispatch=sent, combine=sent)).span
    total = 2 * layers * sent
    times = StageTimes(
        PhaseTimes(F=segments, I=segments, W=segments),
        *[PhaseTimes(F=total, I=total)] * 2,
    )
    pair = time_joined_pair(times, layers, 3 * segments + 2 * total)
    assert pair == pytest.approx(span - (segments + total) - (2 * segments + total))
    assert pair >= max(3 * segments, 2 * total)


def test_only_overlapped_pairs_hide_all_to_alls() -> None:
    nodes = replace(resize_node(8), nodes=2)
    zb_v, dualpipe_v = (
        planner.simulate_plan(
            MIXED,
            nodes,
            planner.ParallelPlan(
                pp=2, dp=8, ep=4, microbatches=16, stages_per_rank=2, schedule=schedule
            ),
        )
        for schedule in ("zb_v", "dualpipe_v")
    )
    for estimate in (zb_v, dualpipe_v):
        assert sum(estimate.breakdown) == pytest.approx(estimate.step_time)
    assert dualpipe_v.breakdown.compute == pytest.approx(zb_v.breakdown.compute, rel=0.02)
    assert dualpipe_v.breakdown.layer_collectives < 0.7 * zb_v.breakdown.layer_collectives
