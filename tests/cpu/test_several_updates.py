"""Tests of several optimizer steps without a flush: PipeDream-2BW, weight versions, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import pipedream_2bw
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

BOUNDARY = Boundary((2, WIDTH), torch.float64)
LR = 0.02
sgd = partial(torch.optim.SGD, lr=LR)


def weights(stages: Sequence[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for stage in stages for p in stage.parameters()]


def compute_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the losses of an update, computed microbatch by microbatch."""
    model.zero_grad()
    for x, target in zip(inputs, targets, strict=True):
        torch.autograd.backward(squared_error(model(x), target))
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def run_2bw_formula(shape: PipelineShape, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Compute W(t+1) = W(t) - lr grad(W(t-1)), the paper's rule, without schedir."""
    model = nn.Sequential(*make_tiny_stages(shape.stages))
    newest = parameters_to_vector(model.parameters()).detach()
    previous = newest
    for x, target in zip(
        inputs.chunk(shape.optimizer_steps), targets.chunk(shape.optimizer_steps), strict=True
    ):
        vector_to_parameters(previous, model.parameters())
        newest, previous = newest.add(compute_gradient(model, x, target), alpha=-LR), newest
    vector_to_parameters(newest, model.parameters())
    return weights([model])


class OutsideReference(nn.Module):
    """A stage that keeps its own reference to a weight."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.references = [self.layer.weight] * beside

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        return sum((y @ weight for weight in self.references), y)


@pytest.mark.parametrize("late", [False, True])
def test_weight_versions_have_hooks_of_weights(late: bool) -> None:
    """A step of two updates without delay equals two steps, also with hooks on gradients."""
    weights_by_updates = []
    for updates in (1, 2):
        torch.manual_seed(0)
        stages: list[nn.Module] = [OutsideReference(False), OutsideReference(False)]
        for stage in stages:
            for weight in stage.parameters():
                if late:
                    weight.register_post_accumulate_grad_hook(_halve)
                else:
                    weight.register_hook(lambda gradient: gradient * 0.5)
        program = compile(_two_updates, PipelineShape(2, 2 * updates, optimizer_steps=updates))
        ranks = InProcessExecutor(
            program, stages, loss=squared_error, boundary=BOUNDARY, optimizer=sgd
        )
        inputs, targets = make_batch(4)
        for start in range(0, 4, 2 * updates):
            ranks.step(inputs[start : start + 2 * updates], targets[start : start + 2 * updates])
        weights_by_updates.append(weights(stages))
    assert have_same_bits(*weights_by_updates)


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad *= 0.5


def _two_updates(r: int, P: int, m: int) -> RankSchedule:
    return m // 2 * (2 * F + 2 * B)


def test_outside_reference_to_weight_with_versions_is_refused() -> None:
    inputs, targets = make_batch(4)
    stages: list[nn.Module] = [OutsideReference(True), OutsideReference(True)]
    ranks = InProcessExecutor(
        compile(_two_updates, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1)), stages,
        loss=squared_error,
        boundary=BOUNDARY,
        optimizer=sgd,
    )  # fmt: skip
    message = r"layer\.weight through a reference outside of its module"
    with pytest.raises(ExecutionError, match=message):
        ranks.step(inputs, targets)
    y = stages[0](inputs[0]).sum()
    torch.autograd.backward(y)  # after the step the user may use the module


def test_evaluation_uses_newest_weights() -> None:
    shape = PipelineShape(2, 6, optimizer_steps=3, weight_delay=1)
    program = compile(lambda r, P, m: m * F, shape, progress_model="per_edge")
    stages, (inputs, targets) = make_tiny_stages(2), make_batch(6)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY)
    assert ranks.step(inputs, targets) == run_sequential(
        make_tiny_stages(2), inputs, targets, loss=squared_error
    )


class SharedRecomputedLayer(nn.Module):
    """A layer that runs twice, the second time under checkpoint, and a frozen weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        (self.one,) = make_tiny_stages(1, seed)
        self.same = self.one
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.same, self.one(x), use_reentrant=False)
        return y + self.shift


def test_old_weights_apply_to_shared_and_recomputed_layers() -> None:
    shape = PipelineShape(2, 8, optimizer_steps=4, weight_delay=1)
    reference = nn.Sequential(SharedRecomputedLayer(0), SharedRecomputedLayer(1))
    versions = [deepcopy(reference)]
    optimizer = sgd([p for p in reference.parameters() if p.requires_grad])
    for u, (x, target) in enumerate(zip(*(b.chunk(4) for b in make_batch(8)), strict=True)):
        old = versions[max(u - 1, 0)]
        compute_gradient(old, x, target)
        for p, q in zip(reference.parameters(), old.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
        versions.append(deepcopy(reference))
    stages = [SharedRecomputedLayer(0), SharedRecomputedLayer(1)]
    ranks = InProcessExecutor(
        compile(pipedream_2bw, shape, progress_model="per_edge"), stages,
        loss=squared_error, boundary=BOUNDARY,
        optimizer=lambda parameters: sgd([p for p in parameters if p.requires_grad]),
    )  # fmt: skip
    ranks.step(*make_batch(8))
    assert have_same_bits(weights(stages), weights([reference]))
    assert all(stage.same is stage.one and stage.one.weight.is_leaf for stage in stages)


def _run_rank(rank: int, shape: PipelineShape) -> Any:
    program = compile(pipedream_2bw, shape, progress_model="per_edge", dp=1)
    stages = {
        s: m
        for s, m in enumerate(make_tiny_stages(shape.stages))
        if s in shape.stages_on_rank[rank]
    }
    executor = Executor(
        program, rank, stages, GlooTransport(program), loss=squared_error, boundary=BOUNDARY,
        optimizer=sgd([p for m in stages.values() for p in m.parameters()]),
    )  # fmt: skip
    executor.step(*make_batch(shape.microbatches))
    return weights([*stages.values()])


def test_pipedream_2bw_over_gloo_equals_its_formula() -> None:
    shape = PipelineShape(2, 8, optimizer_steps=4, weight_delay=1)
    weights_by_rank = run(_run_rank, 2, shape)
    assert have_same_bits(
        [p for rank in weights_by_rank for p in rank], run_2bw_formula(shape, *make_batch(8))
    )


class _ClampedWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class _RenormalizedRows(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


class _AuxiliaryLoss(nn.Linear):
    """Adds the gradient of its own loss in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.square().sum().backward(retain_graph=True)
        return y


def _step_two_updates(first: nn.Module) -> None:
    stages = [first, nn.Linear(WIDTH, WIDTH)]
    program = compile(pipedream_2bw, PipelineShape(2, 4, optimizer_steps=2, weight_delay=1))
    ranks = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(3, WIDTH))
    ranks.step(*torch.randn(2, 4, 3, WIDTH))


@pytest.mark.parametrize(
    "first", [_ClampedWeight(WIDTH, WIDTH), _RenormalizedRows(WIDTH, WIDTH, max_norm=0.1)]
)
def test_write_to_weight_with_versions_is_refused(first: nn.Module) -> None:
    """Each update computes with copies of the weights, so writes to a copy would be lost."""
    with pytest.raises(ModelError, match="stage 0 writes to its weight weight") as error:
        _step_two_updates(first)
    assert "one update" in error.value.hint


def test_backward_in_forward_is_refused() -> None:
    """The forward may run before the optimizer step of the previous update."""
    with pytest.raises(ExecutionError, match="calls backward\\(\\) in its forward"):
        _step_two_updates(_AuxiliaryLoss(WIDTH, WIDTH))
