"""Tests of activation offload: views of one storage, several programs, and processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.memory.buffer_sharing import share_slots
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.offload.activation_offloader import OffloadMoves
from schedir.schedules import forward_only, gpipe, one_f_one_b
from schedir.verify.check import check
from tests.cpu.activation_offload_programs import offload_randomly
from tests.cpu.test_recompute import BOUNDARY, WIDTH, batch, equal, noisy, squares, state

torch.set_num_threads(1)


def checked(program: Program, slots: str | None = None) -> Program:
    if slots:
        program = share_slots(program, "minimal")
    return check(program, "per_edge")


def _dropout_stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))


def compared(
    plain: Program, make: Any, inputs: Any = (), steps: int = 2, folder: Any = None, **changes: Any
) -> InProcessExecutor:
    """Check that a program with all activations offloaded equals the program without offload.

    With a folder, some go to the disk. Losses, weights, gradients and buffers are compared.
    """
    results = []
    program = checked(offload_randomly(plain, 7, spilled=0.5 * (folder is not None)), "minimal")
    for variant in (plain, program):
        torch.manual_seed(0)
        stages = make()
        options = {"boundary": BOUNDARY, "loss": squares, **changes}
        offload_options: dict[str, Any] = (
            {"execution": ExecutionOptions(spill_dir=folder)} if variant is program else {}
        )
        world = InProcessExecutor(
            variant,
            stages,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            **options,
            **offload_options,
        )
        data = inputs or [batch(variant.shape.microbatches, k) for k in range(steps)]
        totals = [world.step(x, y, order_seed=k) for k, (x, y) in enumerate(data)]
        results.append([*totals, *state(stages)])
    assert equal(*results)
    return world


def test_views_of_one_storage_are_offloaded_once() -> None:
    """A storage moves once. After the reload its views share it again, each with its own layout."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            products: Tensor = self.layer(x)
            even, odd = products[:, ::2], products[:, 1::2]
            gram = (even * odd).tanh().t() @ even
            return (even * odd.sigmoid()) @ gram.t().tanh()

    program = checked(offload_randomly(compile(gpipe, PipelineShape(1, 2)), 0, late=1), "minimal")
    stages = noisy(1, Views)
    world = InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)
    x, y = batch(2)
    sizes = measure_sizes(stages, x[0], y[0], loss=squares, boundary=BOUNDARY)
    world.step(x, y)
    value = world.executors[0].state.service(OffloadMoves).values[0, 1]
    assert [value.nbytes] == sizes.for_stages("saved", 1).tolist()
    compared(compile(gpipe, PipelineShape(1, 2)), lambda: noisy(1, Views))


def test_offload_with_evaluation_and_second_training_program() -> None:
    shape = PipelineShape(2, 4)
    program = checked(offload_randomly(compile(one_f_one_b, shape), 0), "minimal")
    half = checked(offload_randomly(compile(gpipe, PipelineShape(2, 2)), 1), "minimal")
    evaluation = compile(forward_only, shape)
    results = []
    for main_program, second_program in (
        (compile(one_f_one_b, shape), compile(gpipe, PipelineShape(2, 2))),
        (program, half),
    ):
        stages = noisy(2, _dropout_stage)
        extra = [second_program, evaluation]
        world = InProcessExecutor(
            main_program, stages, loss=squares, boundary=BOUNDARY, extra_programs=extra
        )
        (x, y), (second_inputs, second_targets) = batch(4), batch(2, 1)
        totals = [
            world.evaluate(x, y),
            world.step(second_inputs, second_targets, program=second_program),
            world.step(x, y),
            world.evaluate(x, y),
        ]
        results.append([*totals, *state(stages)])
    assert equal(*results)
