"""Warming up leaves nothing behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.ops import Instr, Opcode, Token
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.runtime.executor import Executor
from schedir.runtime.handlers import HANDLERS
from schedir.runtime.inprocess import InProcess
from schedir.runtime.rank import Boundary, Call, Handler, State
from schedir.runtime.warmup import warm_up
from schedir.schedules import dualpipe, forward_only, interleaved, one_f_one_b
from schedir.training import gpt
from schedir.transports.collectives import Group, Kind
from schedir.transports.processes import Gloo
from schedir.transports.transport import Work
from tests.cpu.spawn import run
from tests.cpu.tiny_stages import (
    BOUNDARY,
    batch,
    config,
    expected,
    gpt_stages,
    gradients,
    same_bits,
    zb,
)

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


class Noted(Gloo):
    """Notes the groups that meet."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.met: set[Any] = set()

    def collective(self, kind: Kind, group: Group, out: Tensor, own: Tensor) -> Work:
        self.met.add(group)
        return super().collective(kind, group, out, own)


def in_processes(rank: int, schedule: Any, plan: Plan, tp: int, dp: int) -> set[str]:
    """Which groups meet when ranks warm up; the step after it has the bits of one without."""
    program = compile(schedule, plan, tp=tp, dp=dp, tied=not plan.two_way, clip=True)
    transport, found = Noted(program), []
    inputs, targets, scale = batch(plan.microbatches)
    met: set[Any] = set()
    for warm in (False, True):
        executor = Executor(
            program,
            transport.rank,
            {
                s: gpt.build_stage(
                    config(plan.stages, bool(program.tied)), s, plan.stages, tp=transport.tp_group
                )
                for s in plan.stages_of[transport.rank]
            },
            transport,
            loss=partial(gpt.loss, tp=transport.tp_group),
            boundary=BOUNDARY,
        )
        if warm:
            transport.met.clear()
            warm_up(executor, inputs[0], targets[0])
            met = {*transport.met}
        executor.step(inputs, targets, scale)
        stages = [stage.module for stage in executor.stages.values()]
        found.append((gradients(stages), executor.norm))
    (cold, norm), (after, same) = found
    assert same_bits(cold, after) and torch.equal(norm, same)
    return met


@pytest.mark.parametrize(
    ("schedule", "plan", "tp", "dp", "groups"),
    [
        (one_f_one_b, Plan(2, 2), 2, 1, {"tp", (0, 1), "model"}),
        (one_f_one_b, Plan(2, 2), 1, 2, {"dp", (0, 1), "model"}),
        (dualpipe, Plan(2, 4, 2, "mirror"), 1, 1, {"holders", "model"}),
    ],
)
def test_ranks_meet_in_every_group(
    schedule: Any, plan: Plan, tp: int, dp: int, groups: set[str]
) -> None:
    assert set.union(*run(in_processes, plan.ranks * tp * dp, schedule, plan, tp, dp)) == groups


def with_handlers(rank: int) -> list[Any]:
    """What is linked and called where handlers say how they are warmed up."""
    program = compile(interleaved, Plan(1, 3, 2), clip=True)
    inputs, targets, scale = batch(3)
    called, stepping = list[Any](), list[bool]()

    def linked(handler: Handler, state: State, i: Instr) -> Call:
        def run() -> None:
            called.append(i)
            call.run()
            if i.op is Opcode.ReduceGrads and not stepping:  # as one might that makes a value
                state.slot(Token.SAVED, i.stage, 0).fill("a value")

        call = handler.link(state, i)
        return Call(call.wait, run)

    ways: dict[Opcode, Any] = {
        Opcode.ReduceNorm: "skip",
        Opcode.OptimizerStep: lambda state: called.append(state.rank),
    }
    with pytest.MonkeyPatch.context() as patch:
        for op, handler in HANDLERS.items():
            way = Handler(partial(linked, handler), ways.get(op, handler.warm_up))
            patch.setitem(HANDLERS, op, way)
        stages, loss = gpt_stages(2, tied=False), gpt.loss
        executor = Executor(program, 0, stages, Gloo(program), loss=loss, boundary=BOUNDARY)
        warm_up(executor, inputs[0], targets[0])
        warm = [str(one) for one in called]
        assert not any(slots.taken for slots in executor.state.slots.values())
        stepping.append(True)
        executor.step(inputs, targets, scale)
        assert len(called) - len(warm) == len(program)
    right = gradients([stage.module for stage in executor.stages.values()])
    other = InProcess(program, gpt_stages(2, tied=False), loss=loss, boundary=BOUNDARY)
    other.step(inputs, targets, scale)
    assert same_bits(right, gradients([s.module for s in other.ranks[0].stages.values()]))
    return warm


def test_a_handler_says_how_it_is_warmed_up() -> None:
    """Once for each stage, in the order of the Stream; or by a function of its own, once."""
    assert run(with_handlers, 1) == [["reduce_grads 1", "reduce_grads 0", "0"]]
    assert HANDLERS.keys() == {*Opcode}


class Greedy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(1 << 45)  # more than there are addresses


def test_a_stage_that_does_not_fit_is_named() -> None:
    stages = [nn.Linear(4, 4), Greedy()]
    program = compile(one_f_one_b, Plan(2, 2), model="edge")
    world = InProcess(program, stages, loss=lambda y, _: y.sum(), boundary=Boundary((2, 4)))
    warm_up(world.ranks[0], torch.ones(2, 4), torch.ones(2))
    with pytest.raises(ExecutionError) as error:
        warm_up(world.ranks[1], torch.ones(2, 4), torch.ones(2))
    (site,) = error.value.sites
    assert (site.rank, str(site.instr)) == (1, "F 1.0") and "memory" in error.value.fact
