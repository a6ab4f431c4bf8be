"""A training step as a CUDA graph: what changes from step to step, and what stays."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.plan import Plan
from schedir.runtime.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import MainOptimizer
from schedir.schedules import one_f_one_b
from schedir.training import gpt
from tests.cpu.tiny_stages import BOUNDARY, batch, gpt_stages
from tests.gpu.test_streams import on_gpu


def training(dtype: torch.dtype, **options: Any) -> Executor:
    """One rank with AdamW, whose large epsilon makes no large steps of small differences."""
    make: Any = partial(torch.optim.AdamW, lr=0.1, eps=1e-3, **options)
    world = InProcess(
        compile(one_f_one_b, Plan(1, 3), clip=True),
        on_gpu(1, dtype),
        loss=gpt.loss,
        boundary=Boundary(BOUNDARY.shape, dtype),
        optimizer=lambda parameters: MainOptimizer(parameters, make),
    )
    return world.ranks[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_follows_batches_scales_and_learning_rates(dtype: torch.dtype) -> None:
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-3)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    eager, captured = training(dtype), training(dtype, fused=True)
    before = [p.detach().cpu() for p in gpt_stages(1)[0].parameters()]
    inputs, targets, scale = batch(3)
    graphed = GraphedStep(captured, inputs, targets, scale)
    ours, theirs = ([*rank.stages[0].module.parameters()] for rank in (captured, eager))
    assert all(torch.equal(p.cpu(), was.to(dtype)) for p, was in zip(ours, before, strict=True))
    for step, rate in enumerate((0.1, 0.01, 0.03)):
        inputs, targets, scale = batch(3, seed=step)
        scale /= step + 1
        for rank in (eager, captured):
            optimizer: Any = rank.state.optimizer
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = eager.step(inputs.cuda(), targets.cuda(), scale)
        close(graphed.step(inputs, targets, scale), loss)
        close(captured.norm, eager.norm)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


def test_other_shapes_are_refused() -> None:
    inputs, targets, scale = batch(3)
    graphed = GraphedStep(training(torch.float32, fused=True), inputs, targets, scale)
    with pytest.raises(ModelError):
        graphed.step(inputs[:, :1], targets[:, :1])


@pytest.mark.parametrize("capturable", [False, True])
def test_an_optimizer_that_the_device_cannot_hold_back_is_refused(capturable: bool) -> None:
    with pytest.raises(ModelError):
        GraphedStep(training(torch.float32, capturable=capturable), *batch(3))
