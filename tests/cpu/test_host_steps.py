"""Tests of the CPU optimizer: changes between steps, its thread, bytes per tier, and refusals."""

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
from schedir.runtime.offload.cpu_optimizer import CpuOptimizer
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.schedules import interleaved, looped_bfs, one_f_one_b
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
WHERE = ("device", "cpu_step")


def steps_of(world: Any, rank: int = 0) -> CpuOptimizer:
    found = world.executors[rank].state.service(OptimizerPlacement).optimizer_state
    assert isinstance(found, CpuOptimizer)
    return found


def test_what_others_change_between_steps_is_stepped() -> None:
    """This holds for silent writes to `data`, and for parameter groups added later."""
    found = []
    for states in WHERE:
        world = made(
            schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement=states),
            lambda own: ADAMW(own[-3:]),
        )
        stepped(world, 0)
        (rank,) = world.executors
        every = [p for stage in rank.stages.values() for p in stage.module.parameters()]
        every[-1].data.mul_(0.5)
        optimizer = optimizer_of(rank)
        has = {p for group in optimizer.param_groups for p in group["params"]}
        optimizer.add_param_group({"params": [p for p in every if p not in has], "lr": 0.1})
        optimizer.param_groups[0]["lr"] *= 2
        stepped(world, 1)
        every[-1].data = every[-1].data * 2  # memory that the host does not know
        stepped(world, 2)
        found.append(left(world))
    assert equal(*found)


def test_what_takes_no_gradient_and_what_has_no_number_may_be_there() -> None:
    """An optimizer of all parameters also has frozen and empty ones of a trained stage."""
    found = []
    for states in WHERE:
        program = schedir.compile(
            interleaved,
            PipelineShape(1, 2, 3),
            progress_model="per_edge",
            optimizer_placement=states,
        )
        stages = gpt_stages(program.shape.stages, tied=False)
        next(stages[1].parameters()).requires_grad_(False)
        stages[2].requires_grad_(False)
        stages[0].register_parameter("nothing", nn.Parameter(torch.empty(0)))
        world = InProcessExecutor(
            program, stages, loss=gpt.loss, boundary=BOUNDARY, optimizer=ADAMW
        )
        found.append([*stepped(world, 0, 1), *left(world)])
    assert equal(*found)


# ---------------------------------------------------------------- location of the states


def test_the_host_steps_in_a_thread_of_its_own_and_nothing_is_left() -> None:
    """Gradients and weights on the host are NaN when the step has ended."""
    world = made(
        schedir.compile(interleaved, PipelineShape(1, 4, 3), optimizer_placement="cpu_step"), ADAMW
    )
    seen: list[str] = []
    own = steps_of(world)
    step = own.step

    def watched(stage: int, finite: Tensor) -> None:
        seen.append(threading.current_thread().name)
        step(stage, finite)

    with patch.object(own, "step", watched):
        stepped(world, 0, 1)
    assert seen == ["lane HOST"] * 6
    assert all(
        t.isnan().all() for part in own.host_parameters.values() for t in part.list_host_tensors()
    )
    spans = world.timeline().spans
    assert (spans["end"] > spans["start"])[spans["lane"] == Lane.HOST].all()


def test_as_much_is_on_each_tier_as_was_predicted() -> None:
    shape = PipelineShape(1, 2, 3)
    stages, (x, y, _) = gpt_stages(shape.stages, tied=False), batch(2)
    sizes = measure_sizes(
        stages, x[0], y[0], loss=gpt.loss, boundary=BOUNDARY, optimizer_state=ADAMW
    )
    world = made(schedir.compile(looped_bfs, shape, optimizer_placement="cpu_step"), ADAMW)
    stepped(world, 0, 1)
    (rank,) = world.executors
    own = steps_of(world)
    (host,) = compute_footprints(world.program, sizes, "host")
    assert set(host.total_bytes) == {sum(t.nbytes for t in own.list_host_memory())}
    kept = [t for each in optimizer_of(rank).state.values() for t in each.values()]
    assert sum(t.nbytes for t in kept) == host.static_memory["optimizer"][1] and kept
    (device,) = compute_footprints(world.program, sizes)
    assert "optimizer" not in device.static_memory and not device.dynamic_memory["state"][1].any()


# ---------------------------------------------------------------- refusals


class Draws(torch.optim.SGD):
    """Draws random numbers, for example to round stochastically."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.rand_like(p.grad))
        return super().step(closure)


def test_what_the_host_cannot_step_is_refused() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), optimizer_placement="cpu_step")
    capturable, none = partial(torch.optim.AdamW, capturable=True), cast(Any, None)
    with pytest.raises(ModelError, match="AdamW is capturable"):
        made(program, capturable)
    with pytest.raises(ModelError, match="this rank has no optimizer"):
        made(program, none)
    with pytest.raises(ExecutionError, match="Draws draws random numbers"):
        stepped(made(program, partial(Draws, lr=0.1)), 0)


def test_an_error_of_the_host_names_its_instruction_and_a_later_step_is_right() -> None:
    world = made(
        schedir.compile(interleaved, PipelineShape(1, 2, 2), optimizer_placement="cpu_step"), ADAMW
    )
    stepped(world, 0)
    hook: Any = lambda *_: None  # noqa: E731
    handle = optimizer_of(world.executors[0]).register_step_post_hook(hook)
    with pytest.raises(ExecutionError, match="has hooks on its step") as told:
        stepped(world, 1)
    assert "host_step" in str(told.value.sites[0].instr)
    handle.remove()


def test_an_own_optimizer_is_stepped() -> None:
    kind = type("Known", (torch.optim.SGD,), {"elementwise": True})
    found = []
    for states in WHERE:
        world = made(
            schedir.compile(one_f_one_b, PipelineShape(2, 2), optimizer_placement=states),
            lambda own: kind(own, lr=0.1, momentum=0.9),
        )
        stepped(world, 0, 1)
        found.append(left(world))
    assert equal(*found)
