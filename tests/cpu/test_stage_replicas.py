"""Tests of stage replicas in one process, whose weight copies have the hooks of the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import schedir
from schedir import PipelineShape
from schedir.errors import ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import bitpipe, chimera
from schedir.testing.tiny_model import squared_error

WIDTH, STEPS = 3, 2
MIRROR_CASES = [
    (chimera, PipelineShape(2, 4, placement="mirror")),
    (bitpipe, PipelineShape(2, 4, placement="mirror-vee")),
]
sgd = partial(torch.optim.SGD, lr=0.1)


def make_stages(stages: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(stages)]


def make_batch() -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(4, 2, WIDTH, dtype=torch.float64, generator=numbers)


def make_executor(
    schedule: Any, shape: PipelineShape, stages: list[nn.Linear], optimizer: Any = sgd
) -> InProcessExecutor:
    program = schedir.compile(schedule, shape)
    boundary = Boundary((2, WIDTH), torch.float64)
    return InProcessExecutor(
        program, stages, loss=squared_error, boundary=boundary, optimizer=optimizer
    )


class WeightHooks:
    """Nonlinear gradient hooks on some weights, which count their calls."""

    def __init__(self, where: list[bool]) -> None:
        self.where, self.calls = where, 0
        self.handles: list[Any] = []

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient.clamp(-0.5, 0.5)

    def register(self, stages: list[nn.Linear]) -> None:
        for has, p in zip(self.where, nn.Sequential(*stages).parameters(), strict=False):
            if has:
                self.handles.append(p.register_hook(self))

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()


@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    where=st.lists(st.booleans(), min_size=4, max_size=4),
    case=st.sampled_from(MIRROR_CASES),
    late=st.booleans(),
    removed=st.booleans(),
)
def test_weight_hooks_get_gradient_of_every_microbatch(
    where: Any, case: Any, late: bool, removed: bool
) -> None:
    """Hooks may be registered after the executor is created, and removed between steps."""
    schedule, shape = case
    stages, plain_stages = make_stages(shape.stages), make_stages(shape.stages)
    replica_hooks, plain_hooks = WeightHooks(where), WeightHooks(where)
    plain_hooks.register(plain_stages)
    if not late:
        replica_hooks.register(stages)
    ranks = make_executor(schedule, shape, stages)
    if late:
        replica_hooks.register(stages)
    model = nn.Sequential(*plain_stages)
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        ranks.step(make_batch(), make_batch() + 1)
        optimizer.zero_grad()
        for x in make_batch():
            torch.autograd.backward(squared_error(model(x), x + 1))
        optimizer.step()
        if removed:
            replica_hooks.remove()
            plain_hooks.remove()
    assert replica_hooks.calls == plain_hooks.calls
    for p, q in zip(nn.Sequential(*stages).parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("schedule", "shape"), MIRROR_CASES)
def test_accumulate_hook_on_stage_replica_is_refused(
    schedule: Any, shape: PipelineShape, late: bool
) -> None:
    stages = make_stages(shape.stages)
    ranks = make_executor(schedule, shape, stages) if late else None
    stages[1].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ModelError, match=r"bias of stage 1") as error:
        (ranks or make_executor(schedule, shape, stages)).step(make_batch(), make_batch())
    assert error.value.program == schedule.__name__ and "register_hook" in error.value.hint


def test_weight_copies_have_attributes_of_weights() -> None:
    """An optimizer may group weights by attributes, so copies must have them too."""
    schedule, shape = MIRROR_CASES[0]
    stages = make_stages(shape.stages)
    for stage in stages:
        vars(stage.bias)["is_slow"] = True
    slow_counts = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        slow = [p for p in parameters if hasattr(p, "is_slow")]
        slow_counts.append(len(slow))
        rest = [p for p in parameters if not hasattr(p, "is_slow")]
        groups: list[dict[str, Any]] = [{"params": slow, "lr": 0.01}, {"params": rest}]
        return torch.optim.SGD(groups, lr=0.1)

    ranks = make_executor(schedule, shape, stages, optimizer)
    ranks.step(make_batch(), make_batch() + 1)
    assert slow_counts == [2, 2]
    for replica in ranks.stage_replicas:
        for p, q in zip(replica.copy.parameters(), replica.module.parameters(), strict=True):
            assert torch.equal(p, q)


class _Scaled(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize(("schedule", "shape"), MIRROR_CASES)
def test_attribute_set_between_steps_applies_to_copies(schedule: Any, shape: PipelineShape) -> None:
    torch.manual_seed(0)
    stages: list[nn.Linear] = [_Scaled(WIDTH, WIDTH).double() for _ in range(shape.stages)]
    ranks = make_executor(schedule, shape, stages)
    ranks.step(make_batch(), make_batch())
    for stage in stages:
        vars(stage)["factor"] = 2.0
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x in make_batch():
            expected += squared_error(nn.Sequential(*stages)(x), x)
    assert torch.allclose(ranks.step(make_batch(), make_batch()).double(), expected)


CHANGES: dict[str, Callable[[Any], object]] = {
    "set tensor": lambda stage: setattr(stage, "shift", torch.ones(())),
    "written tensor": lambda stage: stage.shift.add_(1),
    "set entry": lambda stage: stage.options.update(scale=2.0),
    "hook": lambda stage: stage.register_forward_hook(lambda module, inputs, output: output * 2),
    "replaced forward": lambda stage: setattr(stage, "forward", torch.sin),
    "pruned": lambda stage: prune.l1_unstructured(stage, "weight", 0.5),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_module_change_between_steps_is_refused(change: str, stepped: bool) -> None:
    schedule, shape = MIRROR_CASES[0]
    stages = make_stages(shape.stages)
    for stage in stages:
        vars(stage).update(shift=torch.zeros(()), options={"scale": 1.0})
    ranks = make_executor(schedule, shape, stages)
    if stepped:
        ranks.step(make_batch(), make_batch())
    CHANGES[change](stages[1])
    with pytest.raises(ModelError, match=r"of stage 1 changed between steps") as error:
        ranks.step(make_batch(), make_batch())
    assert "create a new one" in error.value.hint
