"""Tests that steps with NaN or infinite values change neither weights nor optimizer states."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.schedules import one_f_one_b, pipedream_2bw
from tests.cases import cases, each_value
from tests.cpu.tiny_stages import (
    BOUNDARY,
    copy_parameters,
    gpt_stages,
    have_same_bits,
    make_batch,
    split_1f1b,
)


def sgd(**options: Any) -> Callable[[Any], Any]:
    return partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, **options)


def adamw(**options: Any) -> Callable[[Any], Any]:
    return partial(torch.optim.AdamW, lr=0.1, **options)


class Stranger:
    """An optimizer that has only a `step` method."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)


class AveragingOptimizer(torch.optim.AdamW):
    """An optimizer that also averages the weights."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1, fused=True)
        self.averages = [p.detach().clone() for p in parameters]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for average, p in zip(self.averages, self.param_groups[0]["params"], strict=True):
            average.lerp_(p.detach(), 0.5)


class WrappingOptimizer:
    """An optimizer that wraps another one, as schedule-free optimizers do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        self.averages = [torch.zeros(())]

    def step(self) -> None:
        self.inner.step()
        self.averages[0] += 1


def hooked(parameters: list[nn.Parameter]) -> Any:
    """Return an optimizer with a hook on its step."""
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    optimizer.averages = [torch.zeros(())]
    optimizer.register_step_post_hook(lambda *_: optimizer.averages[0].add_(1))
    return optimizer


def spoilt(stage: nn.Module) -> nn.Module:
    """Make a stage multiply its output and its gradient by its attributes."""
    attributes: Any = stage
    attributes.output = attributes.gradient = 1.0

    def spoil(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
        y = y * attributes.output
        if attributes.gradient != 1.0:
            y.register_hook(lambda dy: dy * attributes.gradient)
        return y

    stage.register_forward_hook(spoil)
    return stage


def make_ranks(program: Program, make: Any, dtype: torch.dtype = torch.float32) -> Any:
    stages = [spoilt(stage.to(dtype)) for stage in gpt_stages(program.shape.stages, tied=False)]
    is_16_bit = dtype != torch.float32
    for stage in stages if is_16_bit else ():
        use_float32_gradients(stage)
    return InProcessExecutor(
        program, stages, loss=gpt.loss, boundary=Boundary(BOUNDARY.shape, dtype),
        optimizer=(lambda ps: MainOptimizer(ps, make)) if is_16_bit else make,
    )  # fmt: skip


def learned(world: Any) -> list[Tensor]:
    """Return clones of the weights and then of the optimizer states."""
    weights, states = copy_parameters(*world.executors), list[Tensor]()
    for rank in world.executors:
        optimizer = rank.resources.optimizer
        weights += [*getattr(optimizer, "main_parameters", []), *getattr(optimizer, "averages", [])]
        states_of_weights = getattr(getattr(optimizer, "inner", optimizer), "state", {}).values()
        states += [
            t for state in states_of_weights for t in state.values() if isinstance(t, Tensor)
        ]
    return [t.detach().clone() for t in (*weights, *states)]


def get_finite(world: Any) -> list[list[bool]]:
    """Return for each rank which of its last updates were finite."""
    return [rank.finite_updates.tolist() for rank in world.executors]


def set_stage(world: Any, stage: int, output: float = 1.0, gradient: float = 1.0) -> None:
    for rank in world.executors:
        if stage in rank.stages:
            vars(rank.stages[stage].module).update(output=output, gradient=gradient)


SPOILS = [
    {"stage": 0, "output": math.nan},
    {"stage": 1, "output": math.inf},
    {"stage": 2, "output": math.nan},
    {"stage": 2, "gradient": math.nan},  # all gradients, while the loss is finite
    {"stage": 0, "gradient": math.inf},  # only the gradients of the first stage
]


OPTIMIZERS: list[tuple[Any, torch.dtype]] = cases(
    [
        (adamw(), torch.float32),
        (sgd(fused=True), torch.float32),
        (Stranger, torch.float32),
        (AveragingOptimizer, torch.float32),
        (WrappingOptimizer, torch.float32),
        (hooked, torch.float32),
        (adamw(fused=True), torch.bfloat16),
    ],
    [(adamw(fused=True), torch.float32), (sgd(), torch.float32), (adamw(), torch.bfloat16)],
)


@pytest.mark.parametrize(
    ("make", "dtype", "schedule", "spoil"),
    each_value(OPTIMIZERS, [one_f_one_b, split_1f1b], SPOILS),
)
def test_nonfinite_step_changes_nothing(
    make: Any, dtype: torch.dtype, schedule: Any, spoil: dict[str, Any]
) -> None:
    """The first nonfinite step is before the first update, when optimizers have no states."""
    program = compile(schedule, PipelineShape(3, 2), clip_grad_norm=True)
    ranks, plain = make_ranks(program, make, dtype), make_ranks(program, make, dtype)
    for step in range(2):
        before = learned(ranks)
        set_stage(ranks, **spoil)
        ranks.step(*make_batch(2, seed=7))
        assert get_finite(ranks) == [[False]] * 3
        after = learned(ranks)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
        set_stage(ranks, spoil["stage"])
        for world in (ranks, plain):
            world.step(*make_batch(2, seed=step))
            assert get_finite(world) == [[True]] * 3
        assert have_same_bits(learned(ranks), learned(plain))
    assert not all(torch.equal(a, b) for a, b in zip(before, learned(ranks), strict=False))


def add_infinity(y: Tensor, target: Tensor) -> Tensor:
    """Return an infinite loss for a target that a mask forbids. Its gradients are finite."""
    return gpt.loss(y, target) + (math.inf if target.max() < 0 else 0.0)


def mean(y: Tensor, target: Tensor) -> Tensor:
    """Return a mean, which is NaN in torch if there are no targets. Its gradients are then 0."""
    return nn.functional.cross_entropy(y.flatten(0, -2), target.flatten(), ignore_index=-1)


@pytest.mark.parametrize("loss", [add_infinity, mean])
@pytest.mark.parametrize("schedule", [one_f_one_b, split_1f1b])
def test_nonfinite_loss_with_finite_gradients_is_nonfinite(schedule: Any, loss: Any) -> None:
    program = compile(schedule, PipelineShape(3, 4), clip_grad_norm=True)
    stages = gpt_stages(3, tied=False)
    world = InProcessExecutor(program, stages, loss=loss, boundary=BOUNDARY, optimizer=adamw())
    inputs, targets, scale = make_batch(4)
    before = copy_parameters(*world.executors)
    targets[2] = -1
    assert not world.step(inputs, targets, scale).isfinite()
    assert get_finite(world) == [[False]] * 3
    assert have_same_bits(before, copy_parameters(*world.executors))


class ComplexStage(nn.Module):
    """A module with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).imag


def test_norm_of_complex_gradients_counts_both_parts() -> None:
    torch.manual_seed(0)
    stages, x = [ComplexStage(), ComplexStage()], torch.randn(4, 3, 5)
    world = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True), stages,
        loss=lambda y, t: y.square().sum(), boundary=(3, 5),
        gradients=GradientOptions(max_norm=math.inf),
    )  # fmt: skip
    world.step(x, x)
    grads = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    expected_norm = torch.stack([g.abs().double().square().sum() for g in grads]).sum().sqrt()
    assert float(world.executors[0].grad_norm) == pytest.approx(float(expected_norm), rel=1e-6)


@pytest.mark.parametrize("clip", [False, True])
def test_ranks_decide_alone_without_norm(clip: bool) -> None:
    world = make_ranks(compile(one_f_one_b, PipelineShape(3, 4), clip_grad_norm=clip), adamw())
    set_stage(world, 1, gradient=math.inf)
    world.step(*make_batch(4))
    finite = [bool(rank.finite_updates) for rank in world.executors]
    assert finite == [False, False, not clip]
    assert all(p.isfinite().all() for p in copy_parameters(*world.executors))


def test_nonfinite_gradients_are_kept() -> None:
    world = make_ranks(compile(one_f_one_b, PipelineShape(2, 2), clip_grad_norm=True), adamw())
    set_stage(world, 0, gradient=math.inf)
    world.step(*make_batch(2))
    assert not all(g.isfinite().all() for g in world.executors[0].stages[0].gradients.flat)
    assert all(g.isfinite().all() for g in world.executors[1].stages[1].gradients.flat)


def test_each_update_has_finite_flag() -> None:
    program = compile(
        pipedream_2bw, PipelineShape(2, 6, optimizer_steps=3, weight_delay=1), clip_grad_norm=True
    )
    ranks, plain = make_ranks(program, adamw()), make_ranks(program, adamw())
    inputs, targets, scale = make_batch(6)
    last = ranks.executors[1].stages[1].module

    forwards: list[int] = []
    last.register_forward_pre_hook(lambda *_: forwards.append(1))
    last.register_forward_hook(lambda m, g, y: y * (math.nan if len(forwards) in (3, 4) else 1.0))
    for world in (ranks, plain):
        world.step(inputs, targets, scale)
    assert get_finite(ranks) == [[True, False, True]] * 2
    assert all(t.isfinite().all() for t in learned(ranks))
    assert not have_same_bits(learned(ranks), learned(plain))
