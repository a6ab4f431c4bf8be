"""Tests of stages whose gradients torch's split backward would lose or double.

Further tests run several schedules of the same stages, and other shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from schedir.torch_pipelining import Schedule
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule, run_step
from tests.cpu.gloo_processes import RankError
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, Layer, make_batch, make_model


class StageWithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.both = nn.Parameter(torch.randn(WIDTH))


class ViewOutput(StageWithWeights):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight)).view(-1, 2, 3).view(-1, 6)


class InputAsOutput(StageWithWeights):
    """Also returns its input and a view of a mask."""

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return linear(x, self.weight), x, torch.ones(len(x) + 1, 3).bool()[1:]


class SharedOffset(StageWithWeights):
    """Adds two sums of offsets. One offset is in both sums."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.a + self.both)) + (self.b + self.both)


class SharedWeight(StageWithWeights):
    """Uses one weight in two layers with different biases."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.tanh(linear(x, self.weight, self.a)), self.weight, self.b)


class WeightProductOutput(StageWithWeights):
    """Also returns a product of weights."""

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + self.a + sum(others)), (self.a * self.b).expand_as(x) * 1.0


class MeanOfInputs(Layer):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x + sum(tensor.float().mean() for tensor in others))


class LossWithWeight(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return mse_loss(y * self.scale, target).reshape(1)[0]


KINDS: list[Callable[[], nn.Module]] = [
    ViewOutput,
    InputAsOutput,
    SharedOffset,
    SharedWeight,
    WeightProductOutput,
]


def list_different_gradients(rank: int) -> list[tuple[str, str]]:
    """Return the parameters of a rank with other gradients than in a plain loop."""
    different = []
    x, y = make_batch()
    for kind in KINDS:
        torch.manual_seed(0)
        stages = nn.ModuleList([MeanOfInputs(), kind(), kind(), MeanOfInputs()])
        loss = LossWithWeight()
        for rows, target in zip(x.chunk(N_MICROBATCHES), y.chunk(N_MICROBATCHES), strict=True):
            values: Any = (rows,)
            for stage in stages:
                out = stage(*values)
                values = out if isinstance(out, tuple) else (out,)
            (loss(values[0], target) / N_MICROBATCHES).backward()
        expected = {name: p.grad for name, p in stages.named_parameters()}
        loss_gradient = loss.scale.grad
        stages.zero_grad()
        loss.zero_grad()
        parts = {s: stages[s] for s in ([0, 3], [1, 2])[rank]}
        run_step(make_schedule(parts, 4, schedule="zb_v", loss_fn=loss), parts, x, y)
        actual = {
            f"{s}.{name}": p.grad for s, m in parts.items() for name, p in m.named_parameters()
        }
        if rank == 0:  # the loss is in no stage, so its gradient is not divided
            actual["loss"] = None if loss.scale.grad is None else loss.scale.grad / N_MICROBATCHES
            expected["loss"] = loss_gradient
        for name, gradient in actual.items():
            is_equal = gradient is expected[name]  # if both are None
            if gradient is not None and (expected_gradient := expected[name]) is not None:
                is_equal = torch.allclose(gradient, expected_gradient, atol=1e-6)
            if not is_equal:
                different.append((kind.__name__, name))
    return different


def test_split_backward_has_all_gradients() -> None:
    assert spawn(list_different_gradients, 2) == [[], []]


def run_two_schedules(rank: int) -> list[bool]:
    """Run two schedules of the same stages, with different shapes and microbatches."""
    layers = make_model(2)
    parts: dict[int, nn.Module] = {rank: layers[rank]}
    first = make_schedule(parts, 2, schedule="one_f_one_b")
    second = Schedule(first._stages, 2, mse_loss, schedule="zb_h1")
    are_equal = []
    for schedule, rows in [(first, 8), (second, 12), (first, 8), (second, 12)]:
        x, y = make_batch(rows)
        layers.zero_grad()
        run_step(schedule, parts, x, y)
        expected = torch.autograd.grad(mse_loss(layers(x), y), [*layers[rank].parameters()])
        actual: Any = [p.grad for p in layers[rank].parameters()]
        are_equal.append(all(map(torch.allclose, actual, expected)))
    return are_equal


def test_two_schedules_run_same_stages_alternately() -> None:
    assert spawn(run_two_schedules, 2) == [[True] * 4] * 2


def evaluate_batches(rank: int, *rows: int) -> None:
    parts: dict[int, nn.Module] = {rank: make_model(2)[rank]}
    schedule = make_schedule(parts, 2, schedule="one_f_one_b")
    for n in rows:
        x, _ = make_batch(n)
        schedule.eval(*((x,) if rank == 0 else ()))


@pytest.mark.parametrize(
    ("rows", "fact"),
    [
        ((8, 4), r"output 0 of stage 0 is \[\d, 6\] of torch.float32, but"),
        ((10,), r"args\[0\] has 10 samples, which n_microbatches=4 does not divide"),
    ],
)
def test_changed_batch_size_is_refused(rows: tuple[int, ...], fact: str) -> None:
    """torch's runtime would return rows of an earlier batch instead of the missing rows."""
    with pytest.raises(RankError, match=fact):
        spawn(evaluate_batches, 2, *rows)
