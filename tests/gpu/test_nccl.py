"""A tensor-parallel GPT in a pipeline, over real NCCL: 2 x 2 processes on one GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schedir import compile, gpt
from schedir.plan import Plan
from schedir.runtime.c10d import Gloo, Processes
from schedir.runtime.executor import Executor
from schedir.runtime.graphs import GraphedStep
from schedir.runtime.nccl import MODELS, Kind, nccl
from schedir.runtime.warm import warm_up
from schedir.schedules import interleaved, one_f_one_b
from tests.gloo.spawn import run
from tests.gloo.tiny_stages import BOUNDARY, batch, config, gradients, zb
from tests.gpu.shared import share_gpu

PLANS = [(one_f_one_b, Plan(2, 4)), (zb, Plan(2, 4)), (interleaved, Plan(2, 4, 2))]
Gradients = dict[int, dict[str, Tensor]]


def _executor(transport: Processes, schedule: Any, plan: Plan, device: torch.device) -> Executor:
    program = compile(schedule, plan, tp=2, model=transport.model, tied=True, overlap=True)
    cfg = config(plan.stages)
    stages = {
        s: gpt.build_stage(cfg, s, plan.stages, tp=transport.tp_group).to(device)
        for s in plan.stages_of[transport.rank]
    }
    return Executor(
        program,
        transport.rank,
        stages,
        transport,
        loss=partial(gpt.loss, tp=transport.tp_group),
        boundary=BOUNDARY,
        record=False,
    )


def _gradients(executor: Executor) -> Gradients:
    own = {s: gradients([stage.module])[0] for s, stage in executor.stages.items()}
    return {s: {name: g.cpu() for name, g in named.items()} for s, named in own.items()}


def on_cpu(rank: int, schedule: Any, plan: Plan) -> Gradients:
    program = compile(schedule, plan, tp=2, tied=True)
    executor = _executor(Gloo(program), schedule, plan, torch.device("cpu"))
    executor.step(*batch(plan.microbatches))
    return _gradients(executor)


def on_gpu(rank: int, folder: str, kind: Kind, schedule: Any, plan: Plan) -> list[Gradients]:
    """Gradients of a first step, of one in which the host may not wait, and of a graph's."""
    device = share_gpu(rank, folder)
    torch.use_deterministic_algorithms(True)
    program = compile(schedule, plan, tp=2, model=MODELS[kind], tied=True, overlap=True)
    executor = _executor(nccl(program, device, kind), schedule, plan, device)
    inputs, targets, scale = batch(plan.microbatches)
    inputs, targets = inputs.to(device), targets.to(device)
    warm_up(executor, inputs[0], targets[0])
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
    return found


@pytest.mark.parametrize("kind", ["edge", "grouped"])
@pytest.mark.parametrize(("schedule", "plan"), PLANS)
def test_gradients_are_those_of_the_cpu(
    kind: Kind, schedule: Any, plan: Plan, tmp_path: Path
) -> None:
    want = run(on_cpu, 4, schedule, plan)
    for rank, found in enumerate(run(on_gpu, 4, str(tmp_path), kind, schedule, plan, limit=300)):
        first, *others = found
        for stage, named in first.items():
            for name, got in named.items():
                right = want[rank][stage][name]
                assert float((got - right).norm()) <= 1e-4 * float(right.norm()), (stage, name)
                assert all(torch.equal(got, other[stage][name]) for other in others), (stage, name)
