"""Tests of stages with torch's activation checkpoints: selective, complete and reentrant."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.cpu.drop_in_steps import N_MICROBATCHES, make_schedule, run_step
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, make_batch

STEPS = 3


def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the outputs of matrix products, and recompute all other outputs."""
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        early_stop=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    ),
    "complete": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class CheckpointedStage(nn.Module):
    """A layer, and two layers under a checkpoint. `calls` counts the forwards of the two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # A reentrant checkpoint needs an input with a gradient, also in the first stage.
        self.first, self.one, self.two = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.kind, self.calls = kind, [0]

    def layers(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return torch.tanh(self.two(torch.tanh(self.one(x)))) + x

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.norm(CHECKPOINTS[self.kind](self.layers, x) if self.kind else self.layers(x))


def get_gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def run_steps(rank: int, runtime: str) -> list[tuple[str, list[str], list[int], list[str]]]:
    """Return for each kind the different gradients, the number of forwards, and the warnings."""
    results = []
    for kind in CHECKPOINTS:
        torch.manual_seed(0)
        expected_stages, stages = ([CheckpointedStage(k) for _ in range(4)] for k in ("", kind))
        for s, (expected_stage, stage_copy) in enumerate(zip(expected_stages, stages, strict=True)):
            nn.init.constant_(expected_stage.norm.bias, s / 8)
            stage_copy.load_state_dict(expected_stage.state_dict())
        parts: dict[int, Any] = {s: stages[s] for s in ([0, 3], [1, 2])[rank]}
        schedule = make_schedule(parts, 4, schedule="zb_v", runtime=runtime)
        different: list[str] = []
        calls: list[int] = []
        caught: list[str] = []
        for step in range(STEPS):
            x, y = make_batch()
            x = x + step
            for stage in (*expected_stages, *stages):
                stage.zero_grad()
            for rows, target in zip(x.chunk(N_MICROBATCHES), y.chunk(N_MICROBATCHES), strict=True):
                mse_loss(nn.Sequential(*expected_stages)(rows), target).backward()
            for stage in parts.values():
                stage.calls[0] = 0
            with warnings.catch_warnings(record=True) as caught_now:
                warnings.simplefilter("always")
                run_step(schedule, parts, x, y)
            caught += [str(w.message) for w in caught_now if "checkpoint" in str(w.message)]
            if step:  # the first step runs more forwards, to find shapes
                calls += [stage.calls[0] for stage in parts.values()]
            different += [
                f"{s}.{name} in step {step}"
                for s, stage in parts.items()
                for name, p in stage.named_parameters()
                if not torch.equal(
                    p.grad, get_gradient(expected_stages[s].get_parameter(name)) / N_MICROBATCHES
                )
            ]
        results.append((kind, different, calls, caught))
    return results


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_gradients_equal_plain_loop(runtime: str) -> None:
    """Gradients are bitwise equal. A split backward recomputes each checkpoint only once."""
    for ranks in spawn(run_steps, 2, runtime):
        for kind, different, calls, caught in ranks:
            assert (kind, different) == (kind, [])
            assert {*calls} == {2 * N_MICROBATCHES}, kind
            assert len(caught) == (runtime == "torch"), (kind, caught)
