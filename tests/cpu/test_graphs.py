"""What a CUDA graph needs of a step, as far as a CPU can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.plan import Plan
from schedir.runtime.boundary import Boundary
from schedir.runtime.graphs import Rates, undrawn
from schedir.runtime.inprocess import InProcess
from schedir.runtime.precision import LossScale, MainOptimizer, float32_gradients
from schedir.runtime.undone import undone
from schedir.schedules import interleaved, one_f_one_b
from schedir.training import gpt
from tests.cpu.tiny_stages import BOUNDARY, HIDDEN, batch, gpt_stages, gradients, same_bits

CPU = torch.device("cpu")


def stages(dtype: torch.dtype, wide: bool) -> list[nn.Module]:
    modules = [m.to(dtype) for m in gpt_stages(2)]
    for module in modules if wide else ():
        float32_gradients(module)
    return modules


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_a_scale_that_the_host_does_not_read(dtype: torch.dtype, wide: bool, scaled: bool) -> None:
    inputs, targets, _ = batch(3)
    program = compile(one_f_one_b, Plan(2, 3), tied=True, clip=scaled)
    found = []
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        modules = stages(dtype, wide)
        world = InProcess(
            program,
            modules,
            loss=gpt.loss,
            boundary=Boundary(BOUNDARY.shape, dtype),
            loss_scale=LossScale if scaled else None,
        )
        world.step(inputs, targets, scale)
        found.append(gradients(modules))
    assert same_bits(*found)


def trained(adamw: bool, main: bool) -> Any:
    """A world of one rank; its optimizer has stepped if it is AdamW, and not yet if it is SGD."""
    modules = stages(torch.bfloat16 if main else torch.float32, main)[:1]

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        if adamw:
            return torch.optim.AdamW(parameters, lr=0.1)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    world = InProcess(
        compile(one_f_one_b, Plan(1, 2), clip=True),
        [nn.Sequential(*modules)],
        loss=lambda y, _: (y.float() - 1).square().sum(),
        boundary=BOUNDARY,
        optimizer=(lambda ps: MainOptimizer(ps, make)) if main else make,
        loss_scale=lambda: LossScale(8.0, interval=1),
    )
    if adamw:
        world.step(*batch(2)[:2])
    return world


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("adamw", [False, True])
def test_steps_before_a_capture_leave_nothing_behind(adamw: bool, main: bool) -> None:
    """A step after them is as without, where state was and where there was none."""
    plain, warm = trained(adamw, main), trained(adamw, main)
    rank = warm.ranks[0]
    places = [p.data_ptr() for s in rank.stages.values() for p in s.module.parameters()]
    with undone(rank.state):
        for _ in range(2):
            rank.step(*batch(2, seed=1)[:2])
    found = []
    for world in (plain, warm):
        for seed in (2, 3):
            world.step(*batch(2, seed)[:2])
        own = world.ranks[0]
        parameters = [p for s in own.stages.values() for p in s.module.parameters()]
        inner = getattr(own.state.optimizer, "inner", own.state.optimizer)
        states = [t for state in inner.state.values() for t in state.values()]
        found.append([*parameters, *states, own.state.loss_scale.value, own.state.loss_scale.good])
    assert [p.data_ptr() for p in found[1][: len(places)]] == places
    assert len(found[0]) > len(places) + 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_undone_within_another_does_not_end_it() -> None:
    world = trained(adamw=True, main=False)
    (rank,) = world.ranks
    before = [p.detach().clone() for s in rank.stages.values() for p in s.module.parameters()]
    rank.state.optimizer = torch.optim.AdamW(
        [p for s in rank.stages.values() for p in s.module.parameters()], fused=True
    )
    with undone(rank.state):
        with undone(rank.state):
            rank.step(*batch(2)[:2])
        rank.step(*batch(2)[:2])
    after = [p for s in rank.stages.values() for p in s.module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("draws", [False, True])
def test_a_step_that_draws_is_refused(draws: bool) -> None:
    """A replay would draw the same again; whether it draws is seen, and nothing else changes."""
    drawn = nn.Dropout(0.5) if draws else nn.Dropout(0.0)
    stages = [nn.Sequential(gpt_stages(2)[0], drawn), nn.Linear(HIDDEN, HIDDEN)]
    world = InProcess(
        compile(interleaved, Plan(1, 2, 2)),
        stages,
        loss=lambda y, _: y.square().sum(),
        boundary=BOUNDARY,
    )
    (rank,) = world.ranks
    inputs, targets, _ = batch(2)
    first = world.step(inputs, targets)
    if not draws:
        with undrawn(rank):
            assert torch.equal(world.step(inputs, targets), first)
        with rank.state.draws.seeding([]):  # as in a capture
            assert torch.equal(world.step(inputs, targets), first)
        return
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match="rank 0 draws random numbers") as error, undrawn(rank):
        rank.step(inputs, targets)
    assert "without" in error.value.hint and torch.equal(torch.get_rng_state(), before)


def test_statistics_before_a_capture_leave_nothing_behind() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    world = InProcess(
        compile(one_f_one_b, Plan(1, 2)),
        [stage],
        loss=lambda y, _: y.sum(),
        boundary=Boundary((3, 4)),
    )
    before = [b.clone() for b in stage.buffers()]
    with undone(world.ranks[0].state):
        world.step(torch.randn(2, 3, 4), torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(before, stage.buffers(), strict=True))


def test_rates_are_read_from_tensors_and_written_from_groups() -> None:
    def sgd(rates: tuple[float, float]) -> tuple[list[Tensor], torch.optim.Optimizer]:
        weights = [torch.ones(3, requires_grad=True) for _ in rates]
        for weight in weights:
            weight.grad = torch.arange(3.0)
        groups = [{"params": [w], "lr": lr} for w, lr in zip(weights, rates, strict=True)]
        return weights, torch.optim.SGD(groups, fused=True)

    weights, optimizer = sgd((0.5, 0.25))
    rates = Rates(optimizer, CPU)
    optimizer.param_groups[1]["lr"] = 0.125  # as a schedule does
    rates.write()
    with rates.tensors():
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]
    right, plain = sgd((0.5, 0.125))
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, right, strict=True))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_whose_numbers_are_the_hosts_is_refused(make: Any) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for optimizer in (make(parameters, lr=0.1), MainOptimizer(parameters, make)):
        with pytest.raises(ModelError) as error:
            Rates(optimizer, CPU)
        assert make.__name__ in error.value.fact and "fused" in error.value.hint
    Rates(torch.optim.AdamW(parameters, capturable=True), CPU)
    adam = torch.optim.AdamW(parameters, fused=True)
    with Rates(adam, CPU).captured():
        assert adam.param_groups[0]["capturable"] and isinstance(adam.param_groups[0]["lr"], Tensor)
    assert not adam.param_groups[0]["capturable"] and adam.param_groups[0]["lr"] == 1e-3
    assert Rates(None, CPU).groups == []
