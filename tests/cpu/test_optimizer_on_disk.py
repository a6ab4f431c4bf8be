"""Tests that states in an unnamed file on the disk give the bits of states on the device."""

from __future__ import annotations

import gc
import os
import shutil
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
from schedir.runtime.offload.disk_optimizer_state import DiskOptimizerState
from schedir.runtime.offload.memory_tiers import MemoryTiers
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import looped_bfs
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    both,
    equal,
    left,
    made,
    optimizer_of,
    stepped,
)
from tests.cpu.tiny_stages import BOUNDARY, batch, gpt_stages

torch.set_num_threads(1)


def states_of(rank: Executor) -> DiskOptimizerState:
    states = rank.state.service(OptimizerPlacement).optimizer_state
    assert isinstance(states, DiskOptimizerState)
    return states


def on_disk(**how: Any) -> Program:
    return schedir.compile(
        looped_bfs,
        PipelineShape(1, 2, 3),
        progress_model="per_edge",
        optimizer_placement="disk",
        **how,
    )


# ---------------------------------------------------------------- location of the states


def test_between_steps_all_of_it_is_in_the_file(tmp_path: Path) -> None:
    """Reads and writes of a state tensor go to the file."""
    world = made(on_disk(), ADAMW, execution=ExecutionOptions(spill_dir=tmp_path))
    stepped(world, 0, 1)
    states = states_of(world.executors[0])
    kept = [t for own in optimizer_of(world.executors[0]).state.values() for t in own.values()]
    assert all(map(states.is_on_host, kept)) and len(kept) == len(states.file_offsets)
    for t in kept:
        found = torch.empty(t.nbytes, dtype=torch.uint8)
        states.spill_file.read(states.file_offsets[t], found)
        assert torch.equal(found.view(t.dtype).view(t.shape), t)
        t.fill_(3)
        states.spill_file.read(states.file_offsets[t], found)
        assert (found.view(t.dtype) == 3).all()
    (room,) = states.tiers.state_arena.free_blocks[:1]
    assert room.location.view(torch.float32).isnan().all()  # old contents cannot be read


def test_as_much_is_on_each_tier_as_was_predicted(tmp_path: Path) -> None:
    """Bytes are equal at the end of each instruction."""
    shape = PipelineShape(1, 2, 3)
    for rooms in (1, 2, 3):
        stages, (x, y, _) = gpt_stages(shape.stages, tied=False), batch(2)
        sizes = measure_sizes(
            stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
        )
        world = made(
            on_disk(optimizer_host_buffers=rooms),
            ADAMW,
            execution=ExecutionOptions(spill_dir=tmp_path),
        )
        stepped(world, 0)
        (rank,) = world.executors
        seen: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
        rank.runner.calls = [
            call._replace(run=partial(_look, rank, call.run, seen)) for call in rank.runner.calls
        ]
        stepped(world, 1)
        (device,) = compute_footprints(world.program, sizes)
        assert max(seen["device"]) == device.dynamic_memory["state"][1].max()
        for tier in ("host", "disk"):
            (own,) = compute_footprints(world.program, sizes, tier)
            assert max(seen[tier]) == own.total_bytes.max() > 0
        assert len({*seen["disk"]}) == 1 and seen["host"][-1] == 0
        states = states_of(rank)
        assert (
            states.tiers.state_arena.allocated_bytes
            == world.program.slots[0].state_host * states.buffer_size
        )


def _look(rank: Executor, run: Any, seen: dict[str, list[int]]) -> None:
    run()
    states, tiers = states_of(rank), rank.state.resources.service(MemoryTiers)
    found = [
        t
        for stage in states.optimizer_parameters
        for t in states.list_state_tensors(stage)
        if not states.is_on_host(t)
    ]
    for each in (*states.pending_loads.values(), *states.pending_stores.values()):
        found += [memory for _, _, memory in each.tensors]
    seen["device"].append(sum(t.nbytes for t in dict.fromkeys(found)))
    on_host = [t for here in states.host_buffers.values() for t in here.views.values()]
    assert sum(t.nbytes for t in on_host) == tiers.count_bytes("host")
    seen["host"].append(tiers.count_bytes("host"))
    assert sum(t.nbytes for t in states.list_host_memory()) == tiers.count_bytes("disk")
    seen["disk"].append(tiers.count_bytes("disk"))


def test_what_nobody_has_any_more_leaves_room_in_the_file(tmp_path: Path) -> None:
    world = made(on_disk(), ADAMW, execution=ExecutionOptions(spill_dir=tmp_path))
    stepped(world, 0)
    optimizer, states = optimizer_of(world.executors[0]), states_of(world.executors[0])
    lengths = []
    for k in range(3):
        optimizer.load_state_dict(optimizer.state_dict())  # creates new tensors each time
        gc.collect()
        stepped(world, 1 + k)
        lengths.append(states.spill_file.length)
    assert len({*lengths}) == 1 and all(map(states.is_on_host, states.list_state_tensors(0)))


# ---------------------------------------------------------------- errors


def test_what_is_on_the_disk_wants_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="moves the optimizer state to the disk, but spill_dir is not set"
    ):
        made(on_disk(), ADAMW)
    with pytest.raises(ModelError, match=r"(?s)is not writable.*\[memory\] spill_dir"):
        made(on_disk(), ADAMW, execution=ExecutionOptions(spill_dir=tmp_path / "gone"))


def test_a_folder_may_vanish(tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    worlds = [
        made(p, ADAMW, execution=ExecutionOptions(spill_dir=folder))
        for p in both(looped_bfs, PipelineShape(1, 2, 3), states="disk")
    ]
    shutil.rmtree(folder)
    assert equal(*(stepped(world, 0, 1) for world in worlds)) and equal(*map(left, worlds))


def everything(world: Any) -> dict[int, list[Tensor]]:
    """Return the states of each stage."""
    states = states_of(world.executors[0])
    return {
        s: [t.clone() for t in states.list_state_tensors(s)] for s in states.optimizer_parameters
    }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "posix_fallocate",
            r"(?s)cannot extend the spill file in .* No space left.*rank 0 #\d+  offload_state 1",
        ),
        ("pwrite", r"(?s)No space left on device.*rank 0 #\d+  write_state_to_disk 1"),
        (
            "preadv",
            r"(?s)is shorter than the data written to it.*rank 0 #\d+  read_state_from_disk 1",
        ),
    ],
)
def test_a_disk_that_fails_in_a_step(
    what: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the failed operation and a remedy, and no state is lost."""
    world, plain = (
        made(on_disk(), ADAMW, execution=ExecutionOptions(spill_dir=tmp_path)) for _ in range(2)
    )
    if what != "posix_fallocate":  # called only in the first step
        stepped(world, 0)
        stepped(plain, 0)
    before, real, calls = everything(world), getattr(os, what), 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            if what == "preadv":
                return 0
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, what, fails)
        with pytest.raises(ExecutionError, match=says) as caught:
            stepped(world, 1)
    assert "resume from a checkpoint" in str(caught.value)
    stepped(plain, 1)
    after, right = everything(world), everything(plain)
    for stage, own in after.items():  # either unchanged or stepped
        assert equal(own, right[stage]) or equal(own, before[stage]) or not (own or before[stage])
    with pytest.raises(ExecutionError, match="an earlier step failed"):
        stepped(world, 2)
