"""Tests of an executor in an existing process group, which adds to existing gradients."""

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
from schedir.runtime.executor_options import GradientOptions
from schedir.schedules import one_f_one_b, zb_h1
from schedir.transports.gloo import GlooTransport
from schedir.transports.in_process.mailbox import make_mailboxes
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.stage_chains import squared_error as loss
from tests.cpu.tiny_stages import copy_gradients, have_same_bits

WIDTH, MICROBATCHES = 6, 4
PLAN = PipelineShape(ranks=2, microbatches=MICROBATCHES)
ACCUMULATED = GradientOptions(accumulate_grads=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def make_model(seed: int) -> list[Layer]:
    torch.manual_seed(seed)
    return [Layer(), Layer()]


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + seed)
    return torch.randn(MICROBATCHES, 3, WIDTH), torch.randn(MICROBATCHES, 3, WIDTH)


def run_plain_loop(stages: list[Layer], x: Tensor, y: Tensor) -> None:
    for mb in range(MICROBATCHES):
        loss(stages[1](stages[0](x[mb])), y[mb]).backward()


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [compile(schedule, PLAN) for schedule in (one_f_one_b, zb_h1)]


def train_two_pipelines(rank: int, programs: list[Program]) -> list[bool]:
    """Run two separate pipelines of two ranks each, and compare gradients with a plain loop."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, replica = mesh.get_group("pp"), mesh.get_local_rank("dp")
    are_equal = []
    for kind in (GlooTransport, SharedMemoryTransport):
        for program in programs:
            expected_stages, local_stages = make_model(replica), make_model(replica)
            stage = mesh.get_local_rank("pp")
            stages = {stage: make_backward_splittable(local_stages[stage])}
            transport = kind(program, group=group)
            executor = Executor(
                program, stage, stages, transport, loss=loss, boundary=(3, WIDTH),
                gradients=ACCUMULATED, seed=None,
            )  # fmt: skip
            for step in range(2):  # gradients add up
                x, y = make_batch(replica + 2 * step)
                run_plain_loop(expected_stages, x, y)
                executor.step(x, y)
            gradients = copy_gradients([local_stages[stage], expected_stages[stage]])
            are_equal.append(have_same_bits(gradients[:1], gradients[1:]))
            dist.barrier(group)
            transport.disconnect()
    return are_equal


def test_parallel_pipelines_accumulate_gradients(programs: list[Program]) -> None:
    for are_equal in run(train_two_pipelines, 4, programs):
        assert are_equal == [True] * 4


def read_error_of_rank(
    rank: int, program: Program, kind: type[GlooTransport] | type[SharedMemoryTransport]
) -> str:
    """Let the module of rank 1 fail, and return the error of this rank."""
    stages = make_model(0)
    transport = kind(program, group=dist.group.WORLD)
    executor = Executor(
        program, rank, stages, transport, loss=loss, boundary=(3, WIDTH), gradients=ACCUMULATED
    )
    x, y = make_batch(0)
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
def test_disconnect_of_failed_rank_ends_waits_of_others(
    kind: type[GlooTransport] | type[SharedMemoryTransport], programs: list[Program]
) -> None:
    first, second = run(read_error_of_rank, 2, programs[0], kind, limit=30)
    assert "has left" in first or "another process was lost" in first
    assert "ZeroDivisionError" in second


class RandomStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return x.clone()


def make_single_rank_executor(
    program: Program, stages: Sequence[nn.Module], **options: Any
) -> Executor:
    """Return the executor of a program with one rank."""
    transport = make_mailboxes(program, "per_edge", False, [])[0]
    return Executor(program, 0, stages, transport, boundary=(3, WIDTH), **{"loss": loss, **options})


def test_modules_use_global_generator_without_seed() -> None:
    module, (x, y) = RandomStage(), make_batch(0)
    executor = make_single_rank_executor(
        compile(one_f_one_b, PipelineShape(ranks=1, microbatches=4)), [module], seed=None
    )
    torch.manual_seed(7)
    for _ in range(2):
        executor.step(x, y)
    torch.manual_seed(7)
    assert module.drawn == [float(torch.rand(())) for _ in range(8)]


def test_infinite_loss_keeps_gradients_finite() -> None:
    """As in a plain loop, gradients do not depend on the value of the loss."""
    module, (x, y) = nn.Linear(WIDTH, 1, bias=False), make_batch(0)
    program = compile(one_f_one_b, PipelineShape(ranks=1, microbatches=4))
    executor = make_single_rank_executor(
        program, [module], gradients=ACCUMULATED, loss=lambda y, _: y.sum() + torch.inf
    )
    executor.step(x, y, grad_scale=0.5)
    assert module.weight.grad is not None
    assert torch.allclose(module.weight.grad, 0.5 * x.sum((0, 1))[None])


@pytest.mark.parametrize("how", [{"clip_grad_norm": True}, {"optimizer": True}])
def test_accumulation_with_clipping_or_optimizer_is_refused(how: dict[str, bool]) -> None:
    clip, module = how.get("clip_grad_norm", False), nn.Linear(6, 6)
    program = compile(one_f_one_b, PipelineShape(1, 4), clip_grad_norm=clip)
    optimizer = torch.optim.SGD(module.parameters()) if "optimizer" in how else None
    with pytest.raises(ModelError) as caught:
        make_single_rank_executor(program, [module], gradients=ACCUMULATED, optimizer=optimizer)
    assert caught.value.hint.startswith("set accumulate_grads=False")
