"""Tests of user-defined optimizers with ZeRO: their state is sharded, or an error refuses it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import one_f_one_b

WIDTH = 4


class Momentum(torch.optim.Optimizer):
    """SGD with momentum; a subclass chooses where to keep the momentum."""

    elementwise = True

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.place = place
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.shapes = [p.shape for p in self.all]
        self.attribute: list[Tensor] = []
        for p in self.all:
            if place == "attribute":
                self.attribute.append(torch.zeros_like(p))
            elif place == "state":
                self.state[p]["moment"] = torch.zeros_like(p)
            elif place == "nested state":
                self.state[p]["moments"] = {"first": [torch.zeros_like(p)]}
            elif place == "nested rows":
                self.state[p]["moments"] = [torch.zeros(p.shape[0])]

    def moment(self, k: int, p: nn.Parameter) -> Tensor:
        found: Any = self.state[p]
        if self.place == "attribute":
            return self.attribute[k]
        if self.place == "nested state":
            found = found["moments"]["first"][0]
        elif self.place == "shape of the weight":
            found = found.setdefault("moment", torch.zeros(self.shapes[k]))
        elif self.place == "shape of p":
            found = found.setdefault("moment", torch.zeros_like(p))
        else:
            found = found["moment"]
        assert isinstance(found, Tensor)
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for k, p in enumerate(self.all):
            if p.grad is not None:
                p.sub_(self.moment(k, p).mul_(0.9).add_(p.grad), alpha=0.1)


def make_executor(zero: int, place: str) -> tuple[list[nn.Linear], InProcessExecutor]:
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    program = schedir.compile(one_f_one_b, PipelineShape(2, 3), zero=zero, clip_grad_norm=False)
    ranks = InProcessExecutor(
        program, stages, loss=nn.functional.mse_loss, boundary=Boundary((2, WIDTH)),
        optimizer=partial(Momentum, place=place),
    )  # fmt: skip
    return stages, ranks


def train_three_steps(zero: int, place: str) -> list[Tensor]:
    stages, ranks = make_executor(zero, place)
    x = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        ranks.step(x, x + 1)
    with ExitStack() as stack:
        for rank in ranks.executors:
            stack.enter_context(rank.full_parameters())
        return [p.detach().clone() for stage in stages for p in stage.parameters()]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("place", ["state", "nested state", "shape of p"])
def test_sharded_state_steps_like_full_state(place: str, zero: int) -> None:
    assert all(map(torch.equal, train_three_steps(zero, place), train_three_steps(0, place)))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("attribute", r"Momentum\.attribute has a tensor"),
        ("nested rows", r"Momentum keeps moments"),
    ],
)
def test_unshardable_state_is_refused(place: str, message: str, zero: int) -> None:
    with pytest.raises(ModelError, match=message) as error:
        make_executor(zero, place)
    assert error.value.program == "one_f_one_b" and "zero=0" in error.value.hint


@pytest.mark.parametrize("zero", [1, 3])
def test_state_with_shape_of_full_weight_is_refused(zero: int) -> None:
    with pytest.raises(ExecutionError, match=r"Momentum failed to step shards") as error:
        train_three_steps(zero, "shape of the weight")
    (site,) = error.value.sites
    assert str(site.instr) == "step" and "zero=0" in error.value.hint


def _clip_by_hook(optimizer: Any, *_: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(0.1 / p.grad.norm())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_optimizer_step_hooks_are_refused(zero: int, everywhere: bool) -> None:
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(torch.optim.SGD(parameters, 0.1))
        return optimizers[-1]

    program = schedir.compile(one_f_one_b, PipelineShape(2, 2), zero=zero)
    ranks = InProcessExecutor(
        program, stages, loss=nn.functional.mse_loss, boundary=(3, WIDTH), optimizer=optimizer
    )
    register: Any = (
        register_optimizer_step_pre_hook if everywhere else optimizers[0].register_step_pre_hook
    )
    handle = register(_clip_by_hook)
    try:
        with pytest.raises(ExecutionError, match=rf"hooks on its step.*\(zero {zero}\)"):
            ranks.step(*torch.randn(2, 2, 3, WIDTH))
    finally:
        handle.remove()
