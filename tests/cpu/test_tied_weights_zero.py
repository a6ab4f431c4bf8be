"""Tests that weights shared by stages of one rank train with ZeRO as in the unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ModelError
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import interleaved, looped_bfs
from schedir.testing.tiny_model import squared_error
from schedir.transports.gloo import GlooTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run

WIDTH, SCALE, STEPS = 3, 0.25, 2
SHAPES = [(), (1,), (WIDTH,), (WIDTH, WIDTH)]
BOUNDARY = Boundary((2, WIDTH), torch.float64)
adam = partial(torch.optim.AdamW, lr=0.02)


class FactorStage(nn.Module):
    """A stage that multiplies by each of its weights, which other stages may have too."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w if w.dim() == 2 else x * w) + x
        return x


def make_factor_stages(
    stages: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]
) -> list[FactorStage]:
    """Return stages with the weights of these numbers. All weights have equal initial values."""
    weights = [nn.Parameter(torch.full(shape, 0.5, dtype=torch.float64)) for shape in shapes]
    return [FactorStage([weights[k] for k in numbers]) for numbers in stages]


def make_albert_stages(stages: int) -> list[nn.Sequential]:
    """Return stages that share one layer, as in ALBERT."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH).double()
    return [nn.Sequential(layer, nn.Tanh()) for _ in range(stages)]


def make_batch(microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, microbatches, 2, WIDTH, dtype=torch.float64, generator=numbers)
    return x, y


def train_plain_loop(stages: Sequence[nn.Module], microbatches: int) -> list[Tensor]:
    """Return the parameters after some steps of the unsplit model, microbatch by microbatch."""
    model = nn.Sequential(*stages)
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*make_batch(microbatches, step), strict=True):
            torch.autograd.backward(squared_error(model(x), y) * SCALE)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_in_process(
    stages: Sequence[Any], schedule: Any, shape: PipelineShape, zero: int
) -> list[Tensor]:
    """Return the parameters after the same steps of a program."""
    program = compile_tied(schedule, shape, stages, zero=zero)
    return train(InProcessExecutor(program, stages, **OPTIONS), stages)


def compile_tied(schedule: Any, shape: PipelineShape, stages: Any, **how: Any) -> schedir.Program:
    how = {"tied_weights": schedir.find_tied_weights(stages), "clip_grad_norm": False} | how
    return schedir.compile(schedule, shape, progress_model="per_edge", **how)


OPTIONS: dict[str, Any] = {"loss": squared_error, "boundary": BOUNDARY, "optimizer": adam}


def train(ranks: InProcessExecutor, stages: Sequence[nn.Module]) -> list[Tensor]:
    for step in range(STEPS):
        ranks.step(*make_batch(ranks.program.shape.microbatches, step), SCALE)
    with ExitStack() as stack:
        for rank in ranks.executors:
            stack.enter_context(rank.full_parameters())
        return [p.detach().clone() for p in nn.Sequential(*stages).parameters()]


def is_near(parameters: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, expected, strict=True)
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data(), zero=st.integers(0, 3), ranks=st.integers(1, 2), each=st.integers(2, 3))
def test_random_ties_on_rank_train_like_plain_loop(
    data: Any, zero: int, ranks: int, each: int
) -> None:
    """Weights with one element and equal values are still separate weights."""
    shape = PipelineShape(ranks, 2, each)
    number = data.draw(st.integers(1, 3))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=number, max_size=number)) * ranks
    weight_numbers = st.lists(st.integers(0, number - 1), min_size=1, unique=True)
    # Each rank has its own weights, since weights of several ranks are refused.
    stages = [
        tuple(int(shape.first_rank_per_stage[s]) * number + k for k in data.draw(weight_numbers))
        for s in range(shape.stages)
    ]
    trained = train_in_process(make_factor_stages(stages, shapes), looped_bfs, shape, zero)
    assert is_near(
        trained, train_plain_loop(make_factor_stages(stages, shapes), shape.microbatches)
    )


EQUAL_WEIGHTS = ((0, 1), (1, 0)), ((1,), (1,))  # two equal weights of one element, in two stages
LEVELS = {"albert": cases([0, 3], [1, 2]), "pair": cases([1, 2], [0, 3])}


def train_replica(process: int) -> dict[tuple[str, int], list[Tensor]]:
    """Return the weights of one of two replicas after the steps, by model and ZeRO level."""
    weights = {}
    shape = PipelineShape(1, 2, 2)
    local_batch = slice(process * shape.microbatches, (process + 1) * shape.microbatches)
    for name, make in (
        ("albert", partial(make_albert_stages, 2)),
        ("pair", partial(make_factor_stages, *EQUAL_WEIGHTS)),
    ):
        for zero in LEVELS[name]:
            stages: list[Any] = [*make()]
            program = compile_tied(interleaved, shape, stages, zero=zero, dp=2, clip_grad_norm=True)
            parameters = [*nn.Sequential(*stages).parameters()]
            executor = Executor(
                program, 0, stages, GlooTransport(program), loss=squared_error, boundary=BOUNDARY,
                optimizer=adam(parameters), tied_weights=schedir.find_tied_weights(stages),
                gradients=GradientOptions(max_norm=float("inf")),
            )  # fmt: skip
            for step in range(STEPS):
                x, y = make_batch(2 * shape.microbatches, step)
                executor.step(x[local_batch], y[local_batch], SCALE)
            with executor.full_parameters():
                weights[name, zero] = [p.detach().clone() for p in parameters]
    return weights


def test_replicas_with_tied_weights_train_like_plain_loop() -> None:
    one, other = run(train_replica, 2)
    for name, stages in (
        ("albert", make_albert_stages(2)),
        ("pair", make_factor_stages(*EQUAL_WEIGHTS)),
    ):
        expected = train_plain_loop(stages, 4)
        for zero in LEVELS[name]:
            assert is_near(one[name, zero], expected)
            assert all(map(torch.equal, one[name, zero], other[name, zero]))


@pytest.mark.parametrize("zero", cases([3], [1, 2]))
def test_one_parameter_on_several_ranks_is_refused_with_hint(zero: int) -> None:
    """The code in the hint of the error trains like the unsplit model."""
    stages, shape = make_albert_stages(2), PipelineShape(2, 3, 1)
    ties = schedir.find_tied_weights(stages)
    program = compile_tied(interleaved, shape, stages, zero=zero)
    with pytest.raises(ModelError, match=r"0\.weight of stage 0 and 0\.weight of stage 1") as error:
        InProcessExecutor(program, stages, **OPTIONS)
    assert error.value.program == program.name and "tied_weights=ties" in error.value.hint
    assert [p.shape for p in stages[0].parameters()] == [(WIDTH, WIDTH), (WIDTH,)]
    copies = [deepcopy(stage) for stage in stages]
    trained = train(InProcessExecutor(program, copies, tied_weights=ties, **OPTIONS), copies)
    expected = train_plain_loop(make_albert_stages(2), shape.microbatches)
    assert is_near(trained, [*expected, *expected])
