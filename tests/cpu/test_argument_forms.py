"""Tests of the forms of arguments that beginners use.

An unambiguous form is accepted. Any other form is refused, and the error names the valid form.
"""

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
from schedir.ir.cost.sizes import Sizes
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models.huggingface import cut
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
from schedir.transports.transport import PeerLeft

GOLDEN = Path(__file__).parents[1] / "golden" / "given.txt"
PROGRAM = compile(one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True)
FREE = compile(one_f_one_b, PipelineShape(2, 4))
X = torch.arange(24.0).view(4, 2, 3)


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(2)]


class WithoutGradient(nn.Linear):
    """A layer whose forward disables gradients by mistake."""

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class DistributedDataParallel(nn.Sequential):
    """A wrapper with the name of torch's class, which needs no process group."""


class LostPeer(nn.Linear):
    """A stage that fails as a message does if only one rank makes a step and the other ends."""

    def forward(self, input: Tensor) -> Tensor:
        raise PeerLeft("rank 1 has ended")


class WithoutReturn(nn.Linear):
    """A layer whose forward lacks its return."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return None  # type: ignore[return-value]


def stages_without_return() -> list[nn.Module]:
    return [*make_stages()[:1], WithoutReturn(3, 3)]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def world(**changes: Any) -> InProcessExecutor:
    arguments: dict[str, Any] = {"program": PROGRAM, "stages": make_stages(), "loss": squares}
    arguments |= {"boundary": (2, 3)} | changes
    return InProcessExecutor(arguments.pop("program"), arguments.pop("stages"), **arguments)


def rank(number: Any = 0, **changes: Any) -> Executor:
    arguments: dict[str, Any] = {"stages": make_stages(), "transport": world().mailboxes[0]}
    arguments |= {"loss": squares, "boundary": (2, 3), "program": PROGRAM} | changes
    program, stages, transport = (arguments.pop(n) for n in ("program", "stages", "transport"))
    return Executor(program, number, stages, transport, **arguments)


def reference(stages: Any = None, inputs: Any = X, targets: Any = X, **changes: Any) -> Tensor:
    options: dict[str, Any] = {"loss": squares} | changes
    return run_sequential(make_stages() if stages is None else stages, inputs, targets, **options)


def measure(stages: Any = None, inputs: Any = X[0], **changes: Any) -> Sizes:
    options: dict[str, Any] = {"loss": squares, "boundary": (2, 3)} | changes
    return measure_sizes(make_stages() if stages is None else stages, inputs, X[0], **options)


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, 3], torch.Size((2, 3)), np.array([2, 3]), (np.int64(2), 3)], ids=repr
)
def test_boundary_accepts_any_sequence_of_integers(shape: Any) -> None:
    assert Boundary(shape) == Boundary((2, 3)) and type(Boundary(shape).shape) is tuple
    hashes = {hash(Boundary(shape)), hash(Boundary((2, 3)))}
    assert len(hashes) == 1
    assert ModelBoundaries.from_edges(shape, 2).stage_boundaries[0].tensors == (Boundary((2, 3)),)
    measure(boundary=shape)


def test_boundary_of_integer_is_vector() -> None:
    assert Boundary(4).shape == (4,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [(2, -3), (2.5, 3), "23", None, (True, 3), ((2, 3),), (0, 3), X, Boundary], ids=repr
)
def test_invalid_boundary_shape_is_refused(shape: Any) -> None:
    with pytest.raises(ModelError, match="integers of at least 1"):
        Boundary(shape)
    with pytest.raises(ModelError, match="integers of at least 1"):
        world(boundary=shape)


@pytest.mark.parametrize("dtype", ["float32", np.float32, float, None], ids=repr)
def test_invalid_boundary_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ModelError, match=r"must be a torch\.dtype, not"):
        Boundary((2, 3), dtype)


def test_stages_are_accepted_as_sequence_or_mapping() -> None:
    losses = [
        float(world(stages=stages).step(X, X))
        for stages in (
            make_stages(), tuple(make_stages()),
            nn.Sequential(*make_stages()), nn.ModuleList(make_stages()),
            dict(enumerate(make_stages())), dict(reversed([*enumerate(make_stages())])),
        )
    ]  # fmt: skip
    assert len({*losses}) == 1
    first_rank_stages = make_stages()
    for stages in (first_rank_stages, {0: first_rank_stages[0]}, nn.ModuleList(first_rank_stages)):
        assert rank(stages=stages).stages[0].module is first_rank_stages[0]


def make_scheduler(parameters: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, 0.1), 1)


NO_PROGRAM: Any = 5
UNTYPED: Callable[..., Any] = world


def share_optimizer() -> InProcessExecutor:
    """Create an executor that would step one optimizer once for each rank."""
    stages = make_stages()
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()])
    return world(stages=stages, optimizer=lambda _: optimizer)


WRONG: dict[str, Callable[[], object]] = {
    "stages by half": lambda: world(stages={0: make_stages()[0]}),
    "stages by name": lambda: world(stages={"0": make_stages()[0], "1": make_stages()[1]}),
    "one module": lambda: world(stages=make_stages()[0]),
    "too many stages": lambda: world(stages=make_stages() * 2),
    "classes": lambda: world(stages=[nn.Linear, nn.Linear]),
    "functions": lambda: world(stages=[squares, squares]),
    "another's stage": lambda: rank(stages={1: make_stages()[1]}),
    "half of all stages": lambda: rank(stages=make_stages()[:1]),
    "an optimizer": lambda: world(optimizer=torch.optim.SGD(make_stages()[0].parameters(), 0.1)),
    "an optimizer's name": lambda: world(optimizer="sgd"),
    "the optimizer of another model": lambda: rank(
        optimizer=torch.optim.SGD(make_stages()[0].parameters(), 0.1)
    ),
    "a maker of optimizers": lambda: rank(optimizer=torch.optim.SGD),
    "a function": lambda: rank(optimizer=lambda p: torch.optim.SGD(p, 0.1)),
    "a scheduler of the learning rate": lambda: world(optimizer=make_scheduler),
    "an optimizer with a closure": lambda: world(optimizer=torch.optim.LBFGS),
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
    "rank and stages exchanged": lambda: rank(tuple(make_stages()), stages=0),
    "replicas in one process": lambda: world(
        program=compile(one_f_one_b, PipelineShape(2, 4), dp=2)
    ),
    "a last stage that returns nothing": lambda: world(stages=stages_without_return()).step(X, X),
    "a reference without an output of the last stage": lambda: reference(stages_without_return()),
    "sizes of a last stage that returns nothing": lambda: measure(stages_without_return()),
    "no transport": lambda: rank(transport="gloo"),
    "losses one by one": lambda: world(loss=lambda y, t: y - t).step(X, X),
    "a loss of Python": lambda: world(loss=lambda y, t: 5.0).step(X, X),
    "half a seed": lambda: world(seed=1.5),
    "no seed": lambda: reference(seed=None),
    "a mean as scale": lambda: world().step(X, X, "mean"),  # type: ignore[arg-type]
    "a scale that is no number": lambda: world().step(X, X, math.nan),
    "arrays": lambda: world().step(X.numpy(), X),  # type: ignore[arg-type]
    "inputs by name": lambda: world().step({"x": X}, X),  # type: ignore[arg-type]
    "a stage without gradient": lambda: world(stages=[WithoutGradient(3, 3), nn.Linear(3, 3)]).step(
        X, X
    ),
    "a recomputed stage without gradient": lambda: world(
        program=compile(one_f_one_b, PipelineShape(2, 4), recompute="all"),
        stages=[WithoutGradient(3, 3), nn.Linear(3, 3)],
    ).step(X, X),
    "a loss without gradient": lambda: world(loss=lambda y, t: squares(y, t).detach()).step(X, X),
    "no arguments": lambda: Executor(PROGRAM),  # type: ignore[call-arg]
    "an old argument": lambda: rank(alike=True),
    "an old argument of gradients": lambda: world(max_norm=1.0),
    "an old argument of options": lambda: GradientOptions(adds=True),  # type: ignore[call-arg]
    "stages of other ranks": lambda: rank(other_rank_stages=make_stages()[1:]),
    "no targets": lambda: world().step(X, None),  # type: ignore[arg-type]
    "inputs one by one": lambda: world().step(iter(X), X),
    "one number": lambda: world().step(X, torch.tensor(1.0)),
    "a reference's stage": lambda: reference(make_stages()[0]),
    "a reference's loss": lambda: reference(loss=nn.MSELoss),
    "a reference's inputs": lambda: reference(inputs=X[:3]),
    "a reference's program": lambda: reference(program=one_f_one_b),
    "sizes of inputs": lambda: measure(inputs={"x": X}),
    "sizes of numbers": lambda: measure([1, 2]),
    "sizes without a loss": lambda: measure(loss=None),
    "a boundary without brackets": lambda: Boundary(2, 8),  # type: ignore[arg-type]
    "a stage in a wrapper": lambda: world(stages=[DistributedDataParallel(*make_stages())] * 2),
    "a module of a stage in a wrapper": lambda: world(
        stages=[nn.Sequential(nn.DataParallel(nn.Linear(3, 3))), nn.Linear(3, 3)]
    ),
    "a lazy stage": lambda: world(stages=[nn.LazyLinear(3), nn.Linear(3, 3)]),
    "no process group": lambda: GlooTransport(PROGRAM),
    "one optimizer of several ranks": share_optimizer,
    "a loss that fails": lambda: world(loss=lambda y, t: dict[str, Any]()["y"]).step(X, X.int()),
    "a scale rounded to 0": lambda: world().step(X, X, grad_scale=1 // 4),
    "a step on one rank": lambda: world(stages=[LostPeer(3, 3), nn.Linear(3, 3)]).step(X, X),
    "a step without targets": lambda: UNTYPED().step(X),
    "a step without arguments": lambda: UNTYPED().step(),
    "a step with another name": lambda: UNTYPED().step(input=X, targets=X),
    "an evaluation without targets": lambda: UNTYPED().evaluate(X),
    "a step with a program": lambda: UNTYPED().step(X, X, 1.0, None, (), PROGRAM),
    "a training without backwards": lambda: world(
        program=compile("forward_only", PipelineShape(2, 4)), optimizer=torch.optim.AdamW
    ).step(X, X),
    "a boundary of two microbatches": lambda: world(boundary=(4, 3)).step(X, X),
    "a boundary of all microbatches": lambda: world(boundary=(4, 2, 3)).step(X, X),
    "a boundary of one sample": lambda: world(boundary=(3,)).step(X, X),
    "a boundary in float32": lambda: world(stages=[s.double() for s in make_stages()]).step(
        X.double(), X.double()
    ),
    "a norm for a switch": lambda: compile("gpipe", PipelineShape(2, 4), clip_grad_norm=0.5),  # type: ignore[arg-type]
    "the step of another trainer": lambda: UNTYPED().train_step,
    "the zero_grad of torch": lambda: UNTYPED().zero_grad,
    "the state of torch": lambda: UNTYPED().state_dict,
    "the eval of torch": lambda: UNTYPED().eval,
    "a model's name to cut": lambda: cut("gpt2", 2),
    "numbers of layers to cut": lambda: cut(nn.Linear(3, 3), [1, 1]),  # type: ignore[arg-type]
    "an extra program that is none": lambda: GlooTransport(PROGRAM, extra_programs=[NO_PROGRAM]),
    "a step of no program": lambda: world().step(X, X, program=NO_PROGRAM),
    "a whole batch": lambda: world().step(X.flatten(0, 1), X.flatten(0, 1)),
    "splits of stages": lambda: make_backward_splittable(make_stages()),  # type: ignore[arg-type]
}


def read_error(call: Callable[[], object]) -> str:
    with pytest.raises((ModelError, UsageError, ExecutionError, AttributeError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def test_wrong_arguments_raise_expected_errors() -> None:
    errors = "".join(f"{name}\n  {read_error(call)}\n" for name, call in WRONG.items())
    assert errors == GOLDEN.read_text()


def test_optimizer_with_scheduler_is_accepted() -> None:
    schedulers = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, 0.1)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))  # replaces its step
        return optimizer

    world(optimizer=make_optimizer).step(X, X)
    assert len(schedulers) == 2


@pytest.mark.parametrize("seconds", ["60", [60], 0, -1, math.nan], ids=repr)
def test_invalid_timeout_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError) as caught:
        GlooTransport(PROGRAM, seconds)
    assert caught.value.fields == ("timeout",)


def test_seed_accepts_any_integer_type() -> None:
    for seed in (np.int64(3), torch.tensor(3), -1, 2**70, True):
        world(seed=seed).step(X, X)


def test_refused_step_keeps_executor() -> None:
    executor = world()
    for arguments in ((), (X,)):
        with pytest.raises(UsageError):
            executor.step(*arguments)
    executor.step(X, X)


def test_loss_with_one_element_counts_as_scalar() -> None:
    losses = [
        world(loss=loss).step(X, X)
        for loss in (squares, lambda y, t: squares(y, t).view(1), lambda y, t: squares(y, t)[None])
    ]
    assert {loss.shape for loss in losses} == {torch.Size()} and len({*map(float, losses)}) == 1
    with pytest.raises(SchedirError):
        reference(loss=lambda y, t: y - t)
