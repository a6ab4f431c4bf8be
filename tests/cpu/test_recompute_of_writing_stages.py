"""Tests that recomputation of stages that write to buffers and Parameters leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir.compiler.compile import compile
from schedir.errors import ExecutionError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.executor_options import ExecutionOptions
from schedir.schedules import gpipe, interleaved, zb_h1
from tests.cpu.test_recompute import WIDTH, as_reference, batch, make_executor, noisy


class WrittenBuffer(nn.Module):
    """Returns an output that depends on a buffer that each forward writes to."""

    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("u", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.mul_(0.5).add_(x.mean())
        y: Tensor = self.layer(x) * self.u.clone()
        return y


class ReplacedBuffer(WrittenBuffer):
    """Replaces its buffer by a new tensor in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.u = self.u * 0.5 + x.detach().mean()
        y: Tensor = self.layer(x) * self.u
        return y


class Means(nn.Module):
    """Updates frozen Parameters, also without raising their version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        frozen = (nn.Parameter(torch.ones(WIDTH), requires_grad=False) for _ in range(3))
        self.written, self.traceless, self.set = frozen

    def forward(self, x: Tensor) -> Tensor:
        # Optimizers and wrappers find Parameters by their type, also while a forward runs again.
        assert all(isinstance(p, nn.Parameter) for p in (self.written, self.traceless, self.set))
        mean = torch.tanh(self.layer.bias.detach() + x.detach().mean(0))
        with torch.no_grad():
            self.written.mul_(0.9).add_(mean)
        self.traceless.data.mul_(0.9).add_(mean)
        self.set.data = self.set.data * 0.9 + mean
        y: Tensor = torch.tanh(
            self.layer(x) + self.written.clone() + self.traceless * self.set.data
        )
        return y


class SharedBuffer(nn.Module):
    """Two layers that count in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = WrittenBuffer(), WrittenBuffer()
        self.other.u = self.one.u

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.one(x))
        return y


@pytest.mark.parametrize("layer", [WrittenBuffer, ReplacedBuffer, Means, SharedBuffer])
def test_recompute_restores_written_buffers(layer: Any) -> None:
    for schedule, shape in (
        (gpipe, PipelineShape(2, 4)),
        (zb_h1, PipelineShape(2, 4)),
        (interleaved, PipelineShape(2, 4, 2)),
    ):
        as_reference(compile(schedule, shape, recompute="all"), noisy(shape.stages, layer))


class WritesFromSecondForward(WrittenBuffer):
    """Writes to its buffer from the second forward on."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "ran", False):
            self.u.add_(1)
        self.ran = True
        y: Tensor = self.layer(x) * self.u.clone()
        return y


class WriteThroughReference(WrittenBuffer):
    """Writes to its buffer through another reference."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.u]

    def forward(self, x: Tensor) -> Tensor:
        self.listed[0].add_(1)
        y: Tensor = self.layer(x)
        return y


class WrittenBias(WrittenBuffer):
    """Writes to its trained bias."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.bias.data.mul_(0.9)
        y: Tensor = nn.functional.linear(x, self.layer.weight) + self.layer.bias.sum() * 0
        return y


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WritesFromSecondForward, "writes to its buffer u, but its first forward did not"),
        (WriteThroughReference, "through another reference"),
        (WrittenBias, "writes to trained Parameters"),
    ],
)
def test_write_that_recompute_cannot_undo_is_refused(layer: Any, message: str) -> None:
    program = compile(gpipe, PipelineShape(2, 4), recompute="all")
    with pytest.raises(ExecutionError, match=message):
        make_executor(program, noisy(2, layer)).step(*batch(4))


class GradientPenalty(nn.Module):
    """Calls torch.autograd.grad in its forward, as a gradient penalty does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.layer(x))
        (gradient,) = torch.autograd.grad(y.sum(), self.layer.weight, create_graph=True)
        return y + gradient.sum()


def test_forward_that_calls_autograd_grad_is_refused() -> None:
    stages = [*noisy(1, GradientPenalty), *noisy(1, ReplacedBuffer)]

    def step(recompute: Any) -> Tensor:
        program = compile(gpipe, PipelineShape(2, 4), recompute=recompute)
        execution = ExecutionOptions(allow_identical_stages=True)
        return make_executor(program, stages, execution=execution).step(*batch(4))

    with pytest.raises(ExecutionError, match=r"stage 0 .*torch\.autograd\.grad") as error:
        step("all")
    (site,) = error.value.sites
    assert (site.rank, str(site.instr)) == (0, "F 0.0") and "stage != 0" in error.value.hint
    assert step(lambda stage, mb: stage != 0).isfinite()
