"""Tests of the warning for forwards that change a buffer of several stages or of a loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.pipeline.tied_weights import find_tied_weights
from schedir.runtime.in_process import InProcessExecutor
from schedir.schedules import chimera, gpipe, interleaved
from tests.cpu.test_module_buffers import (
    BOUNDARY,
    WIDTH,
    batch,
    newest_first,
    normed,
    squares,
    virtual,
)

torch.set_num_threads(1)


class SharedMean(nn.Module):
    """A linear layer and a running mean of its inputs. Stages may share the mean's memory."""

    def __init__(self, k: int, mean: Tensor, changes: bool = True) -> None:
        super().__init__()
        self.inner, self.changes = nn.Linear(WIDTH, WIDTH), changes
        self.own: Tensor
        self.mean: Tensor
        self.register_buffer("own", torch.zeros(WIDTH))
        self.register_buffer("mean", mean)
        numbers = torch.Generator().manual_seed(k)
        for p in self.inner.parameters():
            p.data = torch.randn(p.shape, generator=numbers)

    def forward(self, x: Tensor) -> Tensor:
        self.own += 1.0
        if self.changes:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(self.inner(x) + self.mean.clone())


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (gpipe, PipelineShape(3, 4)),
        (interleaved, PipelineShape(1, 4, 3)),
        (gpipe, PipelineShape(1, 4)),
    ],
)
def test_written_buffer_of_several_stages_warns(
    schedule: Any, shape: PipelineShape, view: bool
) -> None:
    """The stages are on one or several ranks of a process. A single stage gets no warning."""
    mean = torch.zeros(WIDTH)
    stages = [SharedMean(k, mean[:] if view else mean) for k in range(shape.stages)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = virtual(schedule, shape, [*stages])
        for _ in range(2):
            ranks.step(*batch(4))
    messages = sorted(str(w.message) for w in caught)
    assert len(messages) == (shape.stages if shape.stages > 1 else 0)  # once per stage
    for s, text in enumerate(messages):
        assert f"stage {s} changes its buffer mean" in text


@pytest.mark.parametrize("shape", [PipelineShape(2, 4, 1), PipelineShape(1, 4, 2)])
def test_unchanged_buffer_of_several_stages_does_not_warn(shape: PipelineShape) -> None:
    mean = torch.ones(WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        virtual(interleaved, shape, [SharedMean(k, mean, changes=False) for k in range(2)]).step(
            *batch(4)
        )
        parts = torch.zeros(2, WIDTH)  # disjoint parts of one memory
        virtual(interleaved, shape, [SharedMean(k, parts[k]) for k in range(2)]).step(*batch(4))


def test_shared_module_of_several_ranks_warns() -> None:
    one, other = normed(2)
    stages = [one, other, one]
    program = compile(gpipe, PipelineShape(3, 4), tied_weights=find_tied_weights(stages))
    ranks = InProcessExecutor(program, stages, loss=squares, boundary=BOUNDARY)
    with pytest.warns(UserWarning, match=r"buffer norm.running_mean .* another stage uses it"):
        ranks.step(*batch(4))


class CountingLoss(nn.Module):
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        self.count += 1.0
        return squares(y, target)


def test_written_loss_buffer_warns_or_is_refused() -> None:
    stages: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    program = compile(newest_first, PipelineShape(2, 4), progress_model="per_edge")
    ranks = InProcessExecutor(program, stages, loss=CountingLoss(), boundary=BOUNDARY)
    with pytest.warns(UserWarning, match=r"stage 1 changes its buffer loss.count"):
        ranks.step(*batch(4))
    program = compile(chimera, PipelineShape(2, 4, placement="mirror"))
    ranks = InProcessExecutor(program, stages, loss=CountingLoss(), boundary=BOUNDARY)
    message = r"loss.count in a forward, and each of the 2 stage replicas"
    with pytest.raises(ExecutionError, match=message):
        ranks.step(*batch(4))
