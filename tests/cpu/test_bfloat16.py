"""Tests of bfloat16 parameters with float32 gradients and optimizer states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.kernels.weight_gradient import accumulate_
from schedir.models import gpt
from schedir.runtime.autograd.split_backward import (
    DeferredGradients,
    defer_weight_gradients,
    linear,
)
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import dualpipe, gpipe, one_f_one_b
from tests.cpu.tiny_stages import BOUNDARY, batch, gpt_stages, gradients, same_bits, zb
from tests.cpu.train_command import CONFIG, alone, train

HALF = Boundary(BOUNDARY.shape, torch.bfloat16)


def mixed_stages(stages: int, tied: bool = True) -> list[nn.Module]:
    modules = [m.to(torch.bfloat16) for m in gpt_stages(stages, tied)]
    for module in modules:
        use_float32_gradients(module)
    return modules


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (gpipe, PipelineShape(2, 4)),
        (one_f_one_b, PipelineShape(3, 4)),
        (zb, PipelineShape(2, 4)),
        (zb, PipelineShape(1, 3)),
    ],
)
def test_schedules_give_the_bits_of_the_reference(schedule: Any, shape: PipelineShape) -> None:
    tied = shape.stages > 1
    inputs, targets, scale = batch(shape.microbatches)
    plain, ours = mixed_stages(shape.stages, tied=True), mixed_stages(shape.stages, tied=True)
    want = run_sequential(plain, inputs, targets, loss=gpt.loss, grad_scale=scale)
    world = InProcessExecutor(
        compile(schedule, shape, tied_weights=tied), ours, loss=gpt.loss, boundary=HALF
    )
    for seed in range(3):
        assert torch.equal(world.step(inputs, targets, scale, seed), want)
        got = gradients(ours)
        assert all(g.dtype == torch.float32 for stage in got for g in stage.values())
        assert same_bits(got, gradients(plain))


def test_second_holders_add_up_in_float32_too() -> None:
    shape = PipelineShape(2, 4, placement="mirror")
    world = InProcessExecutor(
        compile(dualpipe, shape), mixed_stages(2, tied=False), loss=gpt.loss, boundary=HALF
    )
    world.step(*batch(4))
    kinds = {f.dtype for r in world.executors for s in r.stages.values() for f in s.gradients.flat}
    assert kinds == {torch.float32}


def test_a_split_product_adds_up_without_rounding() -> None:
    """In W and in a whole B the gradient is a float32 sum of products."""
    weight = nn.Parameter(torch.randn(8, 4).bfloat16())
    x, dy = torch.randn(64, 16, 4).bfloat16(), torch.randn(64, 16, 8).bfloat16()
    want = sum((b.double().t() @ a.double() for a, b in zip(x, dy, strict=True)), torch.zeros(8, 4))
    errors = {}
    for split in (False, True):
        for wide in (False, True):
            weight.grad_dtype = torch.float32 if wide else torch.bfloat16
            weight.grad = torch.zeros(8, 4, dtype=weight.grad_dtype)
            for a, b in zip(x, dy, strict=True):
                tape = DeferredGradients()
                if split:
                    with defer_weight_gradients(tape):
                        torch.autograd.backward(linear(a, weight), b)
                    tape.run()
                else:
                    torch.autograd.backward(linear(a, weight), b)
            errors[split, wide] = float((weight.grad.double() - want).norm() / want.norm())
            weight.grad = None
    assert max(errors[False, True], errors[True, True]) < 1e-5
    assert (
        min(errors[False, False], errors[True, False]) > 1e-3
    )  # bfloat16 gradients have larger errors


def test_small_steps_are_not_lost() -> None:
    def moved(parameter: nn.Parameter, optimizer: Any) -> float:
        before = parameter.detach().clone()
        for _ in range(64):
            parameter.grad = torch.ones(4)
            optimizer.step()
        return float((parameter.detach() - before).float().abs().max())

    sgd = partial(
        torch.optim.SGD, lr=1e-3
    )  # less than 2 ** -8, the smallest step of a bfloat16 at 1
    main = nn.Parameter(torch.ones(4).bfloat16())
    main.grad_dtype = torch.float32
    optimizer = MainOptimizer([main], sgd)
    assert moved(main, optimizer) == pytest.approx(0.064, rel=0.05)
    assert optimizer.main_parameters[0].dtype == torch.float32
    alone = torch.ones(4).bfloat16()
    for _ in range(64):
        alone -= 1e-3
    assert alone.tolist() == [1.0] * 4  # without float32 copies


def test_frozen_parameters_and_missing_gradients_stay() -> None:
    frozen, idle, main = (nn.Parameter(torch.ones(2).bfloat16()) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = MainOptimizer([frozen, idle, main], partial(torch.optim.SGD, lr=1.0))
    main.grad = torch.ones(2).bfloat16()  # a rounded gradient is accepted
    optimizer.step()
    assert [p.tolist() for p in (frozen, idle, main)] == [[1, 1], [1, 1], [0, 0]]
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_accumulate_keeps_the_bits_where_types_agree() -> None:
    main, dy, x = torch.randn(3, 5), torch.randn(7, 3), torch.randn(7, 5)
    want: Tensor = main + dy.t() @ x
    assert torch.equal(accumulate_(main, dy, x), want)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_run_in_16_bits_learns_as_one_in_float32(tmp_path: Path, precision: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("schedules are programs; " * 200)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(text=text))
    half = train(str(config), tmp_path / "half", f"train.precision={precision}")
    whole = alone(str(config), tmp_path / "whole")
    assert half != whole
    assert half == pytest.approx(whole, rel=2e-2)
    assert half[-1] < half[0]
