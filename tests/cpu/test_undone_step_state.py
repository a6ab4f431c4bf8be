"""Tests that undone steps leave no trace, and that a gradient scale may be a tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import (
    LossScale,
    MainOptimizer,
    use_float32_gradients,
)
from schedir.runtime.step_rollback import undo_steps
from schedir.schedules import one_f_one_b
from tests.cpu.tiny_stages import (
    BOUNDARY,
    copy_gradients,
    copy_parameters,
    gpt_stages,
    have_same_bits,
    list_parameters,
    make_batch,
)


def make_stages(dtype: torch.dtype, wide: bool) -> list[nn.Module]:
    modules = [m.to(dtype) for m in gpt_stages(2)]
    for module in modules if wide else ():
        use_float32_gradients(module)
    return modules


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_tensor_grad_scale_equals_float_scale(dtype: torch.dtype, wide: bool, scaled: bool) -> None:
    inputs, targets, _ = make_batch(3)
    program = compile(one_f_one_b, PipelineShape(2, 3), tied_weights=True, clip_grad_norm=scaled)
    results = []
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        modules = make_stages(dtype, wide)
        world = InProcessExecutor(
            program, modules, loss=gpt.loss, boundary=Boundary(BOUNDARY.shape, dtype),
            gradients=GradientOptions(loss_scale=LossScale() if scaled else None),
        )  # fmt: skip
        world.step(inputs, targets, scale)
        results.append(copy_gradients(modules))
    assert have_same_bits(*results)


def make_trained_executor(adamw: bool, main: bool) -> Any:
    """Return an executor of one rank. It has run one step if its optimizer is AdamW."""
    modules = make_stages(torch.bfloat16 if main else torch.float32, main)[:1]

    make: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if adamw:
        make = partial(torch.optim.AdamW, lr=0.1)
    world = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(1, 2), clip_grad_norm=True),
        [nn.Sequential(*modules)], loss=lambda y, _: (y.float() - 1).square().sum(),
        boundary=BOUNDARY, optimizer=(lambda ps: MainOptimizer(ps, make)) if main else make,
        gradients=GradientOptions(loss_scale=LossScale(8.0, growth_interval=1)),
    )  # fmt: skip
    if adamw:
        world.step(*make_batch(2)[:2])
    return world


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("adamw", [False, True])
def test_undone_steps_restore_weights_and_optimizer_state(adamw: bool, main: bool) -> None:
    """Later steps have the same bits, with and without optimizer state before the undone steps."""
    plain, undone = make_trained_executor(adamw, main), make_trained_executor(adamw, main)
    rank = undone.executors[0]
    addresses = [p.data_ptr() for p in list_parameters(rank)]
    with undo_steps(rank.state):
        for _ in range(2):
            rank.step(*make_batch(2, seed=1)[:2])
    results = []
    for world in (plain, undone):
        for seed in (2, 3):
            world.step(*make_batch(2, seed)[:2])
        executor = world.executors[0]
        inner = getattr(executor.resources.optimizer, "inner", executor.resources.optimizer)
        states = [t for state in inner.state.values() for t in state.values()]
        loss_scale = executor.state.options.gradients.loss_scale
        results.append(
            [*list_parameters(executor), *states, loss_scale.value, loss_scale.good_steps]
        )
    assert [p.data_ptr() for p in results[1][: len(addresses)]] == addresses
    assert len(results[0]) > len(addresses) + 2
    assert have_same_bits(*results)


def test_nested_undo_steps_restores_state() -> None:
    world = make_trained_executor(adamw=True, main=False)
    (rank,) = world.executors
    before = copy_parameters(rank)
    rank.resources.optimizer = torch.optim.AdamW(list_parameters(rank), fused=True)
    with undo_steps(rank.state):
        with undo_steps(rank.state):
            rank.step(*make_batch(2)[:2])
        rank.step(*make_batch(2)[:2])
    assert have_same_bits(before, copy_parameters(rank))
