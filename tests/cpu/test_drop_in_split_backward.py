"""Tests of stages whose gradients torch's split backward would lose or double, and of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from schedir.torch_pipelining import Schedule
from tests.cpu.drop_in_steps import MB, made, run
from tests.cpu.gloo_processes import RankError
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, Layer, batch, model


class Kind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.both = nn.Parameter(torch.randn(WIDTH))


class View(Kind):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight)).view(-1, 2, 3).view(-1, 6)


class HandedOn(Kind):
    """Also returns its input and a view of a mask."""

    def forward(self, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        return linear(x, self.weight), x, torch.ones(len(x) + 1, 3).bool()[1:]


class Offsets(Kind):
    """Adds an offset that two sums share, after an offset of each sum."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.a + self.both)) + (self.b + self.both)


class TwoLayers(Kind):
    """Uses one weight in two layers with different biases."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.tanh(linear(x, self.weight, self.a)), self.weight, self.b)


class TwoWays(Kind):
    """Also returns a product of weights."""

    def forward(self, x: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + self.a + sum(more)), (self.a * self.b).expand_as(x) * 1.0


class First(Layer):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x + sum(each.float().mean() for each in more))


class Trained(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return mse_loss(y * self.scale, target).reshape(1)[0]


KINDS: list[Callable[[], nn.Module]] = [View, HandedOn, Offsets, TwoLayers, TwoWays]


def differ(rank: int) -> list[tuple[str, str]]:
    """Return the parameters of a rank whose gradients differ from those of a plain loop."""
    found = []
    x, y = batch()
    for kind in KINDS:
        torch.manual_seed(0)
        whole = nn.ModuleList([First(), kind(), kind(), First()])
        loss = Trained()
        for rows, target in zip(x.chunk(MB), y.chunk(MB), strict=True):
            given: Any = (rows,)
            for stage in whole:
                out = stage(*given)
                given = out if isinstance(out, tuple) else (out,)
            (loss(given[0], target) / MB).backward()
        want = {name: p.grad for name, p in whole.named_parameters()}
        trained = loss.scale.grad
        whole.zero_grad()
        loss.zero_grad()
        parts = {s: whole[s] for s in ([0, 3], [1, 2])[rank]}
        run(made(parts, 4, schedule="zb_v", loss_fn=loss), parts, x, y)
        got = {f"{s}.{name}": p.grad for s, m in parts.items() for name, p in m.named_parameters()}
        if rank == 0:  # its gradient is not divided, since it is in no stage
            got["loss"] = None if loss.scale.grad is None else loss.scale.grad / MB
            want["loss"] = trained
        for name, gradient in got.items():
            same = gradient is want[name]  # if both are None
            if gradient is not None and (wanted := want[name]) is not None:
                same = torch.allclose(gradient, wanted, atol=1e-6)
            if not same:
                found.append((kind.__name__, name))
    return found


def test_halves_that_torch_would_lose_double_or_fail_in() -> None:
    assert spawn(differ, 2) == [[], []]


# ---------------------------------------------------------------- one shape, several schedules


def in_turn(rank: int) -> list[bool]:
    """Run two schedules of the same stages, with different shapes and microbatches."""
    whole = model(2)
    parts: dict[int, nn.Module] = {rank: whole[rank]}
    one = made(parts, 2, schedule="one_f_one_b")
    other = Schedule(one._stages, 2, mse_loss, schedule="zb_h1")
    right = []
    for schedule, rows in [(one, 8), (other, 12), (one, 8), (other, 12)]:
        x, y = batch(rows)
        whole.zero_grad()
        run(schedule, parts, x, y)
        want = torch.autograd.grad(mse_loss(whole(x), y), [*whole[rank].parameters()])
        got: Any = [p.grad for p in whole[rank].parameters()]
        right.append(all(map(torch.allclose, got, want)))
    return right


def test_two_schedules_have_the_same_stages_in_turn() -> None:
    assert spawn(in_turn, 2) == [[True] * 4] * 2


def resized(rank: int, *rows: int) -> None:
    parts: dict[int, nn.Module] = {rank: model(2)[rank]}
    schedule = made(parts, 2, schedule="one_f_one_b")
    for n in rows:
        x, _ = batch(n)
        schedule.eval(*((x,) if rank == 0 else ()))


@pytest.mark.parametrize(
    ("rows", "fact"),
    [
        ((8, 4), r"output 0 of stage 0 is \[\d, 6\] of torch.float32, but"),
        ((10,), r"args\[0\] has 10 samples, which n_microbatches=4 does not divide"),
    ],
)
def test_another_shape_is_refused(rows: tuple[int, ...], fact: str) -> None:
    """torch's runtime would return rows of an earlier batch in place of the missing ones."""
    with pytest.raises(RankError, match=fact):
        spawn(resized, 2, *rows)
