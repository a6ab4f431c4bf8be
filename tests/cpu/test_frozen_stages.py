"""Tests of frozen stages: memory of their forwards, gradients, refusals and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ModelError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.runtime import measure_sizes
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.parameters.mixed_precision import MainOptimizer
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import forward_only, gpipe, one_f_one_b
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import copy_gradients, have_same_bits

BOUNDARY = Boundary((2, WIDTH), torch.float64)


def make_stages(number: int, frozen_stages: int) -> list[nn.Module]:
    """Return the stages of a tiny model. The first `frozen_stages` stages are frozen."""
    stages = make_tiny_stages(number)
    for stage in stages[:frozen_stages]:
        stage.requires_grad_(False)
    return stages


def test_frozen_forward_runs_without_autograd() -> None:
    grad_flags: list[tuple[bool, ...]] = []
    stages = make_stages(3, 2)
    for stage in stages:
        stage.register_forward_hook(
            lambda m, xs, y: grad_flags.append(
                (torch.is_grad_enabled(), xs[0].requires_grad, y.requires_grad)
            )
        )
    program = compile(gpipe, PipelineShape(3, 1), frozen_stages=2)
    InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY).step(*make_batch(1))
    assert grad_flags == [(False, False, False)] * 2 + [(True, False, True)]


def compute_local_gradients(rank: int, program: Program) -> list[dict[str, Tensor]]:
    """Return the gradients of the stages of a process."""
    transport = GlooTransport(program)
    stages = make_stages(program.shape.stages, program.frozen_stages)
    executor = Executor(
        program, transport.rank, stages, transport, loss=squared_error, boundary=BOUNDARY
    )
    m = program.shape.microbatches
    inputs, targets = make_batch(program.dp * m)
    share = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
    executor.step(inputs[share], targets[share])
    return copy_gradients([stages[s] for s in program.shape.stages_on_rank[transport.rank]])


def test_gradients_of_replicas_equal_reference() -> None:
    shape = PipelineShape(2, 4)
    program = compile(one_f_one_b, shape, progress_model="per_edge", frozen_stages=1, dp=2)
    plain = make_stages(shape.stages, 1)
    run_sequential(plain, *make_batch(2 * shape.microbatches), loss=squared_error)
    expected = copy_gradients(plain)
    for process, (gradients,) in enumerate(run(compute_local_gradients, 4, program)):
        assert bool(gradients) == bool(process % 2)
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, expected[1][name], rtol=1e-12, atol=1e-12)


def test_frozen_stage_with_trainable_parameter_is_refused() -> None:
    stages = make_stages(3, 1)
    program = compile(one_f_one_b, PipelineShape(3, 4), frozen_stages=2)
    with pytest.raises(ModelError, match="stage 1 is frozen, but its parameter weight") as caught:
        InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY)
    assert "frozen_stages=1" in caught.value.hint
    # An evaluation trains nothing anyway.
    evaluation = compile(forward_only, PipelineShape(3, 4), frozen_stages=2)
    ranks = InProcessExecutor(evaluation, stages, loss=squared_error, boundary=BOUNDARY)
    ranks.step(*make_batch(4))


def test_frozen_parameters_without_frozen_stages_train_correctly() -> None:
    """Without `frozen_stages` the program has needless backwards, but the results are equal."""
    stages, plain = make_stages(3, 2), make_stages(3, 2)
    ranks = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(3, 4)), stages, loss=squared_error, boundary=BOUNDARY
    )
    total = ranks.step(*make_batch(4))
    assert torch.equal(total, run_sequential(plain, *make_batch(4), loss=squared_error))
    assert have_same_bits(copy_gradients(stages), copy_gradients(plain))


def test_rank_with_only_frozen_stages_has_no_optimizer() -> None:
    made_optimizers = []

    def make_optimizer(parameters: list[nn.Parameter]) -> MainOptimizer:
        made_optimizers.append(MainOptimizer(parameters, partial(torch.optim.SGD, lr=0.1)))
        return made_optimizers[-1]

    program = compile(one_f_one_b, PipelineShape(3, 4), frozen_stages=2)
    stages = make_stages(3, 2)
    InProcessExecutor(
        program, stages, loss=squared_error, boundary=BOUNDARY, optimizer=make_optimizer
    ).step(*make_batch(4))
    (optimizer,) = made_optimizers
    assert {*optimizer.parameters} == {*stages[2].parameters()}
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        make_optimizer([*stages[0].parameters()])


def test_frozen_stage_may_send_integers() -> None:
    """A tokenizer is an example of a stage that needs no gradient."""

    class RoundToIntegers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().round().long().clamp(max=7)

    stages: Sequence[nn.Module] = [RoundToIntegers(), nn.Sequential(nn.Embedding(8, WIDTH), Last())]
    program = compile(one_f_one_b, PipelineShape(2, 4), frozen_stages=1)
    boundary = Boundary((2, WIDTH), torch.int64)
    x, target = make_batch(4)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=boundary)
    ranks.step(x, target)
    actual = copy_gradients(stages)
    run_sequential(stages, x, target, loss=squared_error, program=program)
    assert have_same_bits(actual, copy_gradients(stages)) and actual[1]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).double()


def test_frozen_stages_save_no_activations() -> None:
    stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    stages[0].requires_grad_(False)
    x = torch.ones(8, 64)
    options: Any = dict(loss=nn.functional.mse_loss, boundary=(8, 64))
    unfrozen, frozen = (
        measure_sizes(stages, x, x, frozen_stages=n, **options).for_stages for n in (0, 1)
    )
    for name in ("saved", "deferred_wgrad", "saved_and_deferred"):
        assert frozen(name, 3)[0] == 0.0
    assert (frozen("saved", 3)[1:] == unfrozen("saved", 3)[1:]).all()
    # The model states depend on the parameters.
    assert (frozen("model_states", 3) == unfrozen("model_states", 3)).all()
    assert frozen("model_states", 3)[0] < frozen("model_states", 3)[1]
    elu = [*stages[:1], nn.Sequential(nn.ELU(), nn.Linear(64, 64)), *stages[2:]]
    with_frozen, without_frozen = (
        measure_sizes(elu, x, x, frozen_stages=n, **options).for_stages("saved", 3)[1]
        for n in (1, 0)
    )
    assert with_frozen < without_frozen  # it saves nothing for a gradient of its input
