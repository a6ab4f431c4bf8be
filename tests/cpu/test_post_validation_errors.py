"""Tests of updates that are not validated: which accesses are refused, and what stays unchanged."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile, schedules
from schedir.errors import ExecutionError, ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import LossScale
from schedir.runtime.parameters.optimistic_step import OptimisticStep
from schedir.runtime.rank_state import ProgramService
from schedir.runtime.warm_up import undo_steps
from tests.cpu.test_nonfinite_steps import Stranger, hooked, learned
from tests.cpu.test_post_validation import ADAMW, same, squares

GOLDEN = Path(__file__).parents[1] / "golden" / "ahead.txt"
X = torch.arange(24.0).view(4, 2, 3)


def one(**how: Any) -> InProcessExecutor:
    program = compile(
        schedules.one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True, norm_check="after_step"
    )
    told: dict[str, Any] = {"loss": squares, "boundary": (2, 3), "optimizer": ADAMW} | how
    torch.manual_seed(0)
    stages = told.pop("stages", None) or [nn.Linear(3, 3) for _ in range(2)]
    return InProcessExecutor(program, stages, **told)


class Broken(nn.Linear):
    """Fails in its forward if `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("broken")
        return super().forward(x)


class Steps(ProgramService):
    """Counts the steps, and keeps the count between steps."""

    count = 0

    def begin_step(self) -> None:
        self.count += 1

    def preserve(self, preserved: PreservedState) -> None:
        preserved.add_fields(self, "count")


def test_a_service_keeps_its_state_when_a_step_runs_again() -> None:
    ranks = one(gradients=GradientOptions(max_norm=1e-3))
    counts = [rank.state.service(Steps) for rank in ranks.executors]
    for _ in range(3):
        ranks.step(X, X)
    assert ranks.executors[0].state.service(OptimisticStep).repeated_steps
    assert [each.count for each in counts] == [3, 3]
    with undo_steps(ranks.executors[0].state):
        counts[0].begin_step()
    assert counts[0].count == 3


@pytest.mark.parametrize("stage", [0, 1])
def test_after_an_error_no_weights_are_left_that_were_not_validated(stage: int) -> None:
    """This holds on the second rank too, which has not begun when the first one fails."""
    stages = [Broken(3, 3), Broken(3, 3)]
    ranks = one(stages=stages, gradients=GradientOptions(max_norm=1e-3))
    before = learned(ranks)
    ranks.step(X, X)
    stages[stage].fails = True
    with pytest.raises(ExecutionError, match="broken"):
        ranks.step(X, X)
    for module in stages:
        module.state_dict()  # No guard is left that refuses it.
    assert all(torch.equal(a, b) for a, b in zip(before, learned(ranks), strict=True))


def test_after_a_wrong_batch_the_last_update_is_as_it_was() -> None:
    ranks = one(gradients=GradientOptions(max_norm=1e-3))
    ranks.step(X, X)
    with pytest.raises(ExecutionError):
        ranks.step(X[:1], X)
    with pytest.raises(ModelError):
        ranks.executors[0].stages[0].module(X[0])
    ranks.validate_last_update()
    right = one(gradients=GradientOptions(max_norm=1e-3))
    right.step(X, X)
    right.validate_last_update()
    assert same(right, ranks)


def test_an_update_is_made_again_whatever_has_become_of_the_gradients() -> None:
    right, ranks = (
        one(gradients=GradientOptions(max_norm=1e-3)),
        one(gradients=GradientOptions(max_norm=1e-3)),
    )
    for each in (right, ranks):
        each.step(X, X)
        for rank in each.executors if each is ranks else ():
            rank.resources.optimizer.zero_grad()  # type: ignore[union-attr]
        each.validate_last_update()
    assert same(right, ranks)


class Head(nn.Module):
    """A loss with weights that the user steps, which writes to its target."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        target.mul_(0.5)
        return squares(self.head(y), target)


@pytest.mark.parametrize("max_norm", [1e-3, math.inf])
def test_what_is_given_is_as_one_step_leaves_it(max_norm: float) -> None:
    """This covers targets that are written to, and gradients of inputs and of a loss."""
    found: list[list[Any]] = []
    for validate in ("before_step", "after_step"):
        torch.manual_seed(0)
        loss, stages = Head(), [nn.Linear(3, 3) for _ in range(2)]
        program = compile(
            schedules.one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True, norm_check=validate
        )
        ranks = InProcessExecutor(
            program,
            stages,
            loss=loss,
            boundary=(2, 3),
            optimizer=ADAMW,
            gradients=GradientOptions(max_norm=max_norm),
        )
        x, y = X.clone().requires_grad_(), X.clone()
        rows = [row.clone().requires_grad_() for row in X]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the loss
            found.append([ranks.step(given, y) for given in (x, rows, x)])
        found[-1] += [x.grad, y, loss.head.weight.grad, *(row.grad for row in rows)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _looks(
    what: Callable[[InProcessExecutor, nn.Module, Any], object], **how: Any
) -> Callable[[], object]:
    def look() -> object:
        ranks = one(**how)
        ranks.step(X, X)
        stage = ranks.executors[0].stages[0].module
        return what(ranks, stage, ranks.executors[0].resources.optimizer)

    return look


def _written(ranks: InProcessExecutor, stage: nn.Module, _: Any) -> object:
    with torch.no_grad():
        next(stage.parameters()).mul_(2)
    return ranks.step(X, X)


def _hooked(ranks: InProcessExecutor, _: nn.Module, optimizer: Any) -> object:
    optimizer.register_step_post_hook(lambda *_: None)
    return ranks.step(X, X)


def _write(what: str) -> Callable[[InProcessExecutor, nn.Module, Any], object]:
    def write(ranks: InProcessExecutor, stage: nn.Module, optimizer: Any) -> object:
        p = next(stage.parameters())
        if what == "data":
            p.data.clamp_(-0.1, 0.1)
        elif what == "place":
            p.data = p.data.clone()
        elif what == "state":
            optimizer.state[p]["exp_avg"].zero_()
        elif what == "cleared":
            optimizer.state.clear()
        elif what == "scale":
            ranks.executors[0].state.options.gradients.loss_scale.value.fill_(4.0)  # type: ignore[union-attr]
        else:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        return ranks.step(X, X)

    return write


def _slow(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in ps if p.requires_grad], lr=1e-12)


def _late(ranks: InProcessExecutor, stage: nn.Module, _: Any) -> object:
    """Let a forward start to write to a frozen Parameter in a step that is undone."""
    late = ranks.executors[0].stages[0].module
    for k in range(3):
        ranks.step(X, X + 1e9 * (k == 2))
    late.begins = True  # type: ignore[assignment]
    return ranks.step(X, X)


class Late(nn.Linear):
    """Writes to a frozen Parameter if `begins` is set."""

    begins = False

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            with torch.no_grad():
                self.seen.add_(x.mean(0))
        return super().forward(x)


def _other(ranks: InProcessExecutor, _: nn.Module, optimizer: Any) -> object:
    stages = [rank.stages[rank.rank].module for rank in ranks.executors]
    evaluate = compile(schedules.forward_only, PipelineShape(2, 4))
    return InProcessExecutor(evaluate, stages, loss=squares, boundary=(2, 3)).step(X, X)


def _nested() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 3)) for _ in range(2)]


def _embedding() -> object:
    return one(stages=[nn.Embedding(8, 3, max_norm=1.0), nn.Linear(3, 3)])


WRONG: dict[str, Callable[[], object]] = {
    "a graph": _looks(
        lambda ranks, stage, optimizer: ranks.step(X.clone().requires_grad_() * 2, X)
    ),
    "a forward": _looks(lambda ranks, stage, optimizer: stage(X[0])),
    "a layer's forward": lambda: _looks(
        lambda ranks, stage, optimizer: next(stage.children())(X[0]), stages=_nested()
    )(),
    "a layer's checkpoint": lambda: _looks(
        lambda ranks, stage, optimizer: nn.ModuleList(stage.children()).state_dict(),
        stages=_nested(),
    )(),
    "a checkpoint": _looks(lambda ranks, stage, optimizer: nn.Sequential(stage).state_dict()),
    "an optimizer's": _looks(lambda ranks, stage, optimizer: optimizer.state_dict()),
    "another's weights": _looks(
        lambda ranks, stage, optimizer: stage.load_state_dict(nn.Linear(3, 3).state_dict())
    ),
    "another's state": _looks(lambda ranks, stage, optimizer: optimizer.load_state_dict({})),
    "written weights": _looks(_written),
    "written data": _looks(_write("data"), gradients=GradientOptions(max_norm=math.inf)),
    "data elsewhere": _looks(_write("place"), gradients=GradientOptions(max_norm=math.inf)),
    "written state": _looks(_write("state"), gradients=GradientOptions(max_norm=math.inf)),
    "cleared state": _looks(_write("cleared"), gradients=GradientOptions(max_norm=math.inf)),
    "a written scale": _looks(
        _write("scale"), gradients=GradientOptions(max_norm=math.inf, loss_scale=LossScale())
    ),
    "another group": _looks(_write("group"), gradients=GradientOptions(max_norm=math.inf)),
    "a hook": _looks(_hooked),
    "another executor": _looks(_other),
    "no optimizer": lambda: one(optimizer=None),
    "a stranger": lambda: one(optimizer=Stranger),
    "a hooked one": lambda: one(optimizer=hooked),
    "an embedding": _embedding,
    "a late writer": lambda: _looks(
        _late,
        stages=[Late(), nn.Linear(3, 3)],
        gradients=GradientOptions(max_norm=1e7),
        optimizer=_slow,
    )(),
    "no step without a closure": lambda: _looks(
        lambda ranks, stage, optimizer: ranks.step(X, X),
        optimizer=torch.optim.LBFGS,
        gradients=GradientOptions(max_norm=1e-3),
    )(),
}


def test_what_is_refused() -> None:
    told = []
    for name, wrong in WRONG.items():
        with pytest.raises((ModelError, ExecutionError)) as error:
            wrong()
        told.append(f"{name}\n" + "".join(f"  {line}\n" for line in str(error.value).splitlines()))
    assert "".join(told) == GOLDEN.read_text()


def test_settled_weights_may_be_looked_at_and_written_to() -> None:
    """A run that continues from saved and loaded weights equals one that never stopped."""
    whole, parts = (
        one(gradients=GradientOptions(max_norm=1e-3)),
        one(gradients=GradientOptions(max_norm=1e-3)),
    )
    for k in range(3):
        assert torch.equal(whole.step(X, X + k), parts.step(X, X + k))
        parts.validate_last_update()
        parts.validate_last_update()  # has no effect
        for rank in parts.executors:
            module, optimizer = rank.stages[rank.rank].module, rank.resources.optimizer
            weights = {name: p.clone() for name, p in module.state_dict().items()}
            state = optimizer.state_dict()  # type: ignore[union-attr]
            module(X[0])
            nn.init.zeros_(next(module.parameters()))
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)  # type: ignore[union-attr]
    whole.validate_last_update()
    assert same(whole, parts)


def test_a_failed_settle_is_refused_again() -> None:
    """Weights that were written to stay refused, since restoring them would lose the writes."""
    ranks = one()
    ranks.step(X, X)
    with torch.no_grad():
        next(ranks.executors[1].stages[1].module.parameters()).mul_(2)
    for again in (ranks.validate_last_update, lambda: ranks.step(X, X)):
        with pytest.raises(ModelError, match="written to"):
            again()
