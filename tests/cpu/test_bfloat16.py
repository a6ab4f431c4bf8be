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
from schedir.schedules import dualpipe
from tests.cpu.tiny_stages import BOUNDARY, gpt_stages, make_batch
from tests.cpu.train_command import train, train_in_this_process, write_config

HALF = Boundary(BOUNDARY.shape, torch.bfloat16)


def mixed_stages(
    stages: int, tied: bool = True, dtype: torch.dtype = torch.bfloat16
) -> list[nn.Module]:
    modules = [m.to(dtype) for m in gpt_stages(stages, tied)]
    for module in modules:
        use_float32_gradients(module)
    return modules


def test_stage_replicas_accumulate_in_float32() -> None:
    shape = PipelineShape(2, 4, placement="mirror")
    world = InProcessExecutor(
        compile(dualpipe, shape), mixed_stages(2, tied=False), loss=gpt.loss, boundary=HALF
    )
    world.step(*make_batch(4))
    dtypes = {f.dtype for r in world.executors for s in r.stages.values() for f in s.gradients.flat}
    assert dtypes == {torch.float32}


def test_full_and_split_backward_accumulate_in_float32() -> None:
    """In W and in a full B the gradient is a float32 sum of products."""
    weight = nn.Parameter(torch.randn(8, 4).bfloat16())
    x, dy = torch.randn(64, 16, 4).bfloat16(), torch.randn(64, 16, 8).bfloat16()
    expected = torch.einsum("mti,mto->oi", x.double(), dy.double())
    errors = {}
    for split in (False, True):
        for is_float32 in (False, True):
            weight.grad_dtype = torch.float32 if is_float32 else torch.bfloat16
            weight.grad = torch.zeros(8, 4, dtype=weight.grad_dtype)
            for inputs, output_gradient in zip(x, dy, strict=True):
                tape = DeferredGradients()
                if split:
                    with defer_weight_gradients(tape):
                        torch.autograd.backward(linear(inputs, weight), output_gradient)
                    tape.run()
                else:
                    torch.autograd.backward(linear(inputs, weight), output_gradient)
            error = (weight.grad.double() - expected).norm() / expected.norm()
            errors[split, is_float32] = float(error)
            weight.grad = None
    assert max(errors[False, True], errors[True, True]) < 1e-5
    # bfloat16 gradients have larger errors.
    assert min(errors[False, False], errors[True, False]) > 1e-3


def test_updates_below_bfloat16_resolution_are_kept() -> None:
    def largest_change(parameter: nn.Parameter, optimizer: Any) -> float:
        before = parameter.detach().clone()
        for _ in range(64):
            parameter.grad = torch.ones(4)
            optimizer.step()
        return float((parameter.detach() - before).float().abs().max())

    # The rate is less than 2 ** -8, the smallest step of a bfloat16 at 1.
    sgd = partial(torch.optim.SGD, lr=1e-3)
    main = nn.Parameter(torch.ones(4).bfloat16())
    main.grad_dtype = torch.float32
    optimizer = MainOptimizer([main], sgd)
    assert largest_change(main, optimizer) == pytest.approx(0.064, rel=0.05)
    assert optimizer.main_parameters[0].dtype == torch.float32
    alone = torch.ones(4).bfloat16()
    for _ in range(64):
        alone -= 1e-3
    assert alone.tolist() == [1.0] * 4  # without float32 copies


def test_parameters_without_gradient_are_unchanged() -> None:
    frozen, idle, main = (nn.Parameter(torch.ones(2).bfloat16()) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = MainOptimizer([frozen, idle, main], partial(torch.optim.SGD, lr=1.0))
    main.grad = torch.ones(2).bfloat16()  # a rounded gradient is accepted
    optimizer.step()
    assert [p.tolist() for p in (frozen, idle, main)] == [[1, 1], [1, 1], [0, 0]]
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_accumulate_of_equal_dtypes_is_exact() -> None:
    main, dy, x = torch.randn(3, 5), torch.randn(7, 3), torch.randn(7, 5)
    expected: Tensor = main + dy.t() @ x
    assert torch.equal(accumulate_(main, dy, x), expected)


@pytest.mark.parametrize(("precision", "tp"), [("bfloat16", 2), ("float16", 1)])
def test_16_bit_training_has_losses_near_float32(tmp_path: Path, precision: str, tp: int) -> None:
    config = str(write_config(tmp_path))
    sets = [f"train.precision={precision}", f"pipeline.tp={tp}"]
    losses = train(config, tmp_path / "half", *sets)
    float32_losses = train_in_this_process(config, tmp_path / "whole")
    assert losses != float32_losses
    assert losses == pytest.approx(float32_losses, rel=2e-2)
    assert losses[-1] < losses[0]
