"""Tests that undone steps leave no trace in modules, optimizers, losses and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.schedules import interleaved
from tests.cpu.gloo_processes import run
from tests.cpu.test_warmup_step import Streamed

STEPS = 2


class StepCase(NamedTuple):
    """A model of two stages, its optimizer, and other objects that a step may change."""

    first: nn.Module
    optimizer: Optimizer | None
    last: nn.Module
    watched: Any = ()
    loss: Callable[[Tensor, Tensor], Tensor] = nn.MSELoss()
    between: Callable[[], object] = lambda: None
    batch: Callable[[Tensor], Tensor] = lambda x: x


def _make_case(
    first: nn.Module | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    **options: Any,
) -> StepCase:
    first, last = first or nn.Linear(8, 8), nn.Linear(8, 8)
    parameters = [*first.parameters(), *last.parameters()]
    return StepCase(first, optimizer(parameters) if optimizer else None, last, **options)


class BufferedStage(nn.Module):
    """A linear layer with buffers, and a function of itself and of the output of the layer."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **buffers: Tensor | None) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(8, 8), compute
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.layer(x))


def _create_mean(stage: Any, y: Tensor) -> Tensor:
    """Subtract a mean that the first forward creates."""
    mean = y.detach().mean(0)
    stage.mean = mean if stage.mean is None else 0.9 * stage.mean + 0.1 * mean
    out: Tensor = y - stage.mean
    return out


def _replace_other(stage: Any, y: Tensor) -> Tensor:
    stage.other = stage.other * 0.5
    out: Tensor = y * stage.other
    return out


def _replace_sparse(stage: Any, y: Tensor) -> Tensor:
    stage.coo = stage.coo * 0.5
    out: Tensor = torch.sparse.mm(stage.coo, y.T).T
    return out


def _write_bias(stage: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        stage.layer.bias.mul_(0.5)
    return y


EYE = torch.eye(8)


class LossWithBuffer(nn.Module):
    """A loss that divides by its own running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(y, target)
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.mean


def _expanded_buffers() -> StepCase:
    """Return a model with expanded and strided buffers."""
    layer = nn.Linear(8, 8)
    layer.register_buffer("ones", torch.ones(1, 8).expand(2, 8))
    layer.register_buffer("other", torch.ones(16)[::2])
    layer.register_buffer("one", torch.ones(1).expand(3)[:1])
    return _make_case(layer)


def _weight_average(fused: bool) -> StepCase:
    """Return a model whose optimizer has a hook that updates an average of the weights."""
    case = _make_case(optimizer=lambda ps: AdamW(ps, 0.1, fused=fused))
    assert case.optimizer is not None
    mean = torch.zeros(8, 8)
    weight = next(case.first.parameters()).detach()

    def average(*_: object) -> None:
        mean.lerp_(weight, 0.5)

    case.optimizer.register_step_post_hook(average)
    return case._replace(watched=mean)


def _tensor_learning_rate() -> StepCase:
    """Return a model whose learning rate is a tensor that its owner changes."""
    rate = torch.tensor(0.1)
    return _make_case(
        optimizer=lambda ps: AdamW(ps, lr=rate, foreach=False), between=lambda: rate.mul_(0.1)
    )


def _foreign_parameter() -> StepCase:
    """Return a model whose optimizer also has a foreign Parameter with a gradient."""
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    return _make_case(optimizer=lambda ps: AdamW([*ps, other], 0.1), watched=other)


def _later_group() -> StepCase:
    """Return a model where a parameter group was added after the others had momentum."""

    def make_sgd(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(parameters[:2], lr=0.1, momentum=0.9, fused=True)
        for p in parameters[:2]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.add_param_group({"params": parameters[2:]})
        return optimizer

    return _make_case(optimizer=make_sgd)


def _inputs_with_gradients() -> StepCase:
    inputs: list[Tensor] = []

    def batch(x: Tensor) -> Tensor:
        inputs.append(x.requires_grad_())
        return x

    return _make_case(watched=inputs, batch=batch)


def _writes_to_its_target(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target.mul_(0.5))


CASES: Mapping[str, Callable[[], StepCase]] = {
    "a buffer made in a forward": lambda: _make_case(BufferedStage(_create_mean, mean=None)),
    "a buffer that is expanded": _expanded_buffers,
    "one buffer by two names": lambda: _make_case(
        BufferedStage(_replace_other, **dict.fromkeys(("one", "other"), torch.ones(8)))
    ),
    "buffers that are sparse": lambda: _make_case(BufferedStage(
        _replace_sparse, coo=EYE.to_sparse(), csr=EYE.to_sparse_csr(), csc=EYE.to_sparse_csc()
    )),
    "weights written in a forward": lambda: _make_case(BufferedStage(_write_bias)),
    "and an optimizer held back": lambda: _make_case(
        BufferedStage(_write_bias), lambda ps: AdamW(ps, 0.1, fused=True)
    ),
    "a loss with a buffer": lambda: _make_case(loss=LossWithBuffer()),
    "a loss that writes to its target": lambda: _make_case(loss=_writes_to_its_target),
    "inputs with gradients": _inputs_with_gradients,
    "a hook on the step": lambda: _weight_average(False),
    "a hook on a fused step": lambda: _weight_average(True),
    "a learning rate in a tensor": _tensor_learning_rate,
    "a Parameter of the optimizer alone": _foreign_parameter,
    "a group that has come later": _later_group,
}  # fmt: skip


def _run_steps(make: Callable[[], StepCase], warm: bool) -> list[Tensor]:
    """Return all state after some steps, with or without undone steps."""
    torch.manual_seed(0)
    case = make()
    program = compile(
        interleaved, PipelineShape(1, 2, 2), progress_model="per_edge", clip_grad_norm=True
    )
    executor = Executor(
        program, 0, [case.first, case.last], Streamed(program), loss=case.loss,
        boundary=Boundary((2, 8)), optimizer=case.optimizer,
    )  # fmt: skip
    executor.runner.is_warm = not warm
    results: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        results += [executor.step(case.batch(torch.randn(2, 2, 8)), torch.randn(2, 2, 8))]
        results += [executor.grad_norm.clone(), executor.finite_updates.clone()]
        case.between()
    modules = nn.ModuleList([case.first, case.last])
    buffers = [b.to_dense() for b in modules.buffers()]
    state = case.optimizer.state_dict() if case.optimizer else None
    watched = [(t, t.grad) for t in tree_leaves(case.watched) if t.is_leaf]
    results += [*modules.parameters(), buffers, state, watched]
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def compare_cases(rank: int) -> dict[str, bool]:
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    is_same = {}
    for name, make in CASES.items():
        cold, warm = (_run_steps(make, warm) for warm in (False, True))
        is_same[name] = len(cold) == len(warm) and all(map(torch.equal, cold, warm))
    return is_same


def test_undone_steps_leave_no_trace() -> None:
    (checks,) = run(compare_cases, 1)
    assert not [name for name, is_same in checks.items() if not is_same]


@contextmanager
def _record_hook_calls() -> Iterator[list[object]]:
    """Yield a list of the arguments that a hook on all optimizer steps is called with."""
    calls: list[object] = []
    hook = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    try:
        yield calls
    finally:
        hook.remove()


def count_hook_calls(rank: int) -> int:
    with _record_hook_calls() as calls:
        _run_steps(lambda: _make_case(optimizer=lambda ps: AdamW(ps, 0.1, fused=True)), warm=True)
    return len(calls)


def test_global_optimizer_hook_ignores_undone_steps() -> None:
    assert run(count_hook_calls, 1) == [STEPS]


class InterruptedForward(nn.Module):
    """Is interrupted in its fifth forward, which is in the third step of two microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.BatchNorm1d(8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y: Tensor = self.layer(x)
        if self.count == 5:
            raise KeyboardInterrupt
        return y


def run_interrupted_step(rank: int) -> bool:
    """Return whether an interrupt leaves all state as before, and a new executor can step."""
    program = compile(interleaved, PipelineShape(1, 2, 2), progress_model="per_edge")
    stages = nn.ModuleList([InterruptedForward(), nn.Linear(8, 8)])
    adam = AdamW(stages.parameters(), 0.1)
    before = {name: t.clone() for name, t in stages.state_dict().items()}
    x = torch.ones(2, 2, 8)

    def make_executor() -> Executor:
        return Executor(
            program, 0, [*stages], Streamed(program), loss=nn.MSELoss(), boundary=(2, 8),
            optimizer=adam,
        )  # fmt: skip

    with pytest.raises(ExecutionError, match="has 1 inputs"):
        make_executor().step(x[:1], x)
    with pytest.raises(KeyboardInterrupt):
        make_executor().step(x, x)
    after = stages.state_dict()
    same = all(torch.equal(t, after[name]) for name, t in before.items()) and not adam.state
    make_executor().step(x, x)
    return same and len(adam.state) == 4


def test_interrupt_restores_state() -> None:
    assert run(run_interrupted_step, 1) == [True]
