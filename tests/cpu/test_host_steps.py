"""Tests of the CPU optimizer: changes between steps, its thread, sizes per tier, refusals."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.analysis.memory.footprint import compute_footprints
from schedir.errors import ExecutionError, ModelError
from schedir.ir.isa.instructions import Lane
from schedir.models import gpt
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import interleaved, looped_bfs, one_f_one_b
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
PLACEMENTS = ("device", "cpu_step")


def get_placement(world: InProcessExecutor, rank: int = 0) -> OptimizerPlacement:
    return world.executors[rank].state.service(OptimizerPlacement)


def make_one_rank(m: int, states: Any = "cpu_step", optimizer: Any = ADAMW) -> InProcessExecutor:
    program = schedir.compile(interleaved, PipelineShape(1, m, 3), optimizer_placement=states)
    return make_executor(program, optimizer)


def test_changes_between_steps_take_effect() -> None:
    """The changes are writes to `data`, new parameter groups and learning rates."""
    results = []
    for states in PLACEMENTS:
        world = make_one_rank(4, states, lambda parameters: ADAMW(parameters[-3:]))
        run_steps_in_random_order(world, 0)
        (rank,) = world.executors
        all_parameters = [p for stage in rank.stages.values() for p in stage.module.parameters()]
        all_parameters[-1].data.mul_(0.5)
        optimizer = get_optimizer(rank)
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        optimizer.add_param_group(
            {"params": [p for p in all_parameters if p not in optimized], "lr": 0.1}
        )
        optimizer.param_groups[0]["lr"] *= 2
        run_steps_in_random_order(world, 1)
        all_parameters[-1].data = all_parameters[-1].data * 2  # new memory
        run_steps_in_random_order(world, 2)
        results.append(read_training_state(world))
    assert are_equal(*results)


def test_frozen_and_empty_parameters_are_accepted() -> None:
    """An optimizer of all parameters contains frozen and empty ones of a trained stage."""
    results = []
    for states in PLACEMENTS:
        program = schedir.compile(interleaved, PipelineShape(1, 2, 3), optimizer_placement=states)
        stages = gpt_stages(3, tied=False)
        next(stages[1].parameters()).requires_grad_(False)
        stages[2].requires_grad_(False)
        stages[0].register_parameter("nothing", nn.Parameter(torch.empty(0)))
        world = InProcessExecutor(
            program, stages, loss=gpt.loss, boundary=BOUNDARY, optimizer=ADAMW
        )
        results.append([*run_steps_in_random_order(world, 0, 1), *read_training_state(world)])
    assert are_equal(*results)


def test_host_steps_run_in_thread_and_free_their_memory() -> None:
    """After the step, the gradients and weights on the host are NaN."""
    world = make_one_rank(4)
    thread_names: list[str] = []
    placement = get_placement(world)
    step = placement.step_on_host

    def record_and_step(stage: int, finite: Tensor) -> None:
        thread_names.append(threading.current_thread().name)
        step(stage, finite)

    with patch.object(placement, "step_on_host", record_and_step):
        run_steps_in_random_order(world, 0, 1)
    assert thread_names == ["lane HOST"] * 6
    assert all(
        t.isnan().all()
        for part in placement.host_parameters.values()
        for t in part.list_host_tensors()
    )
    spans = world.timeline().spans
    assert (spans["end"] > spans["start"])[spans["lane"] == Lane.HOST].all()


def test_memory_of_each_tier_equals_prediction() -> None:
    shape = PipelineShape(1, 2, 3)
    stages, (x, y, _) = gpt_stages(shape.stages, tied=False), make_batch(2)
    sizes = measure_sizes(
        stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
    )
    world = make_executor(schedir.compile(looped_bfs, shape, optimizer_placement="cpu_step"), ADAMW)
    run_steps_in_random_order(world, 0, 1)
    (rank,) = world.executors
    placement = get_placement(world)
    (host,) = compute_footprints(world.program, sizes, "host")
    assert set(host.total_bytes) == {sum(t.nbytes for t in placement.list_host_tensors())}
    state_tensors = [
        t
        for parameter_state in get_optimizer(rank).state.values()
        for t in parameter_state.values()
    ]
    assert (
        sum(t.nbytes for t in state_tensors) == host.static_memory["optimizer"][1] and state_tensors
    )
    (device,) = compute_footprints(world.program, sizes)
    assert "optimizer" not in device.static_memory and not device.dynamic_memory["state"][1].any()


class RandomOptimizer(torch.optim.SGD):
    """Draws random numbers, for example to round stochastically."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.rand_like(p.grad))
        return super().step(closure)


def test_unsupported_optimizers_are_refused() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), optimizer_placement="cpu_step")
    capturable, no_optimizer = partial(torch.optim.AdamW, capturable=True), cast(Any, None)
    with pytest.raises(ModelError, match="AdamW is capturable"):
        make_executor(program, capturable)
    with pytest.raises(ModelError, match="this rank has no optimizer"):
        make_executor(program, no_optimizer)
    with pytest.raises(ExecutionError, match="RandomOptimizer draws random numbers"):
        run_steps_in_random_order(make_executor(program, partial(RandomOptimizer, lr=0.1)), 0)


def test_host_error_names_its_instruction() -> None:
    world = make_one_rank(2)
    run_steps_in_random_order(world, 0)
    hook: Any = lambda *_: None  # noqa: E731
    handle = get_optimizer(world.executors[0]).register_step_post_hook(hook)
    with pytest.raises(ExecutionError, match="has hooks on its step") as caught:
        run_steps_in_random_order(world, 1)
    assert "host_step" in str(caught.value.sites[0].instr)
    handle.remove()
