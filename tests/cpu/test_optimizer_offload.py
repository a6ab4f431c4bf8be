"""Tests that optimizer states on the host equal states on the device, and have predicted sizes."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

import schedir
from schedir import PipelineShape
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import (
    interleaved,
)
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    are_equal,
    get_optimizer,
    list_optimizer_state,
    make_executor,
    read_training_state,
    run_steps_in_random_order,
)

torch.set_num_threads(1)


def test_states_are_only_on_host_between_steps() -> None:
    """Device memory is poisoned before its release, so a late read returns NaN."""
    world = make_executor(
        schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host"), ADAMW
    )
    run_steps_in_random_order(world, 0)
    (rank,) = world.executors
    states = rank.state.service(OptimizerPlacement)
    assert all(map(states.is_at_rest, list_optimizer_state(rank)))
    addresses = [t.data_ptr() for t in list_optimizer_state(rank)]
    stored: list[Tensor] = []
    finish_offload = states.finish_offload

    def offload_without_resize(stage: int) -> None:
        device_tensors = [t for _, _, t in states.pending_offloads[stage].tensors]
        stored.extend(t for t in device_tensors if t.dim())
        resized = torch.UntypedStorage.resize_
        with patch.object(torch.UntypedStorage, "resize_", lambda *_: None):
            finish_offload(stage)
        assert all(t.isnan().all() for t in device_tensors)
        for t in device_tensors:
            resized(t.untyped_storage(), 0)

    with patch.object(states, "finish_offload", offload_without_resize):
        run_steps_in_random_order(world, 1)
    assert stored and all(map(states.is_at_rest, list_optimizer_state(rank)))
    # There is one memory, which is allocated once.
    assert addresses == [t.data_ptr() for t in list_optimizer_state(rank)]


def test_loaded_state_is_moved_to_host_before_next_step() -> None:
    """`load_state_dict` of the optimizer puts states into new device memory."""
    program = schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host")
    saved, loaded, plain = (make_executor(program, ADAMW) for _ in range(3))
    run_steps_in_random_order(saved, 0, 1)
    run_steps_in_random_order(plain, 0, 1, 2)
    for a, b in zip(saved.executors, loaded.executors, strict=True):
        get_optimizer(b).load_state_dict(get_optimizer(a).state_dict())
        for s, stage in b.stages.items():
            stage.module.load_state_dict(a.stages[s].module.state_dict())
    loaded.executors[0].random_streams.step = 2
    run_steps_in_random_order(loaded, 2)
    assert are_equal(read_training_state(loaded), read_training_state(plain))
