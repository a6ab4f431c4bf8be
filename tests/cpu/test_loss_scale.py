"""Tests that float16 training with a loss scale equals training with torch.amp.GradScaler."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale, MainOptimizer
from schedir.schedules import one_f_one_b
from tests.cases import each_value
from tests.cpu.test_bfloat16 import mixed_stages
from tests.cpu.tiny_stages import BOUNDARY, make_batch, split_1f1b

HALF = Boundary(BOUNDARY.shape, torch.float16)
INITIAL_SCALE, STEPS, CLIP = 2.0**24, 14, 0.5  # large enough that steps overflow


half_stages = partial(mixed_stages, dtype=torch.float16)


def sgd(parameters: Any, fused: bool) -> MainOptimizer:
    """Return SGD, because Adam would amplify small differences."""
    return MainOptimizer(parameters, partial(torch.optim.SGD, lr=0.1, fused=fused))


def make_loss_scale() -> LossScale:
    return LossScale(INITIAL_SCALE, growth_interval=3)


@given(st.lists(st.booleans(), max_size=30), st.sampled_from([2.0**16, 2.0**127, 1e-44]))
def test_update_rule_equals_torch(finite: list[bool], start: float) -> None:
    scale = LossScale(start, growth_interval=3)
    value, good_steps = torch.tensor(start), torch.zeros((), dtype=torch.int32)
    for is_finite in finite:
        scale.update(torch.tensor(is_finite))
        torch._amp_update_scale_(value, good_steps, torch.tensor(float(not is_finite)), 2.0, 0.5, 3)
        assert (float(scale.value), int(scale.good_steps)) == (float(value), int(good_steps))


def test_default_constants_equal_torch() -> None:
    loss_scale, grad_scaler = LossScale(), torch.amp.GradScaler("cpu")
    assert float(loss_scale.value) == grad_scaler.get_scale()
    assert loss_scale.growth == grad_scaler.get_growth_factor()
    assert loss_scale.backoff == grad_scaler.get_backoff_factor()
    assert loss_scale.growth_interval == grad_scaler.get_growth_interval()


@pytest.fixture(scope="module")
def plain_loop() -> tuple[list[float], list[Tensor]]:
    """Train a plain loop with torch's scaler. Return its scales and the trained weights."""
    model = nn.Sequential(*half_stages(2, tied=False))
    optimizer = sgd(model.parameters(), fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=3)
    values = []
    inputs, targets, scale = make_batch(4)
    for _ in range(STEPS):
        model.zero_grad()
        for x, target in zip(inputs, targets, strict=True):
            scaler.scale(gpt.loss(model(x), target) * scale).backward()
        for p, main in zip(optimizer.parameters, optimizer.main_parameters, strict=True):
            main.grad = p.grad
        scaler.unscale_(optimizer.inner)
        torch.nn.utils.clip_grad_norm_(optimizer.main_parameters, CLIP)
        scaler.step(optimizer.inner)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_([*optimizer.parameters], [*optimizer.main_parameters])
        values.append(scaler.get_scale())
    return values, [p.detach() for p in optimizer.main_parameters]


@pytest.mark.parametrize(
    ("schedule", "fused"), each_value([one_f_one_b, split_1f1b], [True, False])
)
def test_pipeline_trains_like_plain_loop_with_grad_scaler(
    schedule: Any, fused: bool, plain_loop: tuple[list[float], list[Tensor]]
) -> None:
    values, expected = plain_loop
    assert {b / a for a, b in pairwise(values)} == {0.5, 1.0, 2.0}  # all possible changes occur
    world = InProcessExecutor(
        compile(schedule, PipelineShape(2, 4), clip_grad_norm=True),
        half_stages(2, tied=False),
        loss=gpt.loss,
        boundary=HALF,
        optimizer=partial(sgd, fused=fused),
        gradients=GradientOptions(max_norm=CLIP, loss_scale=make_loss_scale()),
    )
    for value in values:
        world.step(*make_batch(4))
        scales: list[Any] = [r.state.options.gradients.loss_scale for r in world.executors]
        assert [float(scale.value) for scale in scales] == [value] * 2
    trained = [p.detach() for r in world.executors for p in r.resources.optimizer.main_parameters]  # type: ignore[union-attr]
    start = [p.detach().float() for stage in half_stages(2, tied=False) for p in stage.parameters()]
    for weight, expected_weight, initial_weight in zip(trained, expected, start, strict=True):
        change = (expected_weight - initial_weight).norm()
        assert (weight - expected_weight).norm() <= 0.02 * change + 1e-5


def test_loss_scale_without_gradient_norm_is_refused() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4))
    gradients = GradientOptions(loss_scale=make_loss_scale())
    stages = half_stages(2, False)
    with pytest.raises(ModelError, match="needs the norm of the gradients"):
        InProcessExecutor(program, stages, loss=gpt.loss, boundary=HALF, gradients=gradients)
