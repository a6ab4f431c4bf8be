"""Tests of updates that are not validated yet: refused accesses, and state after errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
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
from schedir.runtime.parameters.post_validation import PostValidation
from schedir.runtime.program_state import ProgramService
from schedir.runtime.step_rollback import undo_steps
from tests.cpu.test_nonfinite_steps import Stranger, hooked, learned
from tests.cpu.test_post_validation import ADAMW, same, squares
from tests.cpu.tiny_stages import have_same_bits

GOLDEN = Path(__file__).parents[1] / "golden" / "ahead.txt"
X = torch.arange(24.0).view(4, 2, 3)


CLIPPED: dict[str, Any] = {"gradients": GradientOptions(max_norm=1e-3)}
UNCLIPPED: dict[str, Any] = {"gradients": GradientOptions(max_norm=math.inf)}


def make_ranks(**changes: Any) -> InProcessExecutor:
    program = compile(
        schedules.one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True, norm_check="after_step"
    )
    arguments: dict[str, Any] = {
        "loss": squares,
        "boundary": (2, 3),
        "optimizer": ADAMW,
    } | changes
    torch.manual_seed(0)
    stages = arguments.pop("stages", None) or [nn.Linear(3, 3) for _ in range(2)]
    return InProcessExecutor(program, stages, **arguments)


class FailingStage(nn.Linear):
    """Fails in its forward if `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("broken")
        return super().forward(x)


class StepCounter(ProgramService):
    """Counts the steps, and keeps the count between steps."""

    count = 0

    def begin_step(self) -> None:
        self.count += 1

    def preserve(self, preserved: PreservedState) -> None:
        preserved.add_fields(self, "count")


def test_service_state_is_restored_when_step_is_repeated() -> None:
    ranks = make_ranks(**CLIPPED)
    counters = [rank.state.service(StepCounter) for rank in ranks.executors]
    for _ in range(3):
        ranks.step(X, X)
    assert ranks.executors[0].state.service(PostValidation).repeated_steps
    assert [counter.count for counter in counters] == [3, 3]
    with undo_steps(ranks.executors[0].state):
        counters[0].begin_step()
    assert counters[0].count == 3


@pytest.mark.parametrize("stage", [0, 1])
def test_failed_step_restores_validated_weights(stage: int) -> None:
    """The second rank has not started its step when the first rank fails."""
    stages = [FailingStage(3, 3), FailingStage(3, 3)]
    ranks = make_ranks(stages=stages, **CLIPPED)
    before = learned(ranks)
    ranks.step(X, X)
    stages[stage].fails = True
    with pytest.raises(ExecutionError, match="broken"):
        ranks.step(X, X)
    for module in stages:
        module.state_dict()  # no guard refuses it any more
    assert have_same_bits(before, learned(ranks))


def test_refused_batch_keeps_last_update() -> None:
    ranks = make_ranks(**CLIPPED)
    ranks.step(X, X)
    with pytest.raises(ExecutionError):
        ranks.step(X[:1], X)
    with pytest.raises(ModelError):
        ranks.executors[0].stages[0].module(X[0])
    ranks.validate_last_update()
    expected = make_ranks(**CLIPPED)
    expected.step(X, X)
    expected.validate_last_update()
    assert same(expected, ranks)


def test_repeated_update_needs_no_earlier_gradients() -> None:
    expected, ranks = (make_ranks(**CLIPPED) for _ in range(2))
    for executor in (expected, ranks):
        executor.step(X, X)
        for rank in executor.executors if executor is ranks else ():
            rank.resources.optimizer.zero_grad()  # type: ignore[union-attr]
        executor.validate_last_update()
    assert same(expected, ranks)


class LossWithWeights(nn.Module):
    """A loss that writes to its target. Its weights are trained by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        target.mul_(0.5)
        return squares(self.head(y), target)


@pytest.mark.parametrize("max_norm", [1e-3, math.inf])
def test_repeated_step_changes_arguments_once(max_norm: float) -> None:
    """The arguments are written targets, inputs with gradients, and a loss with gradients."""
    results: list[list[Any]] = []
    for validate in ("before_step", "after_step"):
        torch.manual_seed(0)
        loss, stages = LossWithWeights(), [nn.Linear(3, 3) for _ in range(2)]
        program = compile(
            schedules.one_f_one_b, PipelineShape(2, 4), clip_grad_norm=True, norm_check=validate
        )
        ranks = InProcessExecutor(
            program, stages, loss=loss, boundary=(2, 3), optimizer=ADAMW,
            gradients=GradientOptions(max_norm=max_norm),
        )  # fmt: skip
        x, y = X.clone().requires_grad_(), X.clone()
        rows = [row.clone().requires_grad_() for row in X]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the loss
            results.append([ranks.step(inputs, y) for inputs in (x, rows, x)])
        results[-1] += [x.grad, y, loss.head.weight.grad, *(row.grad for row in rows)]
    assert have_same_bits(*results)


class LateWriter(nn.Linear):
    """Writes to a frozen parameter if `begins` is set."""

    begins = False

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            with torch.no_grad():
                self.seen.add_(x.mean(0))
        return super().forward(x)


def _access_after_step(
    access: Callable[[InProcessExecutor, Any, Any], object], **options: Any
) -> Callable[[], object]:
    """Return a call that accesses the ranks, the first stage or its optimizer after a step."""

    def run_and_access() -> object:
        ranks = make_ranks(**options)
        ranks.step(X, X)
        stage = ranks.executors[0].stages[0].module
        return access(ranks, stage, ranks.executors[0].resources.optimizer)

    return run_and_access


def _write_after_step(
    write: Callable[[InProcessExecutor, Any, Any], object], **options: Any
) -> Callable[[], object]:
    """Return a call that changes the first weight or its optimizer between two steps."""

    def write_and_step(ranks: InProcessExecutor, stage: nn.Module, optimizer: Any) -> object:
        write(ranks, next(stage.parameters()), optimizer)
        return ranks.step(X, X)

    return _access_after_step(write_and_step, **options)


def _get_loss_scale(ranks: InProcessExecutor) -> Tensor:
    loss_scale = ranks.executors[0].state.options.gradients.loss_scale
    assert loss_scale is not None
    return loss_scale.value


def _make_slow_sgd(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in ps if p.requires_grad], lr=1e-12)


def _start_late_write(ranks: InProcessExecutor, stage: Any, _: Any) -> object:
    """Let a forward start to write to a frozen parameter in a step that is undone."""
    for k in range(3):
        ranks.step(X, X + 1e9 * (k == 2))
    stage.begins = True
    return ranks.step(X, X)


def _run_other_executor(ranks: InProcessExecutor, _: nn.Module, optimizer: Any) -> object:
    stages = [rank.stages[rank.rank].module for rank in ranks.executors]
    evaluate = compile(schedules.forward_only, PipelineShape(2, 4))
    return InProcessExecutor(evaluate, stages, loss=squares, boundary=(2, 3)).step(X, X)


def _make_nested_stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 3)) for _ in range(2)]


SCALED: dict[str, Any] = {"gradients": GradientOptions(max_norm=math.inf, loss_scale=LossScale())}
WRONG: dict[str, Callable[[], object]] = {
    "a graph": _access_after_step(lambda ranks, *_: ranks.step(X.clone().requires_grad_() * 2, X)),
    "a forward": _access_after_step(lambda ranks, stage, optimizer: stage(X[0])),
    "a layer's forward": _access_after_step(
        lambda ranks, stage, optimizer: stage[0](X[0]), stages=_make_nested_stages()
    ),
    "a layer's checkpoint": _access_after_step(
        lambda ranks, stage, optimizer: nn.ModuleList(stage.children()).state_dict(),
        stages=_make_nested_stages(),
    ),
    "a checkpoint": _access_after_step(
        lambda ranks, stage, optimizer: nn.Sequential(stage).state_dict()
    ),
    "an optimizer's": _access_after_step(lambda ranks, stage, optimizer: optimizer.state_dict()),
    "another's weights": _access_after_step(
        lambda ranks, stage, optimizer: stage.load_state_dict(nn.Linear(3, 3).state_dict())
    ),
    "another's state": _access_after_step(
        lambda ranks, stage, optimizer: optimizer.load_state_dict({})
    ),
    "written weights": _write_after_step(lambda ranks, p, optimizer: p.detach().mul_(2)),
    "written data": _write_after_step(
        lambda ranks, p, optimizer: p.data.clamp_(-0.1, 0.1), **UNCLIPPED
    ),
    "data elsewhere": _write_after_step(
        lambda ranks, p, optimizer: setattr(p, "data", p.data.clone()), **UNCLIPPED
    ),
    "written state": _write_after_step(
        lambda ranks, p, optimizer: optimizer.state[p]["exp_avg"].zero_(), **UNCLIPPED
    ),
    "cleared state": _write_after_step(
        lambda ranks, p, optimizer: optimizer.state.clear(), **UNCLIPPED
    ),
    "a written scale": _write_after_step(
        lambda ranks, p, optimizer: _get_loss_scale(ranks).fill_(4.0), **SCALED
    ),
    "another group": _write_after_step(
        lambda ranks, p, optimizer: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.zeros(3))]}
        ),
        **UNCLIPPED,
    ),
    "a hook": _write_after_step(
        lambda ranks, p, optimizer: optimizer.register_step_post_hook(lambda *_: None)
    ),
    "another executor": _access_after_step(_run_other_executor),
    "no optimizer": lambda: make_ranks(optimizer=None),
    "a stranger": lambda: make_ranks(optimizer=Stranger),
    "a hooked one": lambda: make_ranks(optimizer=hooked),
    "an embedding": lambda: make_ranks(
        stages=[nn.Embedding(8, 3, max_norm=1.0), nn.Linear(3, 3)]
    ),
    "a late writer": _access_after_step(
        _start_late_write, stages=[LateWriter(), nn.Linear(3, 3)], optimizer=_make_slow_sgd,
        gradients=GradientOptions(max_norm=1e7),
    ),
}  # fmt: skip


def test_accesses_before_validation_are_refused() -> None:
    errors = ""
    for name, call in WRONG.items():
        with pytest.raises((ModelError, ExecutionError)) as error:
            call()
        errors += f"{name}\n{indent(str(error.value), '  ')}\n"
    assert errors == GOLDEN.read_text()


def test_validated_weights_may_be_read_and_written() -> None:
    """A run that saves and loads its weights equals a run without these accesses."""
    plain, accessed = (make_ranks(**CLIPPED) for _ in range(2))
    for k in range(3):
        assert torch.equal(plain.step(X, X + k), accessed.step(X, X + k))
        accessed.validate_last_update()
        accessed.validate_last_update()  # has no effect
        for rank in accessed.executors:
            module, optimizer = rank.stages[rank.rank].module, rank.resources.optimizer
            weights = {name: p.clone() for name, p in module.state_dict().items()}
            state = optimizer.state_dict()  # type: ignore[union-attr]
            module(X[0])
            nn.init.zeros_(next(module.parameters()))
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)  # type: ignore[union-attr]
    plain.validate_last_update()
    assert same(plain, accessed)


def test_failed_validation_is_refused_again() -> None:
    """Written weights stay refused, because a restore would lose the writes."""
    ranks = make_ranks()
    ranks.step(X, X)
    with torch.no_grad():
        next(ranks.executors[1].stages[1].module.parameters()).mul_(2)
    for call in (ranks.validate_last_update, lambda: ranks.step(X, X)):
        with pytest.raises(ModelError, match="written to"):
            call()
