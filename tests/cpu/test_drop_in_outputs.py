"""Tests of stages under `schedir.torch_pipelining.Schedule` that return one buffer repeatedly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.errors import ModelError
from schedir.torch_pipelining.output_checks import PendingOutputs
from tests.cpu.drop_in_steps import MB, made, run
from tests.cpu.gloo_processes import RankError
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, Layer, batch


class Giving(nn.Module):
    """Returns a buffer or a new tensor; `how` selects which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, Layer()
        self.buffers_of_own = [torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)]
        self.calls = 0

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        self.calls += 1
        buffer = self.buffers_of_own[self.calls % 2 if "in turn" in self.how else 0]
        if self.how == "beside":
            return self.layer(x), buffer.copy_(x)
        if "trained" in self.how:
            buffer.detach_()
            return buffer.copy_(self.layer(x))
        if self.how == "data":
            buffer.data.copy_(x)
            return buffer
        torch.add(x, 1, out=buffer)
        return {"as new": buffer * 1, "view": buffer[:, :], "handed on": x}.get(self.how, buffer)


class Taking(nn.Module):
    """Adds its inputs, and writes to those after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for each in more:
            each.add_(1)
        y: Tensor = self.layer(x + sum(more))
        return y


def step_of(rank: int, how: str, last: bool, schedule: str) -> bool:
    """Return whether losses and outputs of a step are equal to those of a plain loop."""
    torch.manual_seed(0)
    whole: list[Any] = [Giving(how), Taking()]
    if last:
        whole = [Layer(), Giving(how)]
    schedule_of = made({rank: whole[rank]}, 2, schedule=schedule)
    x, y = batch()
    losses: list[Tensor] = []
    got = run(schedule_of, {rank: whole[rank]}, x, y, losses=losses if rank else None)
    if rank == 0:
        return True
    want = []
    with torch.no_grad():
        for rows in x.chunk(MB):
            given = whole[0](rows)
            want.append(whole[1](*(given if isinstance(given, tuple) else (given,))).clone())
    right = torch.allclose(got, torch.cat(want))
    return right and all(
        torch.allclose(loss, mse_loss(one, target))
        for loss, one, target in zip(losses, want, y.chunk(MB), strict=True)
    )


@pytest.mark.parametrize(
    ("how", "schedule"),
    [
        ("out", "zb_h1"),
        ("view", "one_f_one_b"),
        ("in turn", "zb_h1"),
        ("trained in turn", "gpipe"),
        ("trained", "gpipe"),
        ("beside", "zb_h1"),
        ("data", "gpipe"),
    ],
)
def test_an_output_that_is_written_to_again_is_refused(how: str, schedule: str) -> None:
    with pytest.raises(RankError, match=r"ModelError: output \d of stage 0 for microbatch \d was"):
        spawn(step_of, 2, how, False, schedule)


def test_so_is_one_that_is_returned() -> None:
    with pytest.raises(RankError, match="ModelError: output 0 of stage 1 for microbatch 0 was"):
        spawn(step_of, 2, "trained", True, "one_f_one_b")


@pytest.mark.parametrize("how", ["as new", "handed on", "trained in turn"])
def test_others_are_not(how: str) -> None:
    """Two alternating buffers pass: each is overwritten after its output's gradient arrived."""
    assert spawn(step_of, 2, how, False, "one_f_one_b") == [True, True]


# ---------------------------------------------------------------- outputs that are still needed


@pytest.mark.parametrize("by_value", [False, True])
def test_an_output_is_needed_until_it_is_released(by_value: bool) -> None:
    outputs, other = PendingOutputs(by_value=by_value), torch.zeros(2)
    one = torch.zeros(2, requires_grad=True) * 1
    outputs.add(0, 0, [one, None])
    outputs.add(0, 1, [other])
    outputs.release(0, 0)
    outputs.release(0, 1)  # without a gradient, nothing shows that it was received
    one.add_(1)
    outputs.add(0, 2, [one])
    other.add_(1)
    with pytest.raises(ModelError) as caught:
        outputs.finish()
    assert caught.value.fields == ("stages",)


def test_writes_that_torch_does_not_count_are_found_by_value() -> None:
    for by_value, found in ((False, False), (True, True)):
        outputs, one = PendingOutputs(by_value=by_value), torch.zeros(2)
        outputs.add(0, 0, [one])
        one.data.add_(1)
        if found:
            with pytest.raises(ModelError):
                outputs.finish()
        else:
            outputs.finish()


def test_the_next_stage_may_write_to_its_input() -> None:
    outputs, one = PendingOutputs(by_value=True), torch.zeros(2)
    trained = torch.zeros(2, requires_grad=True) * 1
    outputs.add(0, 0, [one, trained])
    outputs.require_unwritten((0, 0))
    one.add_(1)
    trained.data.add_(1)
    outputs.note_read(0, 0)
    one.add_(1)
    outputs.require_unwritten((0, 0))
    trained.mul_(2)
    with pytest.raises(ModelError):
        outputs.release(0, 0)
