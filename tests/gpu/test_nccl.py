"""A tensor-parallel GPT in a pipeline, over real NCCL: 2 x 2 processes on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir import compile
from schedir.analysis.models import Model
from schedir.ir.plan import Plan
from schedir.ir.program import Program
from schedir.passes.record import Choice
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.measured import measured
from schedir.schedules import interleaved, one_f_one_b
from schedir.transports.nccl import nccl
from schedir.transports.processes import Gloo
from schedir.transports.registry import TRANSPORTS
from tests.cpu.spawn import run
from tests.cpu.tiny_stages import batch, gpt_executor, gradients_by_stage, zb
from tests.gpu.shared import share_gpu
from tests.legal import too_early

PLANS = [(one_f_one_b, Plan(2, 4)), (zb, Plan(2, 4)), (interleaved, Plan(2, 4, 2))]
Gradients = dict[int, dict[str, Tensor]]


def _program(schedule: Any, plan: Plan, model: Model, slots: Choice | None = None) -> Program:
    return compile(schedule, plan, tp=2, model=model, tied=True, overlap=True, slots=slots)


def _gradients(executor: Executor) -> Gradients:
    own = gradients_by_stage(executor)
    return {s: {name: g.cpu() for name, g in named.items()} for s, named in own.items()}


def on_cpu(rank: int, schedule: Any, plan: Plan) -> Gradients:
    program = _program(schedule, plan, Gloo.model)
    executor = gpt_executor(program, Gloo(program))
    executor.step(*batch(plan.microbatches))
    return _gradients(executor)


def on_gpu(
    rank: int,
    folder: str,
    kind: Literal["edge", "grouped"],
    schedule: Any,
    plan: Plan,
    slots: Choice | None,
) -> list[Gradients]:
    """Gradients of a first step, of one in which the host may not wait, and of a graph's."""
    device = share_gpu(rank, folder)
    torch.use_deterministic_algorithms(True)
    program = _program(schedule, plan, TRANSPORTS[kind].model, slots)
    executor = gpt_executor(program, nccl(program, device, kind), device)
    inputs, targets, scale = batch(plan.microbatches)
    inputs, targets = inputs.to(device), targets.to(device)
    found = []
    executor.step(inputs, targets, scale)
    found.append(_gradients(executor))
    torch.cuda.set_sync_debug_mode("error")
    executor.step(inputs, targets, scale)
    torch.cuda.set_sync_debug_mode("default")
    found.append(_gradients(executor))
    graphed = GraphedStep(executor, inputs, targets, scale)
    for _ in range(2):
        graphed.step(inputs, targets)
    found.append(_gradients(executor))
    graphed.close()
    return found


@pytest.mark.parametrize(("kind", "slots"), [("edge", None), ("edge", "fewest"), ("grouped", None)])
@pytest.mark.parametrize(("schedule", "plan"), PLANS)
def test_gradients_are_those_of_the_cpu(
    kind: Literal["edge", "grouped"],
    slots: Choice | None,
    schedule: Any,
    plan: Plan,
    tmp_path: Path,
) -> None:
    want = run(on_cpu, 4, schedule, plan)
    results = run(on_gpu, 4, str(tmp_path), kind, schedule, plan, slots, limit=300)
    for rank, found in enumerate(results):
        first, *others = found
        for stage, named in first.items():
            for name, got in named.items():
                right = want[rank][stage][name]
                assert float((got - right).norm()) <= 1e-4 * float(right.norm()), (stage, name)
                assert all(torch.equal(got, other[stage][name]) for other in others), (stage, name)


def recorded(rank: int, folder: str, kind: Literal["edge", "grouped"]) -> list[Timeline | None]:
    """Timelines of a step in which the host may not wait, and of a graph's, on process 0."""
    device = share_gpu(rank, folder)
    plan, overlap = Plan(2, 4), kind == "grouped"  # else members of a group go their own ways
    program = compile(
        one_f_one_b, plan, tp=2, model=TRANSPORTS[kind].model, tied=True, clip=True, overlap=overlap
    )  # fmt: skip
    transport = nccl(program, device, kind)
    executor = gpt_executor(program, transport, device, record=True)
    inputs, targets, scale = batch(plan.microbatches)
    inputs, targets = inputs.to(device), targets.to(device)
    executor.step(inputs, targets, scale)
    torch.cuda.set_sync_debug_mode("error")
    executor.step(inputs, targets, scale)
    torch.cuda.set_sync_debug_mode("default")
    found = [measured(executor, transport)]
    graphed = GraphedStep(executor, inputs, targets, scale)
    graphed.step(inputs, targets)
    found.append(measured(executor, transport))
    graphed.close()
    return found


@pytest.mark.parametrize("kind", ["edge", "grouped"])
def test_a_recorded_step_is_a_legal_timeline(
    kind: Literal["edge", "grouped"], tmp_path: Path
) -> None:
    first, *others = run(recorded, 4, str(tmp_path), kind, limit=300)
    assert others == [[None, None]] * 3
    for timeline in first:
        assert timeline.kind == "measured" and 0 < timeline.span < 60
        # What is seen beside a lane, and what waits for that lane, are told apart by the GPU
        # alone, on which four processes take turns.
        assert 0 < timeline.clock_error < 1e-3 and not too_early(timeline, 5e-3)


def late_gather(rank: int, folder: str) -> tuple[bool, bool]:
    """Whether a layer's sum waits for a gather before it whose message is late; and what is in."""
    device = share_gpu(rank, folder)
    transport = nccl(compile(one_f_one_b, Plan(2, 4), tp=2), device)
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=transport.tp_group)
    whole = torch.zeros(2, device=device)
    part = whole[transport.tp_rank :][:1]
    part.fill_(1 + transport.tp_rank)
    torch.cuda.synchronize()
    with transport.aside():
        torch.cuda._sleep(4_000_000_000)  # cycles, on the stream that waits for messages
        gather: Any = transport.collective("all_gather", "tp", whole, part)
    dist.all_reduce(one, group=transport.tp_group)
    summed = torch.cuda.Event()
    summed.record()
    summed.synchronize()
    waited = gather.event.query()
    gather.wait()
    return waited, whole.tolist() == [1, 2]


def test_a_late_gather_holds_up_no_layer(tmp_path: Path) -> None:
    assert run(late_gather, 4, str(tmp_path), limit=300) == [(False, True)] * 4
