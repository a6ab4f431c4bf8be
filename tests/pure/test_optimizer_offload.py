"""Tests of programs with optimizer states on the host or disk, or with steps on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedir
from schedir import Costs, PipelineShape, Program, Sizes
from schedir.analysis.memory.footprint import compute_footprints
from schedir.analysis.progress_models import MODELS
from schedir.errors import (
    MemoryLimitError,
    ShapeError,
    UsageError,
)
from schedir.ir.isa.instructions import TIERS, Opcode
from schedir.schedules import dualpipe, forward_only, gpipe, interleaved, looped_bfs, one_f_one_b
from schedir.testing import shapes
from schedir.testing.strategies import random_compute_program
from tests.cases import each_value, pairs

STATE_OPS = (Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
DISK_OPS = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
# Placement -> the instructions of each stage.
STAGE_OPS = {
    "host": STATE_OPS,
    "disk": (*STATE_OPS, *DISK_OPS),
    "cpu_step": (Opcode.OffloadGrads, Opcode.HostOptimizerStep, Opcode.ReloadWeights),
}


SHAPE = PipelineShape(2, 4, 3)


def compile_on_host(
    schedule: Any = interleaved, shape: PipelineShape = SHAPE, **options: Any
) -> Program:
    return schedir.compile(schedule, shape, optimizer_placement="host", **options)


def select_buffers(placement: str, slots: int, rooms: int) -> dict[str, Any]:
    """Return the options of a placement, with numbers of buffers if it has buffers."""
    options: dict[str, Any] = {"optimizer_placement": placement}
    if placement != "cpu_step":
        options |= {"optimizer_device_buffers": slots}
    if placement == "disk":
        options |= {"optimizer_host_buffers": rooms}
    return options


def list_state_instructions(program: Program, rank: int) -> list[str]:
    return [str(i) for i in program.streams[rank] if i.op in STATE_OPS]


# ---------------------------------------------------------------- positions of instructions


def test_state_loads_run_ahead_by_slot_count() -> None:
    """Loads have the order of the reductions, and follow the store that frees their slot."""
    assert list_state_instructions(compile_on_host(), 1) == [
        "reload_state 5", "reload_state 3", "stage_step 5", "offload_state 5", "stage_step 3",
        "offload_state 3", "reload_state 1", "stage_step 1", "offload_state 1",
    ]  # fmt: skip
    alone = list_state_instructions(compile_on_host(optimizer_device_buffers=1), 1)
    assert alone == [f"{op} {s}" for s in (5, 3, 1) for op in STATE_OP_NAMES]
    assert {slots.specified()["state"] for slots in compile_on_host().slots} == {2}
    # With one slot per stage, no load waits.
    assert not compile_on_host(shape=PipelineShape(2, 4, 2)).slots


STATE_OP_NAMES = ("reload_state", "stage_step", "offload_state")


@pytest.mark.parametrize("placement", STAGE_OPS)
@settings(max_examples=30)
@given(
    shapes(), st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.booleans(),
    st.integers(0, 3), st.integers(1, 2),
)  # fmt: skip
def test_random_draft_moves_and_steps_each_state_once(
    placement: str, shape: PipelineShape, seed: int, slots: int, rooms: int, clip: bool, zero: int,
    dp: int,
) -> None:  # fmt: skip
    draft = random_compute_program(shape, random.Random(seed))
    options: dict[str, Any] = {
        "clip_grad_norm": clip,
        "zero": zero,
        "dp": dp,
        "tied_weights": shape.stages > 1,
    }
    placed_options = options | select_buffers(placement, slots, rooms)
    program = schedir.compile(draft, shape, **placed_options)
    for model in MODELS:
        schedir.check(program, model, blocking_hosts=True)
    assert schedir.from_text(schedir.to_text(program)) == program
    assert schedir.compile(draft, shape, **placed_options) == program
    for op in STAGE_OPS[placement]:
        assert np.count_nonzero(program.op == op) == shape.replica_ranks.size
    plain = schedir.compile(draft, shape, **options)
    assert program.digest != plain.digest
    added = np.isin(program.op, STAGE_OPS[placement])
    assert (program.words[~added] == plain.words).all()
    if placement == "disk":  # reads and writes change nothing else
        host = schedir.compile(draft, shape, **options | select_buffers("host", slots, rooms))
        assert (program.words[~np.isin(program.op, DISK_OPS)] == host.words).all()
        assert program.digest != host.digest


def test_frozen_or_evaluated_stage_loads_no_state() -> None:
    assert list_state_instructions(compile_on_host(frozen_stages=3), 0) == [
        f"{op} 4" for op in STATE_OP_NAMES
    ]
    assert not compile_on_host(forward_only, PipelineShape(2, 4)).used_opcodes & {*STATE_OPS}
    # Each stage replica has its own optimizer states.
    program = compile_on_host(dualpipe, PipelineShape(2, 4, placement="mirror"))
    assert len(list_state_instructions(program, 0)) == len(list_state_instructions(program, 1)) == 6


# ---------------------------------------------------------------- refusals


def test_incompatible_options_are_refused() -> None:
    with pytest.raises(ShapeError, match="optimizer_steps=1, not 2"):
        compile_on_host(one_f_one_b, PipelineShape(2, 4, optimizer_steps=2))
    with pytest.raises(ShapeError, match="norm_check='after_step'"):
        compile_on_host(clip_grad_norm=True, norm_check="after_step")
    with pytest.raises(ShapeError, match="'disk' or 'cpu_step'"):
        schedir.compile(gpipe, PipelineShape(2, 4), optimizer_placement="nvme")
    with pytest.raises(ShapeError, match="optimizer_device_buffers"):
        compile_on_host(optimizer_device_buffers=0)
    with pytest.raises(
        UsageError, match="optimizer of a stage is not on the device: it is on the host"
    ):
        compute_footprints(compile_on_host(), Sizes(model_states=10))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(("zero", "slots"), each_value(range(4), [1, 2, 3]))
def test_optimizer_bytes_on_host_and_device(zero: int, slots: int) -> None:
    """The host always holds the whole optimizer state, or a replica's shard.

    The device holds the states of as many stages as it has slots, while they are stepped.
    """
    dp, bytes_of = 2, (8, 16, 24, 32, 40, 48)
    sizes = Sizes(optimizer=bytes_of, params=2, grads=2)
    program = compile_on_host(
        dp=dp, zero=zero, optimizer_device_buffers=slots, unsharded_stages=3 if zero == 3 else None
    )
    costs = Costs(F=1, B=1, reload_state=2, stage_step=3, offload_state=2)
    run = schedir.simulate(program, costs, sizes=sizes)
    shards = dp if zero else 1
    for rank, curve in enumerate(run.memory_on("host")):
        rank_bytes = sum(bytes_of[s] for s in range(rank, 6, 2))
        assert (curve.total == rank_bytes / shards).all()
    for rank, curve in enumerate(run.memory):
        assert "optimizer" not in curve.by_kind
        shard_bytes = [bytes_of[s] / shards for s in (4 + rank, 2 + rank, rank)]
        peak_bytes = max(sum(shard_bytes[k : k + slots]) for k in range(3))
        assert curve.by_kind["state"].max() == peak_bytes
        assert curve.by_kind["state"][0] == curve.by_kind["state"][-1] == 0
    plain = schedir.compile(interleaved, PipelineShape(2, 4, 3), dp=dp, zero=zero)
    before = schedir.simulate(plain, costs, sizes=sizes)
    optimizer_kind = {"sharded optimizer state" if zero else "optimizer"}
    assert optimizer_kind <= before.memory[0].by_kind.keys()
    assert all((curve.total == 0).all() for curve in before.memory_on("host"))


@settings(max_examples=50)
@given(
    st.sampled_from(sorted(STAGE_OPS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(0, 9), min_size=10, max_size=10),
    shapes(),
)
def test_worst_case_memory_bounds_every_tier(
    placement: str, slots: int, rooms: int, seed: int, times: Sequence[float], shape: PipelineShape
) -> None:
    program = schedir.compile(
        random_compute_program(shape, random.Random(seed)),
        shape,
        dp=2,
        **select_buffers(placement, slots, rooms),
    )
    op_names = (
        "read_state_from_disk", "reload_state", "stage_step", "offload_state",
        "write_state_to_disk", "offload_grads", "host_step", "reload_weights", "reduce_grads",
        "send",
    )  # fmt: skip
    costs = Costs(F=1, B=2, **dict(zip(op_names, times, strict=True)))
    sizes = Sizes(saved=7, optimizer=tuple(range(1, shape.stages + 1)), params=1, grads=1)
    run = schedir.simulate(program, costs, sizes=sizes)
    for tier in TIERS:
        limits = [
            float(footprint.total_bytes.max())
            for footprint in compute_footprints(program, sizes, tier, worst_case=True)
        ]
        peaks = [curve.total.max() for curve in run.memory_on(tier)]
        assert (np.array(peaks) <= np.array(limits) + 1e-9).all()


def test_host_optimizer_fits_smaller_device_memory() -> None:
    sizes = Sizes(saved=10, optimizer=100, params=10, grads=10)
    shape, limit = PipelineShape(2, 4, 4), 360
    with pytest.raises(MemoryLimitError):
        schedir.compile(interleaved, shape, sizes=sizes, memory_limit=limit)
    compile_on_host(shape=shape, sizes=sizes, memory_limit=limit)
    with pytest.raises(MemoryLimitError, match=r"state +2"):
        compile_on_host(shape=shape, sizes=sizes, memory_limit=279)
    compile_on_host(shape=shape, sizes=sizes, host_memory_limit=400)
    with pytest.raises(
        MemoryLimitError, match=r'(?s)400 B on the host.*optimizer_placement="device"'
    ):
        compile_on_host(shape=shape, sizes=sizes, host_memory_limit=399)


# ---------------------------------------------------------------- time


def compute_pipeline_span(stages: int, slots: int, load: float, step: float, store: float) -> float:
    """Return the time when the last of equal stages is stored.

    There are three queues, and a load waits for the store of the stage `slots` before it.
    """
    loads, steps, stores = [0.0], [0.0], [0.0] * slots
    for _ in range(stages):
        loads.append(max(loads[-1], stores[-slots]) + load)
        steps.append(max(loads[-1], steps[-1]) + step)
        stores.append(max(steps[-1], stores[-1]) + store)
    return stores[-1]


@pytest.mark.parametrize(
    ("stages", "slots", "times"),
    pairs([1, 2, 3, 6], [1, 2, 3, 6], [[1, 1, 1], [3, 1, 2], [1, 4, 1], [0.5, 0.25, 5], [2, 0, 0]]),
)
def test_step_time_equals_three_queue_pipeline(stages: int, slots: int, times: Any) -> None:
    load, step, store = times
    program = compile_on_host(
        looped_bfs, PipelineShape(1, 2, stages), optimizer_device_buffers=slots
    )
    costs = Costs(F=0, B=0, reload_state=load, stage_step=step, offload_state=store)
    span = schedir.simulate(program, costs).span
    assert span == pytest.approx(compute_pipeline_span(stages, slots, *times))
    if slots == 1:  # one after the other
        assert span == pytest.approx(stages * sum(times))
    if slots >= stages:  # the slowest of the three queues delays the others
        assert span == pytest.approx(sum(times) + (stages - 1) * max(times))


def test_state_loads_overlap_backwards() -> None:
    """Loads overlap in all stages except the first, which has the last backwards."""
    shape, costs = (
        PipelineShape(1, 4, 4),
        Costs(F=1, B=2, reload_state=2, stage_step=0.5, offload_state=0.25),
    )
    alone = schedir.simulate(schedir.compile(looped_bfs, shape), costs).span
    for slots, exposed_time in ((4, 2 + 0.5 + 0.25), (1, 3 * (2 + 0.5 + 0.25) + 0.5 + 0.25)):
        program = compile_on_host(looped_bfs, shape, optimizer_device_buffers=slots)
        assert schedir.simulate(program, costs).span == alone + exposed_time


def test_device_buffers_need_host_optimizer() -> None:
    with pytest.raises(
        UsageError, match="optimizer_device_buffers is 2, but optimizer_placement is 'device'"
    ):
        schedir.compile(interleaved, SHAPE, optimizer_device_buffers=2)
