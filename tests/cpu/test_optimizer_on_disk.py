"""Tests of optimizer states in an unnamed file on the disk, and of memory on all tiers."""

from __future__ import annotations

import gc
import os
import shutil
from copy import deepcopy
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import schedir
from schedir import PipelineShape, Program
from schedir.analysis.memory.footprint import compute_footprints
from schedir.errors import ExecutionError, ModelError
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.offload.optimizer_state_file import StateFile
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import looped_bfs
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    are_equal,
    compile_on_both_tiers,
    get_optimizer,
    list_optimizer_state,
    make_executor,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, have_same_bits, make_batch
from tests.file_size_limit import limit_file_size

torch.set_num_threads(1)


def get_placement(rank: Executor) -> OptimizerPlacement:
    return rank.state.service(OptimizerPlacement)


def get_file(rank: Executor) -> StateFile:
    return rank.state.service(StateFile)


def compile_on_disk(**options: Any) -> Program:
    options = {"optimizer_placement": "disk"} | options
    return schedir.compile(looped_bfs, PipelineShape(1, 2, 3), progress_model="per_edge", **options)


def make_disk_executor(folder: Path, **options: Any) -> InProcessExecutor:
    execution = ExecutionOptions(spill_dir=folder)
    return make_executor(compile_on_disk(**options), ADAMW, execution=execution)


def test_states_are_in_file_between_steps(tmp_path: Path) -> None:
    """Reads and writes of a state tensor go to the file."""
    world = make_disk_executor(tmp_path)
    run_steps_in_random_order(world, 0, 1)
    states, file = get_placement(world.executors[0]), get_file(world.executors[0])
    state_tensors = list_optimizer_state(world.executors[0])
    assert all(map(states.is_at_rest, state_tensors)) and len(state_tensors) == len(file.offsets)
    for t in state_tensors:
        file_bytes = torch.empty(t.nbytes, dtype=torch.uint8)
        file.spill_file.read(file.offsets[t], file_bytes)
        assert torch.equal(file_bytes.view(t.dtype).view(t.shape), t)
        t.fill_(3)
        file.spill_file.read(file.offsets[t], file_bytes)
        assert (file_bytes.view(t.dtype) == 3).all()
    (block,) = file.tiers.state_arena.free_blocks[:1]
    assert block.location.view(torch.float32).isnan().all()  # old contents cannot be read


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_memory_of_each_tier_equals_prediction(placement: str, tmp_path: Path) -> None:
    """Bytes are compared at the end of each instruction. `test_zero_memory.py` tests the rest."""
    stages, (x, y, _) = gpt_stages(3, tied=False), make_batch(2)
    sizes = measure_sizes(
        stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
    )
    tier = "device" if placement == "host" else "host"  # the tier of the buffers
    peaks = []
    for buffer_count in (1, 2, 3):
        buffers = {f"optimizer_{tier}_buffers": buffer_count}
        world = make_disk_executor(tmp_path, optimizer_placement=placement, **buffers)
        run_steps_in_random_order(world, 0)
        (rank,) = world.executors
        bytes_by_tier: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
        rank.runner.calls = [
            call._replace(run=partial(_run_and_count, rank, call.run, bytes_by_tier))
            for call in rank.runner.calls
        ]
        run_steps_in_random_order(world, 1)
        (device,) = compute_footprints(world.program, sizes)
        assert max(bytes_by_tier["device"]) == device.dynamic_memory["state"][1].max()
        for other in ("host", "disk"):
            (footprint,) = compute_footprints(world.program, sizes, other)
            assert max(bytes_by_tier[other]) == footprint.total_bytes.max()
        assert len({*bytes_by_tier[placement]}) == 1 and bytes_by_tier[placement][0] > 0
        peaks.append(max(bytes_by_tier[tier]))
        if placement == "disk":
            assert bytes_by_tier["host"][-1] == 0
            file = get_file(rank)
            buffer_bytes = world.program.slots[0].state_host * file.buffer_size
            assert file.tiers.state_arena.allocated_bytes == buffer_bytes
    assert peaks == sorted(peaks) and (placement == "disk" or len({*peaks}) == 3)


def _run_and_count(rank: Executor, run: Any, bytes_by_tier: dict[str, list[int]]) -> None:
    run()
    states, tiers = get_placement(rank), rank.state.resources.service(MemoryTiers)
    device_tensors = [
        t
        for stage in states.optimizer.optimizer_parameters
        for t in states.list_state_tensors(stage)
        if not states.is_at_rest(t)
    ]
    for move in (*states.pending_reloads.values(), *states.pending_offloads.values()):
        device_tensors += [memory for _, _, memory in move.tensors]
    at_rest = sum(t.nbytes for t in states.list_host_tensors())
    counted = {
        "device": sum(t.nbytes for t in dict.fromkeys(device_tensors)), "host": at_rest, "disk": 0,
    }  # fmt: skip
    if rank.program.optimizer_placement == "disk":
        in_buffers = [t for buffer in states.host_buffers.values() for t in buffer.views.values()]
        counted |= {"host": sum(t.nbytes for t in in_buffers), "disk": at_rest}
        assert {tier: tiers.count_bytes(tier) for tier in ("host", "disk")} == {
            tier: counted[tier] for tier in ("host", "disk")
        }
    for tier, size in counted.items():
        bytes_by_tier[tier].append(size)


def test_space_of_freed_states_is_reused(tmp_path: Path) -> None:
    world = make_disk_executor(tmp_path)
    run_steps_in_random_order(world, 0)
    optimizer, states = get_optimizer(world.executors[0]), get_placement(world.executors[0])
    lengths = []
    for k in range(3):
        optimizer.load_state_dict(optimizer.state_dict())  # creates new tensors each time
        gc.collect()
        run_steps_in_random_order(world, 1 + k)
        lengths.append(get_file(world.executors[0]).spill_file.length)
    assert len({*lengths}) == 1 and all(map(states.is_at_rest, states.list_state_tensors(0)))


def test_empty_state_tensor_has_place_in_file(tmp_path: Path) -> None:
    world = make_disk_executor(tmp_path)
    empty = torch.empty(0, 3)
    assert get_file(world.executors[0]).allocate([empty])[empty].shape == (0, 3)


def test_step_may_be_repeated_if_disk_was_full_before_it(tmp_path: Path) -> None:
    """A loaded state is written to the file before the next step."""
    world, plain = (make_disk_executor(tmp_path) for _ in range(2))
    run_steps_in_random_order(world, 0)
    run_steps_in_random_order(plain, 0, 1)
    optimizer, file = get_optimizer(world.executors[0]), get_file(world.executors[0])
    for length in (100, file.spill_file.length):  # A write fails, or the file cannot grow.
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        before = read_training_state(world)
        with (
            limit_file_size(length),
            pytest.raises(ExecutionError, match="moved to the disk before the step"),
        ):
            run_steps_in_random_order(world, 1)
        assert are_equal(before, read_training_state(world))
    run_steps_in_random_order(world, 1)
    assert are_equal(read_training_state(world), read_training_state(plain))
    assert file.tiers.count_bytes("host") == 0


def test_states_on_disk_need_writable_folder(tmp_path: Path) -> None:
    message = "moves the optimizer state to the disk, but spill_dir is not set"
    with pytest.raises(ModelError, match=message):
        make_executor(compile_on_disk(), ADAMW)
    with pytest.raises(ModelError, match=r"(?s)is not writable.*\[memory\] spill_dir"):
        make_disk_executor(tmp_path / "gone")


def test_spill_folder_may_be_deleted_after_start(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    worlds = [
        make_executor(p, ADAMW, execution=ExecutionOptions(spill_dir=folder))
        for p in compile_on_both_tiers(looped_bfs, PipelineShape(1, 2, 3), states="disk")
    ]
    shutil.rmtree(folder)
    assert are_equal(*(run_steps_in_random_order(world, 0, 1) for world in worlds))
    assert are_equal(*map(read_training_state, worlds))


def copy_states(world: Any) -> dict[int, list[Tensor]]:
    """Return the states of each stage."""
    states = get_placement(world.executors[0])
    return {
        s: [t.clone() for t in states.list_state_tensors(s)]
        for s in states.optimizer.optimizer_parameters
    }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("posix_fallocate",
         r"(?s)cannot extend the spill file in .* No space left.*rank 0 #\d+  offload_state 1"),
        ("pwrite", r"(?s)No space left on device.*rank 0 #\d+  write_state_to_disk 1"),
        ("preadv",
         r"(?s)is shorter than the data written to it.*rank 0 #\d+  read_state_from_disk 1"),
    ],
)  # fmt: skip
def test_disk_error_in_step_names_operation_and_remedy(
    what: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the states of each stage are those before the step, or those after it."""
    world, plain = (make_disk_executor(tmp_path) for _ in range(2))
    if what != "posix_fallocate":  # called only in the first step
        run_steps_in_random_order(world, 0)
        run_steps_in_random_order(plain, 0)
    before, original, calls = copy_states(world), getattr(os, what), 0

    def fail_after_first_call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            if what == "preadv":
                return 0
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, what, fail_after_first_call)
        with pytest.raises(ExecutionError, match=says) as caught:
            run_steps_in_random_order(world, 1)
    assert "resume from a checkpoint" in str(caught.value)
    run_steps_in_random_order(plain, 1)
    after, expected = copy_states(world), copy_states(plain)
    for stage, states in after.items():  # either unchanged or stepped
        assert any(have_same_bits(states, other[stage]) for other in (before, expected))
    with pytest.raises(ExecutionError, match="an earlier step failed"):
        run_steps_in_random_order(world, 2)
