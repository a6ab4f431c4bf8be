"""Tests that `schedir.torch_pipelining.Schedule` sums the gradients of tied weights once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from schedir import TiedWeights, find_tied_weights
from schedir.errors import ExecutionError, ModelError
from schedir.testing.gradient_assertion import assert_same_gradients
from tests.cpu.drop_in_steps import (
    N_MICROBATCHES,
    GradientCase,
    make_schedule,
    make_step,
    run_gradient_cases,
)
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.test_drop_in_replicas import sharded, wrap_in_ddp
from tests.cpu.torch_pipelines import WIDTH, Step, make_batch


class TiedStage(nn.Module):
    """A stage whose weight `a` may be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


def tied_model(stages: int, shared: tuple[int, ...]) -> nn.Sequential:
    """Return a model in which some stages have the same weight."""
    torch.manual_seed(0)
    ends = [TiedStage() for _ in range(stages)]
    for s in shared[1:]:
        ends[s].a.weight = ends[shared[0]].a.weight
    return nn.Sequential(*ends)


def tie_weights(*stages: int) -> TiedWeights:
    return TiedWeights((tuple((s, "a.weight") for s in stages),))


CASES = [
    ("zb_h1", "loop", 2, (0, 1)),
    ("interleaved", "loop", 4, (0, 3)),
    ("zb_v", "vee", 4, (0, 3)),  # on one rank, as one Parameter
    ("zb_v", "vee", 4, (0, 1)),
    ("dualpipe_v", "vee", 4, (0, 1, 3)),  # on both ranks, and one of them has two
]


def make_gradient_cases() -> dict[str, GradientCase]:
    """Return the cases of gradients on two ranks, by name."""
    found: dict[str, GradientCase] = {}

    def add(name: str, shared: tuple[int, ...], stages: int, step: Step, *sizes: Any) -> None:
        found[name] = GradientCase(step, tied_model(stages, shared), make_batch(16), *sizes)

    for name, placement, stages, shared in CASES:
        step = make_step(placement, schedule=name, tied_weights=tie_weights(*shared))
        add(f"{name} {shared}", shared, stages, step)
    # One parameter in two stages of a rank needs no option.
    add("one parameter", (0, 3), 4, make_step("vee", schedule="zb_v"))
    # Each step sums only its gradients.
    step = make_step("loop", schedule="interleaved", tied_weights=tie_weights(0, 3), steps=2)
    add("steps", (0, 3), 4, step, 2 * N_MICROBATCHES, N_MICROBATCHES)
    step = make_step(
        "loop", schedule="zb_h1", tied_weights=tie_weights(0, 1), steps=2, scale_grads=False
    )
    add("unscaled steps", (0, 1), 2, step, 2 * N_MICROBATCHES, 1)
    return found


GRADIENT_CASES = make_gradient_cases()


@pytest.fixture(scope="module")
def check_same_gradients() -> Callable[[Any], None]:
    return run_gradient_cases(GRADIENT_CASES, ranks=2)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_equal_those_of_one_weight(name: str, check_same_gradients: Any) -> None:
    check_same_gradients(name)


@pytest.mark.parametrize(("stages", "shared"), [case[2:] for case in CASES])
def test_shared_weights_are_found(stages: int, shared: tuple[int, ...]) -> None:
    assert find_tied_weights([*tied_model(stages, shared)]) == tie_weights(*shared)


def test_tied_weights_with_replicas() -> None:
    found = {}
    for how, wrap in (("sharded", sharded()), ("replicated", wrap_in_ddp)):
        step = make_step("loop", schedule="zb_h1", tied_weights=tie_weights(0, 1), dp=2, wrap=wrap)
        found[how] = GradientCase(
            step, tied_model(2, (0, 1)), make_batch(16), 2 * N_MICROBATCHES, replicas=2
        )
    check = run_gradient_cases(found, ranks=4)
    check("sharded")
    check("replicated")


def test_equal_untied_weights_are_refused() -> None:
    step = make_step("loop", schedule="zb_h1")
    with pytest.raises(ExecutionError, match="are equal, but they are not tied"):
        assert_same_gradients(
            step, tied_model(2, (0, 1)), make_batch(16), ranks=2, microbatches=N_MICROBATCHES,
            loss_fn=mse_loss,
        )  # fmt: skip


def run_stage_from_meta_device(rank: int, differ: bool) -> str:
    """Run a step of a stage that was created on the meta device, as in torchtitan.

    Return the gradient of the tied weight, or the error.
    """
    with torch.device("meta"):
        stage = TiedStage()
    schedule = make_schedule({rank: stage}, 2, schedule="zb_h1", tied_weights=tie_weights(0, 1))
    stage.to_empty(device="cpu")
    torch.manual_seed(0)
    nn.init.normal_(stage.a.weight, std=1.0 + rank * differ)
    torch.manual_seed(1 + rank)
    nn.init.normal_(stage.b.weight)
    nn.init.zeros_(stage.b.bias)
    x, y = make_batch()
    try:
        schedule.step(*((x,) if rank == 0 else ()), target=y if rank else None)
    except ModelError as error:
        return error.fact
    assert stage.a.weight.grad is not None
    return str(stage.a.weight.grad.tolist())


def test_weights_initialized_after_schedule() -> None:
    first, second = spawn(run_stage_from_meta_device, 2, False)
    assert first == second
    first, second = spawn(run_stage_from_meta_device, 2, True)
    assert (
        first == second == "a.weight of stage 0 and a.weight of stage 1 are one weight, but their "
        "values differ"
    )
