"""Tests of optimizer steps on the host, with copies of gradients to it and of weights back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import schedir
from schedir import Cluster, Costs, PipelineShape, Program, Sizes
from schedir.analysis.progress_models import MODELS
from schedir.errors import (
    DeadlockError,
    MemoryLimitError,
    OrderError,
    SchedirError,
    ShapeError,
    UsageError,
)
from schedir.ir.isa.instructions import Opcode
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.schedules import (
    dualpipe,
    forward_only,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream_2bw,
)
from schedir.schedules.schedule_algebra import B, F
from schedir.testing.strategies import random_compute_program

HOST_OPS = (Opcode.OffloadGrads, Opcode.HostOptimizerStep, Opcode.ReloadWeights)
SHAPE = PipelineShape(2, 4, 3)


def compile_host_steps(
    schedule: Any = interleaved, shape: PipelineShape = SHAPE, **options: Any
) -> Program:
    return schedir.compile(schedule, shape, optimizer_placement="cpu_step", **options)


def list_host_instructions(program: Program, rank: int) -> list[str]:
    return [str(i) for i in program.streams[rank] if i.op in HOST_OPS]


# ---------------------------------------------------------------- positions of instructions


def test_gradients_are_offloaded_after_their_last_reduction() -> None:
    stream = [str(i) for i in compile_host_steps(clip_grad_norm=True).streams[1]]
    for s in (5, 3, 1):
        assert stream[stream.index(f"reduce_grads {s}") + 1] == f"offload_grads {s}"
    steps = [f"host_step {s}" for s in (5, 3, 1)]
    assert stream[-8:] == [
        "reduce_norm",
        *steps,
        *(f"reload_weights {s}" for s in (5, 3, 1)),
        "step",
    ]
    option_sets: list[dict[str, Any]] = [{"dp": 2}, {"dp": 2, "zero": 1}]
    for options in option_sets:  # gradients are reduced at the end of the update
        stream = [str(i) for i in compile_host_steps(**options).streams[1]]
        assert [i.split()[0] for i in stream[-10:-1]] == [
            *["offload_grads"] * 3, *["host_step"] * 3, *["reload_weights"] * 3,
        ]  # fmt: skip
    stream = [str(i) for i in compile_host_steps(tied_weights=True).streams[1]]
    assert stream[-9:-6] == ["reduce_tied 5", "offload_grads 5", "host_step 3"]


def test_frozen_and_forward_only_stages_have_no_host_step() -> None:
    assert len(list_host_instructions(compile_host_steps(frozen_stages=3), 0)) == 3
    assert not compile_host_steps(forward_only, PipelineShape(2, 4)).used_opcodes & {*HOST_OPS}
    # Each rank with a replica of a stage has its optimizer state.
    mirror = compile_host_steps(dualpipe, PipelineShape(2, 4, placement="mirror"))
    assert len(list_host_instructions(mirror, 0)) == len(list_host_instructions(mirror, 1)) == 6


# ---------------------------------------------------------------- refusals


def test_early_gradient_offload_deadlocks_blocking_hosts() -> None:
    """A blocking host waits for all earlier reductions before it copies a gradient.

    The other rank needs a message before it issues its side of the reduction. If rank 1 sends
    the message after the copy, the ranks deadlock.
    """
    program = compile_host_steps(dualpipe, PipelineShape(2, 4, placement="mirror"))
    head, rank_1 = schedir.to_text(program, folded=False).split("rank 1", 1)
    reduction, offload, message = (
        "  reduce_replicated_stages 1\n",
        "  offload_grads 1\n",
        "  send_grad 1.0\n",
    )
    assert all(rank_1.count(line) == 1 for line in (reduction, offload, message))
    rank_1 = rank_1.replace(message, "").replace(reduction, reduction + message)
    schedir.check(schedir.from_text(f"{head}rank 1{rank_1}"), blocking_hosts=True)
    rank_1 = rank_1.replace(offload, "").replace(message, offload + message)
    early_offload = schedir.from_text(f"{head}rank 1{rank_1}")
    schedir.check(early_offload)
    with pytest.raises(DeadlockError):
        schedir.check(early_offload, blocking_hosts=True)


def test_conflicting_options_are_refused() -> None:
    with pytest.raises(OrderError, match="needs the weights"):  # the updates have no delay
        compile_host_steps(one_f_one_b, PipelineShape(2, 4, optimizer_steps=2))
    with pytest.raises(ShapeError, match="norm_check='after_step'"):
        compile_host_steps(clip_grad_norm=True, norm_check="after_step")
    with pytest.raises(UsageError, match="but optimizer_placement is 'cpu_step'"):
        compile_host_steps(optimizer_device_buffers=2)


# ---------------------------------------------------------------- bytes and time


@pytest.mark.parametrize("zero", range(4))
def test_optimizer_memory_is_on_host(zero: int) -> None:
    """The host has the optimizer state, gradients and weights, or shards of them.

    The device never has optimizer state.
    """
    dp, sizes = 2, Sizes(optimizer=(8, 16, 24, 32, 40, 48), params=2, grads=4)
    options: dict[str, Any] = {"dp": dp, "zero": zero, "unsharded_stages": 3 if zero == 3 else None}
    run = schedir.simulate(compile_host_steps(**options), Costs(), sizes=sizes)
    for rank, curve in enumerate(run.memory_on("host")):
        expected = sum(8 * (s + 1) + 2 + 4 for s in range(rank, 6, 2))
        assert (curve.total == expected / (dp if zero else 1)).all()
    for curve in run.memory:
        assert not {"optimizer", "sharded optimizer state"} & curve.by_kind.keys()
        assert not curve.by_kind["state"].any()


def test_host_memory_limit_counts_optimizer_state() -> None:
    sizes = Sizes(saved=10, optimizer=100, params=10, grads=10)
    shape = PipelineShape(2, 4, 4)
    compile_host_steps(shape=shape, sizes=sizes, host_memory_limit=480, memory_limit=170)
    with pytest.raises(
        MemoryLimitError, match=r'(?s)480 B on the host.*optimizer_placement="device"'
    ):
        compile_host_steps(shape=shape, sizes=sizes, host_memory_limit=479)


@pytest.mark.parametrize("times", [(1, 1, 1), (0.5, 3, 0.25), (2, 0.5, 1)])
def test_step_is_pipeline_of_offload_step_and_reload(times: tuple[float, float, float]) -> None:
    """The host steps no stage before all gradients are copied, because one may not be finite."""
    offload, step, reload = times
    costs = Costs(F=0, B=0, offload_grads=offload, host_step=step, reload_weights=reload)
    span = schedir.simulate(compile_host_steps(looped_bfs, PipelineShape(1, 2, 3)), costs).span
    assert span == pytest.approx(3 * offload + step + reload + 2 * max(step, reload))


def test_gradient_offload_and_host_step_overlap_compute() -> None:
    costs = Costs(F=1, B=2, offload_grads=1, host_step=1, reload_weights=0.5)
    program = compile_host_steps(looped_bfs, PipelineShape(1, 4, 4))
    span_without_host = schedir.simulate(
        schedir.compile(looped_bfs, PipelineShape(1, 4, 4)), costs
    ).span
    assert schedir.simulate(program, costs).span == span_without_host + 1 + 4 + 0.5
    shape = PipelineShape(4, 8)  # the host of the last rank steps while the first rank computes
    spans = [
        schedir.simulate(
            schedir.compile(one_f_one_b, shape, optimizer_placement=states), costs
        ).span
        for states in ("device", "cpu_step")
    ]
    assert spans[1] == spans[0] + 1 + 1 + 0.5
    idle = sum_by_cause(idleness(schedir.simulate(program, costs)), 1)
    assert idle[0, IdleCause.STEP] == 4 and idle[0, IdleCause.OFFLOAD] == 1.5


def test_cluster_computes_host_step_costs() -> None:
    fields: dict[str, Any] = {
        "nodes": 1, "gpus_per_node": 4, "flops": 1e15, "memory": "80GB", "hbm_bandwidth": "2TB/s",
        "nvlink_bandwidth": "300GB/s", "network_bandwidth": "25GB/s", "host_bandwidth": "20GB/s",
    }  # fmt: skip
    node = Cluster(**fields | {"dram_bandwidth": "100GB/s"})
    sizes = Sizes(activation=1, params=2e9, grads=4e9, optimizer=12e9)
    costs, shape = Costs(F=1, B=2), PipelineShape(2, 4)
    for zero, replicas in ((0, 1), (1, 2)):
        filled = node.fill_costs(
            shape, sizes, costs, dp=2, zero=zero, optimizer_placement="cpu_step"
        )
        assert filled.offload_grads == pytest.approx(4e9 / 20e9 / replicas)
        assert filled.reload_weights == pytest.approx(2e9 / 20e9 / replicas)
        assert filled.host_step == pytest.approx((2 * 2e9 + 4e9 + 2 * 12e9) / 100e9 / replicas)
        assert filled.step == 0 and filled.reload_state is None
    with pytest.raises(UsageError, match="the cluster has no dram_bandwidth"):
        Cluster(**fields).fill_costs(shape, sizes, costs, dp=2, optimizer_placement="cpu_step")
    assert (
        Cluster(**fields)
        .fill_costs(shape, sizes, costs, dp=2, optimizer_placement="host")
        .host_step
        is None
    )


# ---------------------------------------------------------------- several updates


def compile_delayed_updates(P: int = 2, n: int = 3, updates: int = 3, **options: Any) -> Program:
    """Return a program in which the host step of an update overlaps the next update."""
    return compile_host_steps(
        pipedream_2bw,
        PipelineShape(P, n * updates, optimizer_steps=updates, weight_delay=1),
        **options,
    )


def test_host_step_overlaps_next_update() -> None:
    last_rank = [
        i
        for i in map(str, compile_delayed_updates(clip_grad_norm=True).streams[1])
        if i[:4] not in ("recv", "send")
    ]
    check_position = last_rank.index("check_grads_finite")
    assert last_rank[check_position - 3 : check_position + 3] == [
        "reduce_grads 1", "offload_grads 1", "reduce_norm", "check_grads_finite", "host_step 1",
        "F 1.3",
    ]  # fmt: skip
    step_position = last_rank.index("step")
    assert last_rank[step_position - 3 : step_position + 2] == [
        "B 1.5", "reduce_grads 1.1", "reload_weights 1", "step", "offload_grads 1.1",
    ]  # fmt: skip
    first_rank = [
        str(i)
        for i in compile_delayed_updates(clip_grad_norm=True).streams[0]
        if str(i)[:4] not in ("recv", "send")
    ]
    # A forward of the third update precedes a B of the second update.
    step_position = first_rank.index("step")
    around_step = first_rank[step_position - 2 : step_position + 2]
    assert around_step == ["B 0.4", "reload_weights 0", "step", "F 0.6"]
    flush = compile_host_steps(
        lambda r, P, m: m // 2 * (2 * F + 2 * B), PipelineShape(1, 4, optimizer_steps=2)
    )
    assert [str(i) for i in flush.streams[0]][5:10] == [  # without a delay, compute waits
        "offload_grads 0", "check_grads_finite", "host_step 0", "reload_weights 0", "step",
    ]  # fmt: skip


@settings(max_examples=30)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(2, 3), st.integers(0, 2),
    st.integers(0, 2**32 - 1), st.booleans(), st.booleans(),
)  # fmt: skip
def test_host_steps_keep_legal_programs_of_updates_legal(
    P: int, v: int, each: int, updates: int, delay: int, seed: int, clip: bool, tied: bool
) -> None:
    shape = PipelineShape(P, each * updates, v, optimizer_steps=updates, weight_delay=delay)
    draft = random_compute_program(shape, random.Random(seed))
    options: dict[str, Any] = {"clip_grad_norm": clip, "tied_weights": tied and shape.stages > 1}
    try:
        plain = schedir.compile(draft, shape, **options)
    except SchedirError:
        assume(False)
    program = compile_host_steps(draft, shape, **options)
    for model in MODELS:
        try:
            schedir.check(plain, model, blocking_hosts=True)
        except SchedirError:  # with a single queue, ranks wait for each other's collectives
            continue
        schedir.check(program, model, blocking_hosts=True)
    assert schedir.from_text(schedir.to_text(program)) == program
    is_added = np.isin(program.op, (*HOST_OPS, Opcode.CheckGradsFinite))
    is_no_step = program.op[~is_added] != Opcode.OptimizerStep
    words = program.words[~is_added][is_no_step]
    assert (words == plain.words[plain.op != Opcode.OptimizerStep]).all()


def test_host_step_is_hidden_by_next_update() -> None:
    """All host steps except the last are hidden, if they are shorter than the next update."""
    updates, n = 6, 8
    costs = Costs(F=1, B=2, offload_grads=0.25, reload_weights=0.25)
    for host in (0, 4, 12, 20, 30):
        span = schedir.simulate(
            compile_delayed_updates(1, n, updates), replace(costs, host_step=host)
        ).span
        # An update takes the time of its compute, or of its host step and copies.
        update_time = max(n * 3, host + 0.5)
        copies = (updates - 1) * 0.25 * (host + 0.25 <= n * 3)  # compute waits for these copies
        first_update = n * 3 + 0.25 + host + 0.25
        assert span == pytest.approx(first_update + (updates - 1) * update_time + copies), host


@pytest.mark.parametrize("states", ["host", "disk"])
def test_device_steps_refuse_several_updates(states: str) -> None:
    with pytest.raises(ShapeError, match="optimizer_steps=1, not 2") as caught:
        schedir.compile(
            pipedream_2bw,
            PipelineShape(2, 4, optimizer_steps=2, weight_delay=1),
            optimizer_placement=states,
        )
    assert "'cpu_step'" in caught.value.hint
