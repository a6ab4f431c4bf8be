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

from tests.cpu.drop_in_steps import MB, made, run
from tests.cpu.gloo_processes import run as spawn
from tests.cpu.torch_pipelines import WIDTH, batch

STEPS = 3


def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the outputs of products, and recompute all others."""
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


class Checkpointed(nn.Module):
    """A layer, and two layers under a checkpoint, which count their forwards."""

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


def gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def steps(rank: int, runtime: str) -> list[tuple[str, list[str], list[int], list[str]]]:
    """Return, for each kind, the gradients that differ, the forwards, and the warnings."""
    found = []
    for kind in CHECKPOINTS:
        torch.manual_seed(0)
        loop, own = ([Checkpointed(k) for _ in range(4)] for k in ("", kind))
        for s, (one, other) in enumerate(zip(loop, own, strict=True)):
            nn.init.constant_(one.norm.bias, s / 8)
            other.load_state_dict(one.state_dict())
        parts: dict[int, Any] = {s: own[s] for s in ([0, 3], [1, 2])[rank]}
        schedule = made(parts, 4, schedule="zb_v", runtime=runtime)
        wrong: list[str] = []
        calls: list[int] = []
        caught: list[str] = []
        for step in range(STEPS):
            x, y = batch()
            x = x + step
            for stage in (*loop, *own):
                stage.zero_grad()
            for rows, target in zip(x.chunk(MB), y.chunk(MB), strict=True):
                mse_loss(nn.Sequential(*loop)(rows), target).backward()
            for stage in parts.values():
                stage.calls[0] = 0
            with warnings.catch_warnings(record=True) as caught_now:
                warnings.simplefilter("always")
                run(schedule, parts, x, y)
            caught += [str(w.message) for w in caught_now if "checkpoint" in str(w.message)]
            if step:  # the first step runs more forwards, to find shapes
                calls += [stage.calls[0] for stage in parts.values()]
            wrong += [
                f"{s}.{name} in step {step}"
                for s, stage in parts.items()
                for name, p in stage.named_parameters()
                if not torch.equal(p.grad, gradient(loop[s].get_parameter(name)) / MB)
            ]
        found.append((kind, wrong, calls, caught))
    return found


@pytest.mark.parametrize("runtime", ["torch", "schedir"])
def test_gradients_are_those_of_a_plain_loop(runtime: str) -> None:
    """They are equal bit for bit. A split backward recomputes each checkpoint only once."""
    for ranks in spawn(steps, 2, runtime):
        for kind, wrong, calls, caught in ranks:
            assert (kind, wrong) == (kind, [])
            assert {*calls} == {2 * MB}, kind
            assert len(caught) == (runtime == "torch"), (kind, caught)
