"""Tests that optimizer states on the host equal states on the device, and have predicted sizes."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import schedir
from schedir import PipelineShape
from schedir.analysis.memory.footprint import compute_footprints
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import (
    interleaved,
    looped_bfs,
)
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    are_equal,
    get_optimizer,
    make_executor,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, make_batch

torch.set_num_threads(1)


def list_state_tensors(rank: Executor) -> list[Tensor]:
    return [
        t
        for parameter_state in get_optimizer(rank).state.values()
        for t in parameter_state.values()
    ]


def test_states_are_only_on_host_between_steps() -> None:
    """Device memory is poisoned before its release, so a late read returns NaN."""
    world = make_executor(
        schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host"), ADAMW
    )
    run_steps_in_random_order(world, 0)
    (rank,) = world.executors
    states = rank.state.service(OptimizerPlacement)
    assert all(map(states.is_at_rest, list_state_tensors(rank)))
    addresses = [t.data_ptr() for t in list_state_tensors(rank)]
    stored: list[Tensor] = []
    finish_offload = states.finish_offload

    def offload_without_resize(stage: int) -> None:
        device_tensors = [
            device_tensor for _, _, device_tensor in states.pending_offloads[stage].tensors
        ]
        stored.extend(t for t in device_tensors if t.dim())
        resized = torch.UntypedStorage.resize_
        with patch.object(torch.UntypedStorage, "resize_", lambda *_: None):
            finish_offload(stage)
        assert all(t.isnan().all() for t in device_tensors)
        for t in device_tensors:
            resized(t.untyped_storage(), 0)

    with patch.object(states, "finish_offload", offload_without_resize):
        run_steps_in_random_order(world, 1)
    assert stored and all(map(states.is_at_rest, list_state_tensors(rank)))
    assert addresses == [
        t.data_ptr() for t in list_state_tensors(rank)
    ]  # one memory, allocated once


def test_memory_of_each_tier_equals_prediction() -> None:
    """`test_zero_memory.py` tests all other memory."""
    shape, peaks = PipelineShape(1, 2, 3), []
    for slots in (1, 2, 3):
        stages, (x, y, _) = gpt_stages(shape.stages, tied=False), make_batch(2)
        sizes = measure_sizes(
            stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
        )
        options: dict[str, Any] = {"optimizer_placement": "host", "optimizer_device_buffers": slots}
        world = make_executor(
            schedir.compile(looped_bfs, shape, progress_model="per_edge", **options), ADAMW
        )
        run_steps_in_random_order(world, 0)
        (rank,) = world.executors
        (footprint,) = compute_footprints(world.program, sizes)
        device_bytes: list[int] = []
        rank.runner.calls = [
            call._replace(run=partial(_run_and_count, rank, call.run, device_bytes))
            for call in rank.runner.calls
        ]
        run_steps_in_random_order(world, 1)
        assert max(device_bytes) == footprint.dynamic_memory["state"][1].max()
        states = rank.state.service(OptimizerPlacement)
        on_host = compute_footprints(world.program, sizes, "host")[0].total_bytes
        assert set(on_host) == {sum(t.nbytes for t in states.list_host_tensors())}
        peaks.append(max(device_bytes))
    assert peaks == sorted(set(peaks))


def _run_and_count(rank: Executor, run: Any, device_bytes: list[int]) -> None:
    run()
    states = rank.state.service(OptimizerPlacement)
    moving = [*states.pending_reloads.values(), *states.pending_offloads.values()]
    device_tensors = [
        t
        for stage in states.optimizer.optimizer_parameters
        for t in states.list_state_tensors(stage)
        if not states.is_at_rest(t)
    ]
    device_tensors += [memory for move in moving for _, _, memory in move.tensors]
    device_bytes.append(sum(t.nbytes for t in dict.fromkeys(device_tensors)))


def test_loaded_state_is_moved_to_host_before_next_step() -> None:
    """`load_state_dict` of the optimizer puts states into new device memory."""
    program = schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host")
    saved, loaded, plain = (
        make_executor(program, ADAMW),
        make_executor(program, ADAMW),
        make_executor(program, ADAMW),
    )
    run_steps_in_random_order(saved, 0, 1)
    run_steps_in_random_order(plain, 0, 1, 2)
    for a, b in zip(saved.executors, loaded.executors, strict=True):
        get_optimizer(b).load_state_dict(get_optimizer(a).state_dict())
        for s, stage in b.stages.items():
            stage.module.load_state_dict(a.stages[s].module.state_dict())
    loaded.executors[0].random_streams.step = 2
    run_steps_in_random_order(loaded, 2)
    assert are_equal(read_training_state(loaded), read_training_state(plain))
