"""What virtual ranks on streams do is ordered by events, whatever runs first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedir import compile, gpt
from schedir.passes.slots import Choice
from schedir.plan import Plan
from schedir.runtime import inprocess, streams
from schedir.runtime.inprocess import InProcess
from schedir.schedules import chimera, interleaved, one_f_one_b
from tests.gloo.lanes import Lanes, lanes
from tests.gloo.tiny_stages import BOUNDARY, batch, expected, gpt_stages, gradients, same_bits, zb

PLANS = [
    (one_f_one_b, Plan(3, 4)),
    (zb, Plan(2, 4)),
    (interleaved, Plan(2, 4, 2)),
    (chimera, Plan(2, 4, placement="mirror")),
]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = inprocess._mailboxes
    monkeypatch.setattr(inprocess, "_mailboxes", lambda plan, model, cuda: made(plan, model, True))
    with lanes() as found:
        yield found


def run(schedule: Any, plan: Plan, slots: Choice | None = None) -> Any:
    program = compile(schedule, plan, model="edge", overlap=True, tied=True, clip=True, slots=slots)
    stages = gpt_stages(plan.stages)
    world = InProcess(
        program, stages, loss=gpt.loss, boundary=BOUNDARY, record=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        max_norm=1e9,
    )  # fmt: skip
    for seed in (None, 0, 1):
        world.step(*batch(plan.microbatches), seed=seed)
    return gradients(stages)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("slots", [None, "fewest"])
@pytest.mark.parametrize(("schedule", "plan"), PLANS)
def test_nothing_races(
    schedule: Any,
    plan: Plan,
    slots: Choice | None,
    static: bool,
    found: Lanes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether what is sent is copied to static memory first, as for NCCL, or not."""
    monkeypatch.setattr(streams.StreamMailbox, "static", static)
    got = run(schedule, plan, slots)
    assert not found.races
    assert same_bits(got, expected(plan)[1]) or plan.two_way


class _Ready(streams._Point):
    """A point that nobody waits for."""

    def __init__(self) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_copy_that_does_not_wait_is_seen(
    side: str, found: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = streams._copy

    def hasty(source: Any, target: Any) -> Any:
        sides = {"source": source, "target": target}
        sides[side] = sides[side]._replace(ready=_Ready())
        return copy(**sides)

    monkeypatch.setattr(streams, "_copy", hasty)
    run(one_f_one_b, Plan(3, 4), "fewest")
    assert any("copy_" in race for race in found.races)


def test_a_step_that_does_not_follow_the_caller_is_seen(
    found: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams.StreamMailbox, "begin", lambda self: None)
    run(one_f_one_b, Plan(3, 4))
    assert found.races
