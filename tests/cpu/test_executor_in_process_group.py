"""Tests of an executor in a group of processes, which adds to existing gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError, ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime.autograd.splittable_layers import make_backward_splittable
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions, GradientOptions
from schedir.schedules import one_f_one_b, zb_h1
from schedir.transports.gloo import GlooTransport
from schedir.transports.in_process.mailbox import make_mailboxes
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run

WIDTH, MICROBATCHES = 6, 4
PLAN = PipelineShape(ranks=2, microbatches=MICROBATCHES)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def model(seed: int) -> list[Layer]:
    torch.manual_seed(seed)
    return [Layer(), Layer()]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + seed)
    return torch.randn(MICROBATCHES, 3, WIDTH), torch.randn(MICROBATCHES, 3, WIDTH)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def looped(stages: list[Layer], x: Tensor, y: Tensor) -> None:
    for mb in range(MICROBATCHES):
        loss(stages[1](stages[0](x[mb])), y[mb]).backward()


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [compile(words, PLAN) for words in (one_f_one_b, zb_h1)]


def side_by_side(rank: int, programs: list[Program]) -> list[bool]:
    """Run two separate pipelines of two processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, replica = mesh.get_group("pp"), mesh.get_local_rank("dp")
    same = []
    for kind in (GlooTransport, SharedMemoryTransport):
        for program in programs:
            right, mine = model(replica), model(replica)
            place = mesh.get_local_rank("pp")
            stages = {place: make_backward_splittable(mine[place])}
            transport = kind(program, group=group)
            executor = Executor(
                program, place, stages, transport, loss=loss, boundary=(3, WIDTH),
                gradients=GradientOptions(accumulate_grads=True),
                seed=None,
            )  # fmt: skip
            for step in range(2):  # gradients add up
                x, y = batch(replica + 2 * step)
                looped(right, x, y)
                executor.step(x, y)
            theirs = right[place].parameters()
            for one, other in zip(mine[place].parameters(), theirs, strict=True):
                if one.grad is None or other.grad is None:
                    same.append(one.grad is other.grad)
                else:
                    same.append(torch.equal(one.grad, other.grad))
            dist.barrier(group)
            transport.disconnect()
    return same


def test_pipelines_side_by_side_add_to_what_is_there(programs: list[Program]) -> None:
    for same in run(side_by_side, 4, programs):
        assert len(same) == 16
        assert all(same)


def left(
    rank: int, program: Program, kind: type[GlooTransport] | type[SharedMemoryTransport]
) -> str:
    """Let one rank fail in its module and leave, and return the error of the other."""
    stages = model(0)
    transport = kind(program, group=dist.group.WORLD)
    executor = Executor(
        program,
        rank,
        stages,
        transport,
        loss=loss,
        boundary=(3, WIDTH),
        gradients=GradientOptions(accumulate_grads=True),
        execution=ExecutionOptions(record_timestamps=False),
    )
    x, y = batch(0)
    executor.step(x, y)
    if rank:
        executor.stages[1].module.register_forward_hook(lambda *_: 1 / 0)
    try:
        executor.step(x, y)
    except ExecutionError as error:
        transport.disconnect()
        return error.fact
    return ""


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_who_leaves_ends_the_waits_of_others(
    kind: type[GlooTransport] | type[SharedMemoryTransport], programs: list[Program]
) -> None:
    first, second = run(left, 2, programs[0], kind, limit=30)
    assert "has left" in first or "another process was lost" in first
    assert "ZeroDivisionError" in second


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return x.clone()


def alone(program: Program, stages: Sequence[nn.Module], **how: Any) -> Executor:
    """Return the executor of a program with one rank."""
    transport = make_mailboxes(program, "per_edge", False, [])[0]
    return Executor(program, 0, stages, transport, boundary=(3, WIDTH), **{"loss": loss, **how})


def test_without_a_seed_modules_draw_as_they_come() -> None:
    module, (x, y) = Draws(), batch(0)
    executor = alone(
        compile(one_f_one_b, PipelineShape(ranks=1, microbatches=4)), [module], seed=None
    )
    torch.manual_seed(7)
    for _ in range(2):
        executor.step(x, y)
    torch.manual_seed(7)
    assert module.drawn == [float(torch.rand(())) for _ in range(8)]


def test_a_loss_that_is_infinite_does_not_hide_gradients() -> None:
    """In a plain loop too, gradients do not depend on the value of the loss."""
    module, (x, y) = nn.Linear(WIDTH, 1, bias=False), batch(0)
    program = compile(one_f_one_b, PipelineShape(ranks=1, microbatches=4))
    executor = alone(
        program,
        [module],
        gradients=GradientOptions(accumulate_grads=True),
        loss=lambda y, _: y.sum() + torch.inf,
    )
    executor.step(x, y, grad_scale=0.5)
    assert module.weight.grad is not None
    assert torch.allclose(module.weight.grad, 0.5 * x.sum((0, 1))[None])


@pytest.mark.parametrize("how", [{"clip_grad_norm": True}, {"optimizer": True}])
def test_what_others_are_to_do_is_refused(how: dict[str, bool]) -> None:
    clip = how.get("clip_grad_norm", False)
    program, module = (
        compile(one_f_one_b, PipelineShape(ranks=1, microbatches=4), clip_grad_norm=clip),
        nn.Linear(6, 6),
    )
    optimizer = torch.optim.SGD(module.parameters()) if "optimizer" in how else None
    with pytest.raises(ModelError) as caught:
        alone(
            program, [module], gradients=GradientOptions(accumulate_grads=True), optimizer=optimizer
        )
    assert caught.value.hint.startswith("set accumulate_grads=False")
