"""Tests of stages under `schedir.torch_pipelining.Schedule` that return the same buffer again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir.errors import ModelError
from schedir.torch_pipelining.step_checks import PendingOutputs
from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule, run_step
from tests.cpu.gloo_processes import RankError
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, Layer, make_batch


class BufferStage(nn.Module):
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


class InPlaceStage(nn.Module):
    """Adds its inputs, and writes to those after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for tensor in others:
            tensor.add_(1)
        y: Tensor = self.layer(x + sum(others))
        return y


def step_equals_plain_loop(rank: int, how: str, last: bool, schedule: str) -> bool:
    """Return whether losses and outputs of a step are equal to those of a plain loop."""
    torch.manual_seed(0)
    layers: list[Any] = [BufferStage(how), InPlaceStage()]
    if last:
        layers = [Layer(), BufferStage(how)]
    pipeline = make_schedule({rank: layers[rank]}, 2, schedule=schedule)
    x, y = make_batch()
    losses: list[Tensor] = []
    outputs = run_step(pipeline, {rank: layers[rank]}, x, y, losses=losses if rank else None)
    if rank == 0:
        return True
    expected = []
    with torch.no_grad():
        for rows in x.chunk(N_MICROBATCHES):
            values = layers[0](rows)
            expected.append(
                layers[1](*(values if isinstance(values, tuple) else (values,))).clone()
            )
    outputs_equal = torch.allclose(outputs, torch.cat(expected))
    return outputs_equal and all(
        torch.allclose(loss, mse_loss(output, target))
        for loss, output, target in zip(losses, expected, y.chunk(N_MICROBATCHES), strict=True)
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
def test_overwritten_output_is_refused(how: str, schedule: str) -> None:
    with pytest.raises(RankError, match=r"ModelError: output \d of stage 0 for microbatch \d was"):
        spawn(step_equals_plain_loop, 2, how, False, schedule)


def test_overwritten_output_of_last_stage_is_refused() -> None:
    with pytest.raises(RankError, match="ModelError: output 0 of stage 1 for microbatch 0 was"):
        spawn(step_equals_plain_loop, 2, "trained", True, "one_f_one_b")


@pytest.mark.parametrize("how", ["as new", "handed on", "trained in turn"])
def test_outputs_that_are_not_overwritten_too_early_pass(how: str) -> None:
    """Of two alternating buffers, each is overwritten only after the gradient of its output."""
    assert spawn(step_equals_plain_loop, 2, how, False, "one_f_one_b") == [True, True]


@pytest.mark.parametrize("by_value", [False, True])
def test_output_must_not_change_before_release(by_value: bool) -> None:
    outputs, unreleased = PendingOutputs(by_value=by_value), torch.zeros(2)
    released = torch.zeros(2, requires_grad=True) * 1
    outputs.add(0, 0, [released, None])
    outputs.add(0, 1, [unreleased])
    outputs.release(0, 0)
    outputs.release(0, 1)  # output 1 has no gradient, so it is not released
    released.add_(1)
    outputs.add(0, 2, [released])
    unreleased.add_(1)
    with pytest.raises(ModelError) as caught:
        outputs.finish()
    assert caught.value.fields == ("stages",)


def test_writes_to_data_are_detected_by_value() -> None:
    for by_value, is_detected in ((False, False), (True, True)):
        outputs, output = PendingOutputs(by_value=by_value), torch.zeros(2)
        outputs.add(0, 0, [output])
        output.data.add_(1)
        if is_detected:
            with pytest.raises(ModelError):
                outputs.finish()
        else:
            outputs.finish()


def test_next_stage_may_write_to_its_input_after_reading() -> None:
    outputs, plain = PendingOutputs(by_value=True), torch.zeros(2)
    trained = torch.zeros(2, requires_grad=True) * 1
    outputs.add(0, 0, [plain, trained])
    outputs.require_unwritten((0, 0))
    plain.add_(1)
    trained.data.add_(1)
    outputs.note_read(0, 0)
    plain.add_(1)
    outputs.require_unwritten((0, 0))
    trained.mul_(2)
    with pytest.raises(ModelError):
        outputs.release(0, 0)
