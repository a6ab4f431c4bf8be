"""Tests of beginners' arguments, which are accepted as meant or refused with what is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError, ModelError, SchedirError, UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary, ModelBoundaries
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import one_f_one_b
from schedir.transports.gloo import GlooTransport

GOLDEN = Path(__file__).parents[1] / "golden" / "given.txt"
PROGRAM = compile(one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True)
FREE = compile(one_f_one_b, PipelineShape(2, 4))
X = torch.arange(24.0).view(4, 2, 3)


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(2)]


class Ungraded(nn.Linear):
    """A layer that trains nothing by mistake."""

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Silent(nn.Linear):
    """A layer whose forward lacks its return."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return None  # type: ignore[return-value]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def world(**given: Any) -> InProcessExecutor:
    told: dict[str, Any] = {"program": PROGRAM, "stages": modules(), "loss": squares}
    told |= {"boundary": (2, 3)} | given
    return InProcessExecutor(told.pop("program"), told.pop("stages"), **told)


def rank(number: Any = 0, **given: Any) -> Executor:
    told: dict[str, Any] = {"stages": modules(), "transport": world().mailboxes[0], "loss": squares}
    told |= {"boundary": (2, 3), "program": PROGRAM} | given
    return Executor(told.pop("program"), number, told.pop("stages"), told.pop("transport"), **told)


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, 3], torch.Size((2, 3)), np.array([2, 3]), (np.int64(2), 3)], ids=repr
)
def test_shapes_of_all_kinds_are_boundaries(shape: Any) -> None:
    assert Boundary(shape) == Boundary((2, 3)) and type(Boundary(shape).shape) is tuple
    same = {hash(Boundary(shape)), hash(Boundary((2, 3)))}
    assert len(same) == 1
    assert ModelBoundaries.from_edges(shape, 2).stage_boundaries[0].tensors == (Boundary((2, 3)),)
    measure_sizes(modules(), X[0], X[0], loss=squares, boundary=shape)


def test_a_number_is_the_shape_of_a_vector() -> None:
    assert Boundary(4).shape == (4,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [(2, -3), (2.5, 3), "23", None, (True, 3), ((2, 3),), (0, 3), X, Boundary], ids=repr
)
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(ModelError, match="integers of at least 1"):
        Boundary(shape)
    with pytest.raises(ModelError, match="integers of at least 1"):
        world(boundary=shape)


@pytest.mark.parametrize("dtype", ["float32", np.float32, float, None], ids=repr)
def test_what_is_no_type(dtype: Any) -> None:
    with pytest.raises(ModelError, match=r"must be a torch\.dtype, not"):
        Boundary((2, 3), dtype)


def test_stages_by_number_and_in_order() -> None:
    losses = [
        float(world(stages=stages).step(X, X))
        for stages in (
            modules(), tuple(modules()), nn.Sequential(*modules()), nn.ModuleList(modules()),
            dict(enumerate(modules())), dict(reversed([*enumerate(modules())])),
        )
    ]  # fmt: skip
    assert len({*losses}) == 1
    own = modules()
    for stages in (own, {0: own[0]}, nn.ModuleList(own)):
        assert rank(stages=stages).stages[0].module is own[0]


WRONG: dict[str, Callable[[], object]] = {
    "stages by half": lambda: world(stages={0: modules()[0]}),
    "stages by name": lambda: world(stages={"0": modules()[0], "1": modules()[1]}),
    "one module": lambda: world(stages=modules()[0]),
    "too many stages": lambda: world(stages=modules() * 2),
    "classes": lambda: world(stages=[nn.Linear, nn.Linear]),
    "functions": lambda: world(stages=[squares, squares]),
    "another's stage": lambda: rank(stages={1: modules()[1]}),
    "half of all stages": lambda: rank(stages=modules()[:1]),
    "an optimizer": lambda: world(optimizer=torch.optim.SGD(modules()[0].parameters(), 0.1)),
    "an optimizer's name": lambda: world(optimizer="sgd"),
    "the optimizer of another model": lambda: rank(
        optimizer=torch.optim.SGD(modules()[0].parameters(), 0.1)
    ),
    "a maker of optimizers": lambda: rank(optimizer=torch.optim.SGD),
    "a function": lambda: rank(optimizer=lambda p: torch.optim.SGD(p, 0.1)),
    "a maker of loss scales": lambda: rank(
        gradients=GradientOptions(loss_scale=LossScale)  # type: ignore[arg-type]
    ),
    "options of gradients in a dict": lambda: world(gradients={"max_norm": 1.0}),
    "options of the execution as a flag": lambda: world(execution=False),
    "a loss's name": lambda: world(loss="mse"),
    "a loss's class": lambda: world(loss=nn.MSELoss),
    "a loss without a target": lambda: world(loss=lambda output: output.mean()),
    "no norm": lambda: world(gradients=GradientOptions(max_norm=math.nan)),
    "a norm below": lambda: world(gradients=GradientOptions(max_norm=-1)),
    "a norm of what clips nothing": lambda: world(
        program=FREE, gradients=GradientOptions(max_norm=0.5)
    ),
    "a seed of text": lambda: world(seed="7"),
    "a flag of text": lambda: world(execution=ExecutionOptions(record_timestamps="no")),  # type: ignore[arg-type]
    "a shape without order": lambda: world(boundary={2, 3}),
    "a schedule": lambda: world(program=one_f_one_b),
    "a shape": lambda: rank(program=PipelineShape(2, 4)),
    "a rank too many": lambda: rank(2),
    "rank and stages exchanged": lambda: rank(tuple(modules()), stages=0),
    "replicas in one process": lambda: world(
        program=compile(one_f_one_b, PipelineShape(2, 4), dp=2)
    ),
    "a last stage that returns nothing": lambda: world(stages=[*modules()[:1], Silent(3, 3)]).step(
        X, X
    ),
    "a reference whose last stage returns nothing": lambda: run_sequential(
        [*modules()[:1], Silent(3, 3)], X, X, loss=squares
    ),
    "sizes of a last stage that returns nothing": lambda: measure_sizes(
        [*modules()[:1], Silent(3, 3)], X[0], X[0], loss=squares, boundary=(2, 3)
    ),
    "no transport": lambda: rank(transport="gloo"),
    "losses one by one": lambda: world(loss=lambda y, t: y - t).step(X, X),
    "a loss of Python": lambda: world(loss=lambda y, t: 5.0).step(X, X),
    "half a seed": lambda: world(seed=1.5),
    "no seed": lambda: run_sequential(modules(), X, X, loss=squares, seed=None),  # type: ignore[arg-type]
    "a mean as scale": lambda: world().step(X, X, "mean"),  # type: ignore[arg-type]
    "a stage without gradient": lambda: world(stages=[Ungraded(3, 3), nn.Linear(3, 3)]).step(X, X),
    "a recomputed stage without gradient": lambda: world(
        program=compile(one_f_one_b, PipelineShape(2, 4), recompute="all"),
        stages=[Ungraded(3, 3), nn.Linear(3, 3)],
    ).step(X, X),
    "a loss without gradient": lambda: world(loss=lambda y, t: squares(y, t).detach()).step(X, X),
    "no arguments": lambda: Executor(PROGRAM),  # type: ignore[call-arg]
    "an old argument": lambda: rank(alike=True),
    "an old argument of gradients": lambda: world(max_norm=1.0),
    "an old argument of options": lambda: GradientOptions(adds=True),  # type: ignore[call-arg]
    "stages of other ranks": lambda: rank(other_rank_stages=modules()[1:]),
    "no targets": lambda: world().step(X, None),  # type: ignore[arg-type]
    "inputs one by one": lambda: world().step(iter(X), X),
    "one number": lambda: world().step(X, torch.tensor(1.0)),
    "a reference's stage": lambda: run_sequential(modules()[0], X, X, loss=squares),  # type: ignore[arg-type]
    "a reference's loss": lambda: run_sequential(modules(), X, X, loss=nn.MSELoss),  # type: ignore[arg-type]
    "a reference's inputs": lambda: run_sequential(modules(), X[:3], X, loss=squares),
    "a reference's program": lambda: run_sequential(
        modules(),
        X,
        X,
        loss=squares,
        program=one_f_one_b,  # type: ignore[arg-type]
    ),
    "sizes of inputs": lambda: measure_sizes(
        modules(),
        {"x": X},  # type: ignore[arg-type]
        X[0],
        loss=squares,
        boundary=(2, 3),
    ),
    "sizes of numbers": lambda: measure_sizes([1, 2], X[0], X[0], loss=squares, boundary=(2, 3)),  # type: ignore[list-item]
    "sizes without a loss": lambda: measure_sizes(
        modules(),
        X[0],
        X[0],
        loss=None,  # type: ignore[arg-type]
        boundary=(2, 3),
    ),
    "splits of stages": lambda: make_backward_splittable(modules()),  # type: ignore[arg-type]
}


def told(wrong: Callable[[], object]) -> str:
    with pytest.raises((ModelError, UsageError, ExecutionError)) as error:
        wrong()
    return f"{type(error.value).__name__}: {error.value}"


def test_what_cannot_be_meant_is_refused_in_one_way() -> None:
    said = "".join(f"{name}\n  {told(wrong)}\n" for name, wrong in WRONG.items())
    assert said == GOLDEN.read_text()


@pytest.mark.parametrize("seconds", ["60", [60], 0, -1, math.nan], ids=repr)
def test_what_is_no_timeout(seconds: Any) -> None:
    with pytest.raises(UsageError) as caught:
        GlooTransport(PROGRAM, seconds)
    assert caught.value.fields == ("timeout",)


def test_what_is_no_program() -> None:
    one: Any = 5
    with pytest.raises(UsageError):
        GlooTransport(PROGRAM, extra_programs=[one])
    with pytest.raises(UsageError):
        world().step(X, X, program=one)


def test_seeds_of_all_kinds_are_numbers() -> None:
    for seed in (np.int64(3), torch.tensor(3), -1, 2**70, True):
        world(seed=seed).step(X, X)


def test_a_batch_that_is_not_divided_into_microbatches() -> None:
    batch = X.flatten(0, 1)
    with pytest.raises(ExecutionError, match=f"{len(batch)} inputs for {len(X)} micro") as caught:
        world().step(batch, batch)
    hint = f"divide a batch into microbatches: inputs.unflatten(0, ({len(X)}, -1))"
    assert caught.value.hint == hint and torch.equal(batch.unflatten(0, (len(X), -1)), X)


def test_a_loss_of_one_number_in_brackets_is_that_number() -> None:
    losses = [
        world(loss=loss).step(X, X)
        for loss in (squares, lambda y, t: squares(y, t).view(1), lambda y, t: squares(y, t)[None])
    ]
    assert {loss.shape for loss in losses} == {torch.Size()} and len({*map(float, losses)}) == 1
    with pytest.raises(SchedirError):
        run_sequential(modules(), X, X, loss=lambda y, t: y - t)
