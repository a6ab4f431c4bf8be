"""Tests of frozen stages: memory of their forwards, processes, refusals and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
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
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import dualpipe, forward_only, gpipe, one_f_one_b, zb_h1
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import gradients, same_bits

BOUNDARY = Boundary((2, WIDTH), torch.float64)


def stages_of(number: int, frozen_stages: int) -> list[nn.Module]:
    """Return the stages of a tiny model, of which the first are frozen."""
    stages = make_tiny_stages(number)
    for stage in stages[:frozen_stages]:
        stage.requires_grad_(False)
    return stages


def test_nothing_is_kept_of_a_frozen_forward() -> None:
    seen: list[tuple[bool, ...]] = []
    stages = stages_of(3, 2)
    for stage in stages:
        stage.register_forward_hook(
            lambda m, xs, y: seen.append(
                (torch.is_grad_enabled(), xs[0].requires_grad, y.requires_grad)
            )
        )
    program = compile(gpipe, PipelineShape(3, 1), frozen_stages=2)
    InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY).step(*make_batch(1))
    assert seen == [(False, False, False)] * 2 + [(True, False, True)]


# ---------------------------------------------------------------- processes


def on_gloo(rank: int, program: Program) -> list[dict[str, Tensor]]:
    """Return the gradients of the stages of a process."""
    transport = GlooTransport(program)
    stages = stages_of(program.shape.stages, program.frozen_stages)
    executor = Executor(
        program, transport.rank, stages, transport, loss=squared_error, boundary=BOUNDARY,
        gradients=GradientOptions(max_norm=inf if program.clip_grad_norm else None),
    )  # fmt: skip
    m, (inputs, targets) = (
        program.shape.microbatches,
        make_batch(program.dp * program.shape.microbatches),
    )
    share = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
    executor.step(inputs[share], targets[share])
    return gradients([stages[s] for s in program.shape.stages_on_rank[transport.rank]])


@pytest.mark.parametrize(
    ("schedule", "shape", "traits"),
    [
        (one_f_one_b, PipelineShape(2, 4), {"frozen_stages": 1, "dp": 2}),
        (zb_h1, PipelineShape(4, 4), {"frozen_stages": 2, "clip_grad_norm": True}),
        (dualpipe, PipelineShape(2, 4, placement="mirror"), {"frozen_stages": 1}),
    ],
)
def test_real_processes(schedule: Any, shape: PipelineShape, traits: dict[str, Any]) -> None:
    program = compile(schedule, shape, progress_model="per_edge", **traits)
    world = shape.ranks * program.dp
    found = run(on_gloo, world, program)
    plain = stages_of(shape.stages, program.frozen_stages)
    run_sequential(
        plain, *make_batch(program.dp * shape.microbatches), loss=squared_error,
        program=None if program.dp > 1 else program,
    )  # fmt: skip
    right = gradients(plain)
    for process, own in enumerate(found):
        rank = process % shape.ranks
        for s, mine in zip(shape.stages_on_rank[rank], own, strict=True):
            assert bool(mine) == (s >= program.frozen_stages)
            for name, grad in mine.items():
                torch.testing.assert_close(grad, right[s][name], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- refusals


def test_a_frozen_stage_has_nothing_to_train() -> None:
    stages = stages_of(3, 1)
    program = compile(one_f_one_b, PipelineShape(3, 4), frozen_stages=2)
    with pytest.raises(ModelError, match="stage 1 is frozen, but its parameter weight") as caught:
        InProcessExecutor(program, stages, loss=squared_error, boundary=BOUNDARY)
    assert "frozen_stages=1" in caught.value.hint
    evaluation = compile(
        forward_only, PipelineShape(3, 4), frozen_stages=2
    )  # an evaluation trains nothing anyway
    InProcessExecutor(evaluation, stages, loss=squared_error, boundary=BOUNDARY).step(
        *make_batch(4)
    )


def test_frozen_parameters_alone_are_run_back_through() -> None:
    """Without frozen_stages the results are right, but there are needless backwards."""
    stages, plain = stages_of(3, 2), stages_of(3, 2)
    ranks = InProcessExecutor(
        compile(one_f_one_b, PipelineShape(3, 4)), stages, loss=squared_error, boundary=BOUNDARY
    )
    total = ranks.step(*make_batch(4))
    assert torch.equal(total, run_sequential(plain, *make_batch(4), loss=squared_error))
    assert same_bits(gradients(stages), gradients(plain))


def test_whole_numbers_may_leave_a_frozen_stage() -> None:
    """A tokenizer is an example: it needs no gradient."""

    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs().round().long().clamp(max=7)

    stages: Sequence[nn.Module] = [Rounds(), nn.Sequential(nn.Embedding(8, WIDTH), Last())]
    program = compile(one_f_one_b, PipelineShape(2, 4), frozen_stages=1)
    whole = Boundary((2, WIDTH), torch.int64)
    x, target = make_batch(4)
    ranks = InProcessExecutor(program, stages, loss=squared_error, boundary=whole)
    ranks.step(x, target)
    mine = gradients(stages)
    run_sequential(stages, x, target, loss=squared_error, program=program)
    assert same_bits(mine, gradients(stages)) and mine[1]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).double()


# ---------------------------------------------------------------- sizes


def test_sizes() -> None:
    stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    stages[0].requires_grad_(False)
    x = torch.ones(8, 64)
    how: Any = dict(loss=nn.functional.mse_loss, boundary=(8, 64))
    usual, frozen = (
        measure_sizes(stages, x, x, **how),
        measure_sizes(stages, x, x, frozen_stages=1, **how),
    )
    assert (
        frozen.for_stages("saved", 3)[0]
        == frozen.for_stages("deferred_wgrad", 3)[0]
        == frozen.for_stages("saved_and_deferred", 3)[0]
        == 0.0
    )
    assert (frozen.for_stages("saved", 3)[1:] == usual.for_stages("saved", 3)[1:]).all()
    assert (
        frozen.for_stages("model_states", 3) == usual.for_stages("model_states", 3)
    ).all()  # depends on the parameters
    assert frozen.for_stages("model_states", 3)[0] < frozen.for_stages("model_states", 3)[1]
    elu = [*stages[:1], nn.Sequential(nn.ELU(), nn.Linear(64, 64)), *stages[2:]]
    less, more = (
        measure_sizes(elu, x, x, frozen_stages=n, **how).for_stages("saved", 3)[1] for n in (1, 0)
    )
    assert less < more  # it keeps nothing for a gradient of its input
