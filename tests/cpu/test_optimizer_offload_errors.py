"""Tests of optimizer states on the host: refused optimizers, and changes between steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
)
from tests.cpu.optimizer_offload_programs import (
    ADAMW,
    are_equal,
    compile_on_both_tiers,
    get_optimizer,
    make_executor,
    read_training_state,
    run_steps_in_random_order,
)
from tests.cpu.tiny_stages import copy_parameters, list_parameters

torch.set_num_threads(1)


ON_TWO_RANKS, ON_ONE_RANK = (
    schedir.compile(schedule, shape, optimizer_placement="host")
    for schedule, shape in (
        (one_f_one_b, PipelineShape(2, 2)), (interleaved, PipelineShape(1, 2, 2)),
    )
)  # fmt: skip


class UserOptimizer(torch.optim.SGD):
    """An optimizer class that is not part of torch."""


def make_hooked_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = ADAMW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "LBFGS.step needs the argument"),
        (lambda own: UserOptimizer(own, lr=0.1), "UserOptimizer may not be elementwise"),
        (None, "this rank has no optimizer"),
        (lambda own: ADAMW([*own, nn.Parameter(torch.ones(3))]),
         r"a parameter of shape \[3\] that is in none"),
        (make_hooked_optimizer, "AdamW has hooks on its step"),
        (lambda own: type("Two", (), {"step": lambda self: None})(), "not a torch.optim.Optimizer"),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_step_by_stage_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        make_executor(ON_TWO_RANKS, make)


def test_user_optimizer_may_declare_elementwise() -> None:
    kind: Any = type("Known", (UserOptimizer,), {"elementwise": True})
    run_steps_in_random_order(
        make_executor(ON_TWO_RANKS, partial(kind, lr=0.1, momentum=0.9)), 0, 1
    )


def test_later_step_hook_is_refused_before_any_change() -> None:
    world = make_executor(ON_ONE_RANK, ADAMW)
    run_steps_in_random_order(world, 0)
    (rank,) = world.executors
    before = copy_parameters(rank)
    get_optimizer(rank).register_step_post_hook(lambda *_: None)
    with pytest.raises(ExecutionError, match="stage_step"):
        run_steps_in_random_order(world, 1)
    assert are_equal(before, copy_parameters(rank))
    assert not any(t.isnan().any() for t in read_training_state(world))


def test_programs_with_other_optimizer_placement_are_refused() -> None:
    device, host = compile_on_both_tiers(one_f_one_b, PipelineShape(2, 2))
    on_host = schedir.compile(gpipe, PipelineShape(2, 2), optimizer_placement="host")
    with pytest.raises(ModelError, match="optimizer_placement is 'host'"):
        make_executor(device, ADAMW, extra_programs=[on_host])
    make_executor(host, ADAMW, extra_programs=[on_host])


def test_later_parameter_groups_are_stepped() -> None:
    results = []
    for program in compile_on_both_tiers(interleaved, PipelineShape(1, 4, 3)):
        world = make_executor(program, lambda parameters: ADAMW(parameters[-3:]))
        run_steps_in_random_order(world, 0)
        (rank,) = world.executors
        optimizer = get_optimizer(rank)
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in list_parameters(rank) if p not in optimized]
        optimizer.add_param_group({"params": others, "lr": 0.1})
        run_steps_in_random_order(world, 1, 2)
        results.append(read_training_state(world))
    assert are_equal(*results)


def test_later_parameter_of_no_stage_is_refused() -> None:
    world = make_executor(ON_ONE_RANK, ADAMW)
    run_steps_in_random_order(world, 0)
    (rank,) = world.executors
    get_optimizer(rank).add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ModelError, match=r"a parameter of shape \[3\] that is in none"):
        run_steps_in_random_order(world, 1)
    get_optimizer(rank).param_groups.pop()
    run_steps_in_random_order(world, 1)
