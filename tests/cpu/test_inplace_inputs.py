"""Tests of stages that write to their inputs.

They equal the reference bit for bit, and do not change the memory of other stages or the caller.
"""

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
from tests.cpu.stage_chains import make_chain_schedule
from tests.cpu.stage_chains import squared_error as loss
from tests.cpu.tiny_stages import copy_gradients, have_same_bits

WIDTH = 5
BOUNDARY = Boundary((3, WIDTH))


class TanhStage(nn.Module):
    """A layer that saves its output, which the next stage must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        return y


class WriteIfPositive(nn.Module):
    """Writes to its input if its sum is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() if float(x.sum()) > 0 else x * 1


def make_stages(number: int) -> list[nn.Module]:
    """Return stages that first write to their input, and at the end save their output."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.ReLU(inplace=True), TanhStage()) for _ in range(number)]


def make_batch(m: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, m, 3, WIDTH, generator=numbers)
    return x, y


def run_plain_loop(number: int, m: int) -> tuple[float, list[dict[str, Tensor]]]:
    """Run a plain loop of layers that do not write in place. Return loss and gradients."""
    stages_of_loop = make_stages(number)
    for stage in stages_of_loop:
        stage[0].inplace = False  # type: ignore[index]
    total = sum(
        loss(nn.Sequential(*stages_of_loop)(x), t) for x, t in zip(*make_batch(m), strict=True)
    )
    total.backward()  # type: ignore[union-attr]
    return float(total.detach()), copy_gradients(stages_of_loop)  # type: ignore[union-attr]


@pytest.mark.parametrize("slots", [None, "minimal"])
@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (one_f_one_b, PipelineShape(3, 4)),  # the input is received
        (
            gpipe,
            PipelineShape(1, 3, placement=(0, 0, 0)),
        ),  # the input is the output of the previous stage on this rank
        (gpipe, PipelineShape(2, 4, placement=(0, 0, 1, 1))),
    ],
)
def test_inplace_stages_equal_stages_without_inplace_writes(
    schedule: Any, shape: PipelineShape, slots: Any
) -> None:
    if schedule is gpipe:
        schedule = make_chain_schedule(shape.ranks, shape.stages)
    program = compile(schedule, shape, buffer_sharing=slots)
    stages_of_model = make_stages(shape.stages)
    world = InProcessExecutor(program, stages_of_model, loss=loss, boundary=BOUNDARY)
    x, target = make_batch(shape.microbatches)
    before, (total, grads) = x.clone(), run_plain_loop(shape.stages, shape.microbatches)
    for _ in range(3):  # later steps use what the first microbatch showed about a module
        assert float(world.step(x, target)) == pytest.approx(total)
        actual = copy_gradients(stages_of_model)
        for a, b in zip(actual, grads, strict=True):
            assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-6) for n in a)
        assert torch.equal(x, before)  # the caller's batch is unchanged
    reference_stages = make_stages(shape.stages)
    run_sequential(reference_stages, x, target, loss=loss, program=program)
    assert have_same_bits(copy_gradients(reference_stages), actual) and torch.equal(x, before)


def test_forward_only_program_does_not_change_batch() -> None:
    program = compile(lambda r, P, m: m * F[0] + m * F[1], PipelineShape(1, 2, placement=(0, 0)))
    stages_of_model = [nn.Flatten(0, 1), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))]
    x, target = make_batch(2)
    x, before = x[:, :, None], x.clone()[:, :, None]
    world = InProcessExecutor(
        program, stages_of_model, loss=lambda y, t: y.sum(), boundary=BOUNDARY
    )
    for _ in range(2):
        world.step(x, target)
        assert torch.equal(x, before)


@pytest.mark.parametrize("first", [nn.Identity, nn.SiLU, lambda: nn.ReLU(inplace=True)])
def test_batches_at_any_alignment_equal_plain_loop(first: Any) -> None:
    """Rows have an odd width, so each microbatch has another offset in its cache line."""

    def make_three_stages() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(first(), TanhStage()), TanhStage(), TanhStage()]

    stages_of_model, reference_stages, loop_stages = (
        make_three_stages(),
        make_three_stages(),
        make_three_stages(),
    )
    x, target = make_batch(6)
    world = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(3, 6)), stages_of_model, loss=loss, boundary=BOUNDARY
    )
    total = world.step(x, target)
    assert torch.equal(total, run_sequential(reference_stages, x, target, loss=loss))
    own_copy = x.clone()  # the loop writes to it
    for mb in range(6):
        loss(nn.Sequential(*loop_stages)(own_copy[mb]), target[mb]).backward()
    assert have_same_bits(copy_gradients(stages_of_model), copy_gradients(loop_stages))
    assert have_same_bits(copy_gradients(reference_stages), copy_gradients(loop_stages))


def test_inplace_dropout_writes_only_in_training() -> None:
    program = compile(one_f_one_b, PipelineShape(1, 2))
    stages_of_model = [nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(WIDTH, WIDTH))]
    reference_stages = deepcopy(stages_of_model)
    world = InProcessExecutor(program, stages_of_model, loss=loss, boundary=BOUNDARY)
    x, target = make_batch(2)
    before = x.clone()
    for step, mode in enumerate((False, True, False, True)):
        for stage in stages_of_model + reference_stages:
            stage.train(mode)
        world.step(x, target)
        run_sequential(reference_stages, x, target, loss=loss, step=step)
        assert have_same_bits(
            copy_gradients(stages_of_model), copy_gradients(reference_stages)
        ) and torch.equal(x, before)


def _train_rank(rank: int, kind: Any) -> tuple[list[dict[str, Tensor]], bool]:
    program = compile(one_f_one_b, PipelineShape(2, 4), progress_model="per_edge")
    stage = make_stages(2)[rank]
    executor = Executor(program, rank, {rank: stage}, kind(program), loss=loss, boundary=BOUNDARY)
    x, target = make_batch(4)
    before = x.clone()
    for _ in range(3):
        executor.step(x, target)
    return copy_gradients([stage]), torch.equal(x, before)


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_inplace_stages_between_processes_equal_reference(kind: Any) -> None:
    reference_stages = make_stages(2)
    run_sequential(reference_stages, *make_batch(4), loss=loss)
    results = run(_train_rank, 2, kind)
    assert have_same_bits(
        [gradients_of_rank for (gradients_of_rank,), _ in results], copy_gradients(reference_stages)
    )
    assert all(is_unchanged for _, is_unchanged in results)


def test_first_write_after_first_microbatch_is_refused() -> None:
    program = compile(one_f_one_b, PipelineShape(1, 2))
    stages_of_model = [nn.Sequential(WriteIfPositive(), nn.Linear(WIDTH, WIDTH))]
    x, target = make_batch(2)
    x[0], x[1] = -1, 1
    with pytest.raises(ExecutionError, match="changes its input in place") as error:
        InProcessExecutor(program, stages_of_model, loss=loss, boundary=BOUNDARY).step(x, target)
    assert error.value.sites[0].index == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_undeclared_write_is_accepted_only_on_received_inputs(ranks: int) -> None:
    class WriteToInput(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu_()

    stages_of_model = [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(WriteToInput(), nn.Linear(WIDTH, WIDTH)),
    ]

    def in_turn(r: int, P: int, m: int) -> RankSchedule:
        return m * (F + B) if P > 1 else m * (F[0] + F[1] + B[1] + B[0])

    program = compile(in_turn, PipelineShape(ranks, 2, placement=(0, ranks - 1)))
    world = InProcessExecutor(program, stages_of_model, loss=loss, boundary=BOUNDARY)
    if ranks > 1:
        world.step(*make_batch(2))
        return
    with pytest.raises(ExecutionError) as error:
        world.step(*make_batch(2))
    assert str(error.value).splitlines() == [
        "in_turn: ModelError: a stage changes its input in place, but has no copy of it. The first "
        "forward of the stage did not change the input, or other code may read it",
        "  rank 0 #1   F 1.0  failed",
        "  hint: begin the forward with x = x.clone(), or set inplace=True on the layer",
    ]


def test_sizes_count_saved_input_and_output() -> None:
    """A stage that writes to its input saves the changed input and its output."""
    x, target = make_batch(1)
    before = x.clone()
    sizes = measure_sizes(make_stages(3), x[0], target[0], loss=loss, boundary=BOUNDARY)
    assert torch.equal(x, before)
    size = 4 * 3 * WIDTH
    assert sizes.saved[:2] == (2 * size, 2 * size)  # type: ignore[index]
