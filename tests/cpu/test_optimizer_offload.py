"""Tests that states on the host have the bits of states on the device, and the predicted bytes."""

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
    equal,
    left,
    made,
    optimizer_of,
    stepped,
)
from tests.cpu.tiny_stages import BOUNDARY, batch, gpt_stages

torch.set_num_threads(1)

# ---------------------------------------------------------------- location of the states


def kept_by(rank: Executor) -> list[Tensor]:
    return [t for kept in optimizer_of(rank).state.values() for t in kept.values()]


def test_between_steps_all_of_it_is_on_the_host_and_nothing_is_left() -> None:
    """Device memory is poisoned before it is released, so that a late read finds NaN."""
    world = made(
        schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host"), ADAMW
    )
    stepped(world, 0)
    (rank,) = world.executors
    states = rank.state.service(OptimizerPlacement).optimizer_state
    assert states is not None and all(map(states.is_on_host, kept_by(rank)))
    places = [t.data_ptr() for t in kept_by(rank)]
    seen: list[Tensor] = []
    gone = states.finish_store

    def leave(stage: int) -> None:
        found = [here for _, _, here in states.pending_stores[stage].tensors]
        seen.extend(t for t in found if t.dim())
        resized = torch.UntypedStorage.resize_
        with patch.object(torch.UntypedStorage, "resize_", lambda *_: None):
            gone(stage)
        assert all(t.isnan().all() for t in found)
        for t in found:
            resized(t.untyped_storage(), 0)

    with patch.object(states, "finish_store", leave):
        stepped(world, 1)
    assert seen and all(map(states.is_on_host, kept_by(rank)))
    assert places == [t.data_ptr() for t in kept_by(rank)]  # one memory, allocated once


def test_as_much_is_on_each_tier_as_was_predicted() -> None:
    """Bytes are exact. `test_zero_memory.py` tests all other memory."""
    shape, most = PipelineShape(1, 2, 3), []
    for slots in (1, 2, 3):
        stages, (x, y, _) = gpt_stages(shape.stages, tied=False), batch(2)
        sizes = measure_sizes(
            stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
        )
        how: dict[str, Any] = {"optimizer_placement": "host", "optimizer_device_buffers": slots}
        world = made(schedir.compile(looped_bfs, shape, progress_model="per_edge", **how), ADAMW)
        stepped(world, 0)
        (rank,) = world.executors
        (own,) = compute_footprints(world.program, sizes)
        here: list[int] = []
        rank.runner.calls = [
            call._replace(run=partial(_look, rank, call.run, here)) for call in rank.runner.calls
        ]
        stepped(world, 1)
        assert max(here) == own.dynamic_memory["state"][1].max()
        states = rank.state.service(OptimizerPlacement).optimizer_state
        assert states is not None
        on_host = compute_footprints(world.program, sizes, "host")[0].total_bytes
        assert set(on_host) == {sum(t.nbytes for t in states.list_host_memory())}
        most.append(max(here))
    assert most == sorted(set(most))


def _look(rank: Executor, run: Any, here: list[int]) -> None:
    run()
    states = rank.state.service(OptimizerPlacement).optimizer_state
    assert states is not None
    moving = [*states.pending_loads.values(), *states.pending_stores.values()]
    found = [
        t
        for stage in states.optimizer_parameters
        for t in states.list_state_tensors(stage)
        if not states.is_on_host(t)
    ]
    found += [memory for each in moving for _, _, memory in each.tensors]
    here.append(sum(t.nbytes for t in dict.fromkeys(found)))


def test_state_of_elsewhere_is_moved_before_the_next_step() -> None:
    """States loaded by the optimizer's own method are on the device, in new memory."""
    program = schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="host")
    one, other, plain = made(program, ADAMW), made(program, ADAMW), made(program, ADAMW)
    stepped(one, 0, 1)
    stepped(plain, 0, 1, 2)
    for a, b in zip(one.executors, other.executors, strict=True):
        optimizer_of(b).load_state_dict(optimizer_of(a).state_dict())
        for s, stage in b.stages.items():
            stage.module.load_state_dict(a.stages[s].module.state_dict())
    other.executors[0].random_streams.step = 2
    stepped(other, 2)
    assert equal(left(other), left(plain))
