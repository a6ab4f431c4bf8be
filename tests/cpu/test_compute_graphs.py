"""What a rank computes as graphs has the bits of a step, where messages are on streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ModelError
from schedir.ir.ops import COMPUTE
from schedir.ir.plan import Plan
from schedir.runtime import compute_graphs, split_linears
from schedir.runtime.boundary import Boundary
from schedir.runtime.compute_graphs import GraphedComputes
from schedir.runtime.executor import Executor
from schedir.runtime.precision import LossScale
from schedir.schedules import dualpipe, interleaved, one_f_one_b, pipedream_2bw, zb_h1
from tests.cpu import replayed
from tests.cpu.spawn import run
from tests.cpu.test_warmup import Streamed
from tests.cpu.virtual_gpu import install

WIDTH = 8


class Case(NamedTuple):
    schedule: Any
    plan: Plan
    dp: int = 1
    slots: Any = None
    scaled: bool = False
    recompute: str | None = None


CASES = {
    "1f1b": Case(one_f_one_b, Plan(2, 4)),
    "split, slots shared": Case(zb_h1, Plan(2, 4), slots="fewest"),
    "interleaved": Case(interleaved, Plan(2, 4, 2), slots="enough"),
    "two holders": Case(dualpipe, Plan(2, 4, 2, "mirror")),
    "replicas": Case(one_f_one_b, Plan(1, 3), dp=2),
    "scaled": Case(one_f_one_b, Plan(2, 4), scaled=True),
    "recomputed": Case(one_f_one_b, Plan(2, 4), slots="fewest", recompute="all"),
    "recomputed and split": Case(zb_h1, Plan(2, 4), recompute="all"),
}


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH)]
    module = nn.Sequential(*layers[: 3 - number % 2])
    split_linears(module)
    return module


def batch(step: int, m: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(m, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.flip(-1)


def executor_of(case: Case) -> Executor:
    program = compile(
        case.schedule, case.plan, dp=case.dp, model="edge", overlap=True, clip=True,
        slots=case.slots, recompute=case.recompute,
    )  # fmt: skip
    transport = Streamed(program)
    frozen = case.plan.rows > 1 or case.dp > 1  # whose statistics would not be one
    stages = {s: stage(s).train(not frozen) for s in program.plan.stages_of[transport.rank]}
    parameters = [p for module in stages.values() for p in module.parameters()]
    return Executor(
        program, transport.rank, stages, transport, loss=nn.functional.mse_loss,
        boundary=Boundary((3, WIDTH)), max_norm=1.0,
        optimizer=torch.optim.AdamW(parameters, 0.05, fused=True),
        loss_scale=LossScale(8.0, interval=2) if case.scaled else None,
    )  # fmt: skip


def steps(rank: int, name: str, graphed: bool) -> list[Any]:
    """Losses, weights and buffers after three steps, whose learning rates and scales change."""
    case, found = CASES[name], list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        if graphed:
            install(patch)
            replayed.install(patch)
            patch.setattr(compute_graphs, "require_gpu", lambda executor: None)
        executor = executor_of(case)
        if graphed:
            executor.record = False  # its events are those of a GPU
            graphs = GraphedComputes(executor, *batch(9, case.plan.microbatches))
        for step in range(3):
            executor.state.optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)  # type: ignore[union-attr]
            how: Any = graphs if graphed else executor
            loss = how.step(*batch(step, case.plan.microbatches), 1.0 / (step + 1))
            found.append(None if loss is None else loss.clone())
            found.append(executor.norm.clone())
        if graphed:
            computes = sum(i.op in COMPUTE for i in executor.state.stream)
            ran = [one.graph.replays for one in graphs.graphs.values()]
            assert len(ran) == computes and min(ran) >= 3
            graphs.close()
            executor.step(*batch(3, case.plan.microbatches))
        else:
            executor.step(*batch(3, case.plan.microbatches))
        for one in executor.stages.values():
            found += [t.detach().clone() for t in one.module.state_dict().values()]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_steps(name: str) -> None:
    processes = CASES[name].plan.ranks * CASES[name].dp
    graphed, plain = (run(steps, processes, name, on) for on in (True, False))
    for one, other in zip(graphed, plain, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def refusals(rank: int) -> list[str]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        replayed.install(patch)
        executor = executor_of(CASES["replicas"]._replace(dp=1))
        with pytest.raises(ModelError) as error:
            GraphedComputes(executor, *batch(0, 3))
        found.append(error.value.fact)
        install(patch)
        patch.setattr(compute_graphs, "require_gpu", lambda executor: None)
        executor = executor_of(Case(pipedream_2bw, Plan(1, 4, updates=2, delay=1)))
        with pytest.raises(ModelError) as error:
            GraphedComputes(executor, *batch(0, 4))
        found.append(error.value.fact)
        executor = executor_of(CASES["replicas"]._replace(dp=1))
        executor.record = False
        graphs = GraphedComputes(executor, *batch(0, 3))
        for wrong in (
            batch(0, 2),
            [x[:, :2] for x in batch(0, 3)],
            [x.double() for x in batch(0, 3)],
        ):
            with pytest.raises(ModelError) as error:
                graphs.step(*wrong)
            found.append(error.value.fact)
    return found


def test_what_cannot_be_captured_is_refused() -> None:
    (said,) = run(refusals, 1)
    assert "is on cpu" in said[0] and "versions" in said[1]
    assert "is given 2" in said[2] and "[2, 8]" in said[3] and "float64" in said[4]
