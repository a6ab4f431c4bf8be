"""Tests of activation recomputation: autocast, generators, hooks, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, UsageError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import have_same_bits

torch.set_num_threads(1)
WIDTH = 6
BOUNDARY = Boundary((2, WIDTH))


class Noisy(nn.Module):
    """A stage with dropout, running statistics, and a split layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.norm(self.layer(x))), 0.25).to(x.dtype)


def noisy(stages: int, layer: Callable[[], nn.Module] = Noisy) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make_backward_splittable(layer()) for _ in range(stages)]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, microbatches, *BOUNDARY.shape, generator=draw)
    return x, y


def state(stages: Sequence[nn.Module]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for stage in stages:
        for p in stage.parameters():
            assert p.grad is not None or not p.requires_grad
            tensors += [p] if p.grad is None else [p.grad, p]
        tensors += stage.buffers()
    return [x.detach().clone() for x in tensors]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def make_executor(program: Program, stages: list[nn.Module], **options: Any) -> InProcessExecutor:
    usual: dict[str, Any] = {"loss": squares, "boundary": BOUNDARY}
    return InProcessExecutor(program, stages, **usual | options)


def as_reference(
    program: Program, stages: list[nn.Module], steps: int = 2, **options: Any
) -> InProcessExecutor:
    """Assert that steps of a program in random orders have the bits of the reference."""
    plain = deepcopy(stages)
    sgd = partial(torch.optim.SGD, lr=0.1)
    step = sgd([p for stage in plain for p in stage.parameters()])
    world = make_executor(program, stages, optimizer=sgd, **options)
    for k in range(steps):
        x, y = batch(program.shape.microbatches, k)
        step.zero_grad()
        total = run_sequential(plain, x, y, loss=squares, program=program, step=k)
        step.step()
        assert torch.equal(world.step(x, y, order_seed=k), total)
        assert equal(state(stages), state(plain))
    return world


# ---------------------------------------------------------------- same bits


def test_recompute_under_autocast_has_same_bits() -> None:
    results = []
    for recompute in (None, "all"):
        stages = noisy(2)
        program = compile(one_f_one_b, PipelineShape(2, 3), recompute=recompute)
        world = make_executor(program, stages)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = world.step(*batch(3))
        results.append([total, *state(stages)])
    assert equal(*results)


def run_unseeded_rank(rank: int, shared: bool) -> list[Any]:
    torch.manual_seed(100 + rank)
    results = []
    for recompute in (None, "all"):
        torch.manual_seed(7)
        shape, stages = PipelineShape(2, 4), noisy(2)
        program = compile(zb_h1, shape, recompute=recompute, progress_model="per_edge")
        transport = (SharedMemoryTransport if shared else GlooTransport)(program)
        torch.manual_seed(rank)
        executor = Executor(
            program, rank, stages, transport, loss=squares, boundary=BOUNDARY,
            optimizer=torch.optim.SGD(stages[rank].parameters(), lr=0.1), seed=None,
        )  # fmt: skip
        losses = [executor.step(*batch(4, k)) for k in range(2)]
        results.append((losses, state([stages[rank]])))
    return results


@pytest.mark.parametrize("shared", [False, True])
def test_recompute_without_seed_keeps_generator_states(shared: bool) -> None:
    """Losses and weights of two steps have the same bits with and without recomputation."""
    for plain, recomputed in run(run_unseeded_rank, 2, shared):
        assert have_same_bits(plain, recomputed)


# ---------------------------------------------------------------- side effects of stages


class OwnGenerator(nn.Module):
    """Draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * torch.rand(WIDTH, generator=self.draw)
        return y


def test_different_output_of_recompute_is_refused() -> None:
    program = compile(gpipe, PipelineShape(2, 4), recompute="all")
    world = make_executor(program, noisy(2, OwnGenerator))
    with pytest.raises(ExecutionError, match="returns a different output for microbatch") as caught:
        world.step(*batch(4))
    assert str(caught.value.sites[0].instr).startswith("R ")
    assert "generators" in caught.value.hint


def test_loss_that_changes_its_target_is_refused() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target.mul_(2)).square().sum()

    program = compile(gpipe, PipelineShape(2, 4), recompute="all")
    world = make_executor(program, noisy(2), loss=loss)
    with pytest.raises(ExecutionError, match="changes the target of microbatch 0 in place"):
        world.step(*batch(4))


def test_debug_option_must_be_boolean() -> None:
    program = compile(gpipe, PipelineShape(1, 1))
    with pytest.raises(UsageError, match="debug"):
        make_executor(program, noisy(1), execution=ExecutionOptions(debug=2))  # type: ignore[arg-type]


class InputHook(nn.Module):
    """Doubles the gradient of its input in a hook on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_backward_splittable(nn.Sequential(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("schedule", [gpipe, interleaved, zb_h1])
def test_input_hook_runs_once_under_recompute(schedule: Any) -> None:
    """The first run of a forward must not leave its hooks on the input of the second run."""
    gradients = []
    cases: list[dict[str, Any]] = [{}, {"recompute": "all"}]
    for options in cases:
        torch.manual_seed(0)
        shape = PipelineShape(2, 2, 2 if schedule is interleaved else 1)
        stages: list[nn.Module] = [InputHook() for _ in range(shape.stages)]
        make_executor(compile(schedule, shape, **options), stages).step(*torch.ones(2, 2, 2, WIDTH))
        gradients.append(state(stages))
    assert equal(*gradients)
