"""Warming up leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedir import compile, gpt
from schedir.plan import Plan
from schedir.runtime.inprocess import InProcess
from schedir.runtime.warm import warm_up
from schedir.schedules import forward_only, interleaved, one_f_one_b
from tests.gloo.tiny_stages import BOUNDARY, batch, expected, gpt_stages, gradients, same_bits, zb

PLANS = [(one_f_one_b, Plan(2, 4)), (zb, Plan(2, 4)), (interleaved, Plan(2, 4, 2))]


@pytest.mark.parametrize(("schedule", "plan"), PLANS)
def test_a_warm_executor_gives_the_same_bits(schedule: Any, plan: Plan) -> None:
    stages = gpt_stages(plan.stages)
    before = [p.detach().clone() for m in stages for p in m.parameters()]
    world = InProcess(compile(schedule, plan, tied=True), stages, loss=gpt.loss, boundary=BOUNDARY)
    inputs, targets, scale = batch(plan.microbatches)
    ran: list[Any] = []
    for stage in stages:
        bias = next(p for name, p in stage.named_parameters() if name.endswith("norm.bias"))
        bias.register_post_accumulate_grad_hook(ran.append)
    for rank in world.ranks:
        warm_up(rank, inputs[0], targets[0])
    assert len(ran) == plan.stages
    assert not any(g.any() for stage in gradients(stages) for g in stage.values())
    after = [p for m in stages for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    world.step(inputs, targets, scale)
    assert same_bits(gradients(stages), expected(plan)[1])


def test_a_program_without_backward_is_warmed_forward() -> None:
    world = InProcess(
        compile(forward_only, Plan(2, 2)),
        gpt_stages(2, tied=False),
        loss=gpt.loss,
        boundary=BOUNDARY,
    )
    inputs, targets, _ = batch(2)
    for rank in world.ranks:
        warm_up(rank, inputs[0], targets[0])
    world.step(inputs, targets)
