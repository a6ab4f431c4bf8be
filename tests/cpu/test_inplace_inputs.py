"""Tests of stages that write to their inputs: bits of the reference, and no foreign memory."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import gpipe, one_f_one_b
from schedir.schedules.schedule_algebra import B, F, RankSchedule
from schedir.transports.gloo import GlooTransport
from schedir.transports.shared_memory import SharedMemoryTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gradients, same_bits

WIDTH = 5
BOUNDARY = Boundary((3, WIDTH))


class Tanh(nn.Module):
    """A layer that saves its output, which the next stage must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        return y


class Sometimes(nn.Module):
    """Writes to its input if its sum is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() if float(x.sum()) > 0 else x * 1


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def stages(number: int) -> list[nn.Module]:
    """Return stages that first write to their input, and save their output last."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.ReLU(inplace=True), Tanh()) for _ in range(number)]


def batch(m: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, m, 3, WIDTH, generator=numbers)
    return x, y


def plain(number: int, m: int) -> tuple[float, list[dict[str, Tensor]]]:
    """Run a loop of plain torch, with layers that do not write in place."""
    own = stages(number)
    for stage in own:
        stage[0].inplace = False  # type: ignore[index]
    total = sum(loss(nn.Sequential(*own)(x), t) for x, t in zip(*batch(m), strict=True))
    total.backward()  # type: ignore[union-attr]
    return float(total.detach()), gradients(own)  # type: ignore[union-attr]


@pytest.mark.parametrize("slots", [None, "minimal"])
@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (one_f_one_b, PipelineShape(3, 4)),  # received
        (gpipe, PipelineShape(1, 3, placement=(0, 0, 0))),  # handed over
        (gpipe, PipelineShape(2, 4, placement=(0, 0, 1, 1))),
    ],
)
def test_the_bits_of_layers_that_write_to_nothing(
    schedule: Any, shape: PipelineShape, slots: Any
) -> None:
    def mine(r: int, P: int, m: int) -> RankSchedule:
        own = range(len(shape.stages_on_rank[r]))
        down = sum((m * F[j] for j in own[1:]), m * F[0])
        return down + sum((m * B[j] for j in reversed(own[:-1])), m * B[own[-1]])

    program = compile(mine if schedule is gpipe else schedule, shape, buffer_sharing=slots)
    own = stages(shape.stages)
    world = InProcessExecutor(program, own, loss=loss, boundary=BOUNDARY)
    x, target = batch(shape.microbatches)
    before, (total, grads) = x.clone(), plain(shape.stages, shape.microbatches)
    for _ in range(3):  # later steps use what the first microbatch showed about a module
        assert float(world.step(x, target)) == pytest.approx(total)
        got = gradients(own)
        for a, b in zip(got, grads, strict=True):
            assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-6) for n in a)
        assert torch.equal(x, before)  # the caller's batch is unchanged
    again = stages(shape.stages)
    run_sequential(again, x, target, loss=loss, program=program)
    assert same_bits(gradients(again), got) and torch.equal(x, before)


def test_what_runs_forward_only_leaves_the_batch_alone() -> None:
    program = compile(lambda r, P, m: m * F[0] + m * F[1], PipelineShape(1, 2, placement=(0, 0)))
    own = [nn.Flatten(0, 1), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))]
    x, target = batch(2)
    x, before = x[:, :, None], x.clone()[:, :, None]
    world = InProcessExecutor(program, own, loss=lambda y, t: y.sum(), boundary=BOUNDARY)
    for _ in range(2):
        world.step(x, target)
        assert torch.equal(x, before)


@pytest.mark.parametrize("first", [nn.Identity, nn.SiLU, lambda: nn.ReLU(inplace=True)])
def test_the_bits_of_a_plain_loop_wherever_a_batch_lies(first: Any) -> None:
    """With rows of an odd width, each microbatch has another offset in its cache line."""

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(first(), Tanh()), Tanh(), Tanh()]

    own, again, loop = made(), made(), made()
    x, target = batch(6)
    world = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(3, 6)), own, loss=loss, boundary=BOUNDARY
    )
    total = world.step(x, target)
    assert torch.equal(total, run_sequential(again, x, target, loss=loss))
    mine = x.clone()  # the loop writes to it
    for mb in range(6):
        loss(nn.Sequential(*loop)(mine[mb]), target[mb]).backward()
    assert same_bits(gradients(own), gradients(loop))
    assert same_bits(gradients(again), gradients(loop))


def test_a_dropout_writes_in_training_alone() -> None:
    program = compile(one_f_one_b, PipelineShape(1, 2))
    own = [nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(WIDTH, WIDTH))]
    again = deepcopy(own)
    world = InProcessExecutor(program, own, loss=loss, boundary=BOUNDARY)
    x, target = batch(2)
    before = x.clone()
    for step, mode in enumerate((False, True, False, True)):
        for stage in own + again:
            stage.train(mode)
        world.step(x, target)
        run_sequential(again, x, target, loss=loss, step=step)
        assert same_bits(gradients(own), gradients(again)) and torch.equal(x, before)


def _process(rank: int, kind: Any) -> tuple[list[dict[str, Tensor]], bool]:
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    own = stages(2)[rank]
    executor = Executor(program, rank, {rank: own}, kind(program), loss=loss, boundary=BOUNDARY)
    x, target = batch(4)
    before = x.clone()
    for _ in range(3):
        executor.step(x, target)
    return gradients([own]), torch.equal(x, before)


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_over_processes(kind: Any) -> None:
    again = stages(2)
    run_sequential(again, *batch(4), loss=loss)
    found = run(_process, 2, kind)
    assert same_bits([one for (one,), _ in found], gradients(again))
    assert all(same for _, same in found)


def test_what_writes_only_later_is_said() -> None:
    program = compile(one_f_one_b, PipelineShape(1, 2))
    own = [nn.Sequential(Sometimes(), nn.Linear(WIDTH, WIDTH))]
    x, target = batch(2)
    x[0], x[1] = -1, 1
    with pytest.raises(ExecutionError, match="changes its input in place") as error:
        InProcessExecutor(program, own, loss=loss, boundary=BOUNDARY).step(x, target)
    assert error.value.sites[0].index == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_that_writes_works_on_what_is_received_and_else_is_said(ranks: int) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu_()

    own = [nn.Linear(WIDTH, WIDTH), nn.Sequential(Writes(), nn.Linear(WIDTH, WIDTH))]

    def mine(r: int, P: int, m: int) -> RankSchedule:
        return m * (F + B) if P > 1 else m * (F[0] + F[1] + B[1] + B[0])

    program = compile(mine, PipelineShape(ranks, 2, placement=(0, ranks - 1)))
    world = InProcessExecutor(program, own, loss=loss, boundary=BOUNDARY)
    if ranks > 1:
        world.step(*batch(2))
        return
    with pytest.raises(ExecutionError) as error:
        world.step(*batch(2))
    assert str(error.value).splitlines() == [
        "mine: ModelError: a stage changes its input in place; either other code may read this "
        "input, or the first forward of the stage did not change it",
        "  rank 0 #1   F 1.0  failed",
        "  hint: begin the forward with x = x.clone(), or set inplace=True on the layer",
    ]


def test_sizes_are_those_of_what_is_kept() -> None:
    """A stage that writes to its input keeps the input in place, and its output."""
    x, target = batch(1)
    before = x.clone()
    one = measure_sizes(stages(3), x[0], target[0], loss=loss, boundary=BOUNDARY)
    assert torch.equal(x, before)
    size = 4 * 3 * WIDTH
    assert one.saved[:2] == (2 * size, 2 * size)  # type: ignore[index]
