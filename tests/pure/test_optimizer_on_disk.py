"""Tests of optimizer states on the disk, which each stage reads, loads, steps, stores, writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import schedir
from schedir import Cluster, Costs, PipelineShape, Program, Sizes
from schedir.analysis.memory.footprint import compute_footprints
from schedir.errors import MemoryLimitError, UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.predict.bubble_causes import IdleCause, idleness, sum_by_cause
from schedir.schedules import interleaved, looped_bfs
from schedir.training.config.run_config import MemoryConfig
from tests.cases import each_value, pairs

DISK_OPS = (Opcode.ReadStateFromDisk, Opcode.WriteStateToDisk)
STATE_OPS = (*DISK_OPS, Opcode.ReloadState, Opcode.StageOptimizerStep, Opcode.OffloadState)
SHAPE = PipelineShape(2, 4, 3)


def compile_on_disk(
    schedule: Any = interleaved, shape: PipelineShape = SHAPE, **options: Any
) -> Program:
    return schedir.compile(schedule, shape, optimizer_placement="disk", **options)


def list_state_instructions(program: Program, rank: int) -> list[str]:
    return [str(i) for i in program.streams[rank] if i.op in STATE_OPS]


def test_disk_reads_run_ahead_by_host_buffer_count() -> None:
    assert list_state_instructions(compile_on_disk(), 1) == [
        "read_state_from_disk 5", "reload_state 5", "read_state_from_disk 3", "reload_state 3",
        "read_state_from_disk 1",
        "stage_step 5", "offload_state 5", "write_state_to_disk 5", "stage_step 3",
        "offload_state 3",
        "write_state_to_disk 3", "reload_state 1", "stage_step 1", "offload_state 1",
        "write_state_to_disk 1",
    ]  # fmt: skip
    alone = list_state_instructions(
        compile_on_disk(optimizer_device_buffers=1, optimizer_host_buffers=1), 1
    )
    order = (
        "read_state_from_disk",
        "reload_state",
        "stage_step",
        "offload_state",
        "write_state_to_disk",
    )
    assert alone == [f"{op} {s}" for s in (5, 3, 1) for op in order]
    for host_buffers in (1, 2, 3):
        (slots,) = compile_on_disk(
            looped_bfs, PipelineShape(1, 2, 4), optimizer_host_buffers=host_buffers
        ).slots
        assert slots.specified() == {"state": 2, "state_host": host_buffers}
        minimal_slots = compile_on_disk(
            looped_bfs,
            PipelineShape(1, 2, 4),
            optimizer_host_buffers=host_buffers,
            buffer_sharing="minimal",
        ).slots[0]
        assert minimal_slots.state_host == host_buffers


def test_few_stages_use_requested_host_buffers() -> None:
    """The states of few stages pass through the given number of slots and host buffers.

    This holds even if a rank loads all states before it stores any. The times of two stages are
    computed by hand, where the second read waits for no load, and the second store for no write.
    """
    costs = Costs(F=1, B=2, reload_state=0.8, stage_step=0.1, offload_state=0.8,
                  read_state_from_disk=2, write_state_to_disk=2)  # fmt: skip
    for stages in (1, 2, 3, 4):
        for slots in (1, 2, 3):
            for host_buffers in (1, 2, 3):
                program = compile_on_disk(
                    looped_bfs,
                    PipelineShape(1, 2, stages),
                    optimizer_device_buffers=slots,
                    optimizer_host_buffers=host_buffers,
                )
                assert program.slots[0].state_host == min(stages, host_buffers)
    two = [
        compile_on_disk(looped_bfs, PipelineShape(1, 2, 2), optimizer_host_buffers=host_buffers)
        for host_buffers in (1, 2)
    ]
    spans = [schedir.simulate(program, costs).span for program in two]
    first_store_end = 12 + 0.1 + 0.8  # compute hides all earlier copies
    assert spans[1] == pytest.approx(first_store_end + 2 + 2)
    assert spans[0] == pytest.approx(12 + 0.8 + 0.8 + 2 + 0.8 + 2)  # after the last load


def test_chart_names_tiers_of_offloaded_activations_only() -> None:
    """Optimizer states do not count, so a chart without offloaded activations names no tiers."""
    (*_, head, _, _) = schedir.viz.text_chart(schedir.simulate(compile_on_disk()))
    assert "peak" in head[0][0] and "host" not in head[0][0] and "disk" not in head[0][0]
    program = schedir.compile(interleaved, SHAPE, optimizer_placement="disk", offload=[0])
    (*_, head, _, _) = schedir.viz.text_chart(schedir.simulate(program))
    assert "host" in head[0][0] and "disk" not in head[0][0]


# ---------------------------------------------------------------- refusals


def test_incompatible_options_are_refused() -> None:
    with pytest.raises(
        UsageError, match="optimizer_host_buffers is 2, but optimizer_placement is 'host'"
    ):
        schedir.compile(interleaved, SHAPE, optimizer_placement="host", optimizer_host_buffers=2)
    with pytest.raises(UsageError, match="but optimizer_placement is 'device'"):
        schedir.compile(interleaved, SHAPE, optimizer_host_buffers=2)
    with pytest.raises(
        UsageError, match="optimizer of a stage is not on the device: it is on the disk"
    ):
        compute_footprints(compile_on_disk(), Sizes(model_states=10))
    with pytest.raises(UsageError, match="optimizer_placement = 'disk' needs spill_dir"):
        MemoryConfig(optimizer_placement="disk")  # type: ignore[call-arg]
    MemoryConfig(optimizer_placement="disk", spill_dir="/nvme")  # type: ignore[call-arg]


# ---------------------------------------------------------------- bytes and time


@pytest.mark.parametrize(("zero", "rooms"), each_value([0, 2], [1, 2, 3]))
def test_optimizer_bytes_on_disk_host_and_device(zero: int, rooms: int) -> None:
    """The disk always holds all states. Host and device hold those in transit that fit."""
    bytes_of = (8, 16, 24, 32, 40, 48)
    sizes = Sizes(optimizer=bytes_of, params=2, grads=2)
    program = compile_on_disk(dp=2, zero=zero, optimizer_host_buffers=rooms)
    costs = Costs(
        F=1,
        B=1,
        reload_state=2,
        stage_step=3,
        offload_state=2,
        read_state_from_disk=4,
        write_state_to_disk=5,
    )
    run = schedir.simulate(program, costs, sizes=sizes)
    shards = 2 if zero else 1
    for rank, curve in enumerate(run.memory_on("disk")):
        assert (curve.total == sum(bytes_of[rank::2]) / shards).all()
    for rank, curve in enumerate(run.memory_on("host")):
        shard_bytes = sorted((size / shards for size in bytes_of[rank::2]), reverse=True)
        assert curve.total.max() <= sum(shard_bytes[:rooms])
        assert curve.total.max() >= shard_bytes[0] and curve.total[-1] == 0
    for curve in run.memory:
        assert (
            curve.by_kind["state"][0]
            == curve.by_kind["state"][-1]
            == 0
            < curve.by_kind["state"].max()
        )
    limit = max(
        float(footprint.total_bytes.max())
        for footprint in compute_footprints(program, sizes, "host", worst_case=True)
    )
    compile_on_disk(
        dp=2, zero=zero, optimizer_host_buffers=rooms, sizes=sizes, host_memory_limit=limit
    )
    with pytest.raises(MemoryLimitError, match="on the host"):
        compile_on_disk(
            dp=2, zero=zero, optimizer_host_buffers=rooms, sizes=sizes, host_memory_limit=limit - 1
        )


def compute_pipeline_span(
    order: Sequence[str], slots: int, host_buffers: int, times: dict[str, float]
) -> float:
    """Return the time when the last instruction ends.

    Each waits for its lane, for its stage's previous instruction, and for a free slot on the device
    or a free buffer on the host.
    """
    lanes = {
        "read_state_from_disk": "disk",
        "reload_state": "h2d",
        "stage_step": "compute",
        "offload_state": "d2h",
        "write_state_to_disk": "disk",
    }
    lane_end, done = dict[str, float](), dict[str, float]()
    free_times = {"device": [0.0] * slots, "host": [0.0] * host_buffers}
    for instruction in order:
        op, stage = instruction.split()
        acquired = {
            "read_state_from_disk": "host", "reload_state": "device", "offload_state": "host"
        }.get(op)  # fmt: skip
        released = {
            "reload_state": "host", "offload_state": "device", "write_state_to_disk": "host"
        }.get(op)  # fmt: skip
        start = max(lane_end.get(lanes[op], 0.0), done.get(stage, 0.0))
        if acquired is not None:
            start = max(start, free_times[acquired].pop(0))
        end = lane_end[lanes[op]] = done[stage] = start + times[op]
        if released is not None:
            free_times[released].append(end)
    return max(done.values())


@pytest.mark.parametrize(
    ("slots", "rooms", "times"),
    pairs(
        [1, 2, 3],
        [1, 2, 3],
        [[1, 1, 1, 1, 1], [4, 1, 0.5, 1, 5], [1, 3, 1, 2, 1], [2, 0, 0, 0, 3]],
    ),
)
def test_step_time_equals_four_lane_pipeline(slots: int, rooms: int, times: Any) -> None:
    program = compile_on_disk(
        looped_bfs,
        PipelineShape(1, 2, 5),
        optimizer_device_buffers=slots,
        optimizer_host_buffers=rooms,
    )
    lanes = (
        "read_state_from_disk", "reload_state", "stage_step", "offload_state",
        "write_state_to_disk",
    )  # fmt: skip
    times_by_op = dict(zip(lanes, times, strict=True))
    span = schedir.simulate(program, Costs(F=0, B=0, **times_by_op)).span
    assert span == pytest.approx(
        compute_pipeline_span(list_state_instructions(program, 0), slots, rooms, times_by_op)
    )
    # The disk has one lane.
    assert span >= 5 * (times_by_op["read_state_from_disk"] + times_by_op["write_state_to_disk"])
    if slots == rooms == 1:
        assert span == pytest.approx(5 * sum(times))
    # The disk's lane waits for no more than one stage.
    if times_by_op["read_state_from_disk"] > 3 and rooms > 1 and slots > 1:
        assert span <= 5 * (4 + 5) + 1 + 0.5 + 1


def test_cluster_disk_costs_cause_disk_idle_time() -> None:
    node = Cluster(
        nodes=1, gpus_per_node=2, flops=312e12, memory=80e9, hbm_bandwidth=2e12,
        nvlink_bandwidth=300e9, network_bandwidth=25e9,
        latency=0.0, host_bandwidth=10e9, disk_bandwidth=2e9,
    )  # fmt: skip
    sizes = Sizes(activation=1e6, params=1e9, grads=1e9, optimizer=6e9)
    costs = node.fill_costs(SHAPE, sizes, Costs(F=0.01, B=0.02), optimizer_placement="disk")
    assert (costs.reload_state, costs.read_state_from_disk, costs.write_state_to_disk) == (
        0.6,
        3.0,
        3.0,
    )
    run = schedir.simulate(compile_on_disk(), costs)
    table = sum_by_cause(idleness(run), run.ranks)
    assert table[:, IdleCause.DISK].sum() > 2 * 3.0  # two ranks
