"""Stages made from functions, with one weight each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import gpipe, interleaved


class FunctionStage(nn.Module):
    """A stage whose forward is a given function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.ones(4)), run

    def forward(self, *xs: Tensor, **keywords: Any) -> Any:
        return self.run(self.weight, *xs, **keywords)


FLOAT_AND_INT_BOUNDARIES = (Boundary((4,)), Boundary((4,), torch.int64))
TWO_FLOAT_BOUNDARIES = (Boundary((4,)), Boundary((4,)))
X, COUNT = torch.ones(2, 4), torch.arange(4)


def multiply_first_input(w: Tensor, x: Tensor, *others: Tensor, **keywords: Any) -> Tensor:
    return w * x


def return_two_outputs(w: Tensor, x: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    return w * x, COUNT.clone()


def squared_error_sum(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def output_sum(y: Tensor, target: Tensor) -> Tensor:
    return y.sum()


def get_weight_gradient(world: InProcessExecutor, stage: int) -> list[float]:
    """Return the gradient of a stage's weight."""
    found = [own.stages[stage].module for own in world.executors if stage in own.stages]
    grad = found[0].get_parameter("weight").grad
    assert grad is not None
    return cast("list[float]", grad.tolist())


def make_executor(*runs: Callable[..., Any], ranks: int = 2, **how: Any) -> InProcessExecutor:
    """Return an executor with stages made from functions, equally many on each rank."""
    shape = PipelineShape(ranks, 2, len(runs) // ranks)
    stages = [FunctionStage(run) for run in runs]
    how = {"loss": squared_error_sum, "boundary": FLOAT_AND_INT_BOUNDARIES, **how}
    schedule = how.pop("schedule", gpipe if len(runs) == ranks else interleaved)
    return InProcessExecutor(
        compile(schedule, shape), stages, execution=ExecutionOptions(record_timestamps=False), **how
    )
