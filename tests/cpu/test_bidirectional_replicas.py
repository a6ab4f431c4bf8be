"""Tests that stage replicas have the same gradients, and the same bits after a step."""

from __future__ import annotations

import random
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schedir.compiler.compile import compile
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.models import gpt
from schedir.runtime.executor_options import GradientOptions
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.sequential_reference import run_sequential
from schedir.schedules import bitpipe, chimera, dualpipe
from schedir.testing.strategies import random_compute_program
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run
from tests.cpu.test_gloo_executor import step_on_gloo
from tests.cpu.tiny_stages import (
    BOUNDARY,
    batch,
    expected,
    gpt_executor,
    gpt_stages,
    own_batch,
    same_bits,
)

MIRROR = [
    (dualpipe, PipelineShape(2, 4, placement="mirror")),
    (dualpipe, PipelineShape(4, 8, placement="mirror")),
    (chimera, PipelineShape(4, 6, placement="mirror")),
    (chimera, PipelineShape(2, 3, placement="mirror")),
    (bitpipe, PipelineShape(4, 6, placement="mirror-vee")),
]


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The example builds BitPipe without our schedule and without a named placement."""
    found = runpy.run_path(str(Path(__file__).parents[2] / "examples/bitpipe.py"))
    for ranks, m in ((2, 2), (4, 4), (4, 7), (6, 12)):
        program = compile(found["two_vees"], found["plan_for"](ranks, m))
        ours = compile(bitpipe, PipelineShape(ranks, m, placement="mirror-vee"))
        assert program.digest == replace(ours, name="two_vees").digest
    found["main"]()
    *bubbles, ordered, plain = capsys.readouterr().out.splitlines()
    assert [line.split()[-3] == f"{line.split()[-1]}," for line in bubbles] == [True, True]
    assert ordered.endswith("in the order of the schedule: 0e+00")
    assert float(plain.split()[-1]) < 1e-6


def test_second_holders_begin_a_step_as_their_stages_are() -> None:
    """This holds after a user's own optimizer step, after a load, and in another mode."""
    shape = MIRROR[0][1]
    program = compile(dualpipe, shape, tied_weights=True)
    stages = gpt_stages(shape.stages)
    ranks = InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY)
    ranks.step(*batch(shape.microbatches))
    for stage in stages:
        torch.optim.SGD(stage.parameters(), lr=0.1).step()
        stage.eval()
    ranks.step(*batch(shape.microbatches))
    right = [stage.state_dict() for stage in stages]
    for holders in shape.replica_ranks.tolist():
        held = [ranks.executors[r].stages[s].module for s, r in enumerate(holders)]
        assert not any(stage.training for stage in held)
        assert same_bits([stage.state_dict() for stage in held], right)


@pytest.mark.parametrize(("schedule", "shape"), [MIRROR[0], (chimera, MIRROR[2][1]), MIRROR[4]])
def test_gloo(schedule: Any, shape: PipelineShape) -> None:
    program = compile(schedule, shape, tied_weights=True, progress_model="per_edge")
    loss, right = expected(shape, program=program)
    results = step_on_gloo(schedule, shape)
    for grads, _, _ in results:
        for stage, got in grads.items():
            assert same_bits([got], [right[stage]])
    halves = [
        l for _, l, _ in results if l is not None
    ]  # the loss of each direction, where it ends
    assert float(halves[0] + halves[1]) == pytest.approx(float(loss), rel=1e-6)


CROWD = PipelineShape(4, 7, placement=((0, 1, 2), (1, 2, 3), (3, 0, 1)))


def test_three_holders_on_gloo() -> None:
    """Processes may add three terms in another order, but all get the same bits."""
    draft = random_compute_program(CROWD, random.Random(3))
    program = compile(draft, progress_model="per_edge", tied_weights=True)
    _, right = expected(CROWD, program=program)
    seen: dict[int, list[dict[str, torch.Tensor]]] = {}
    for grads, _, _ in step_on_gloo(draft, CROWD):
        for stage, got in grads.items():
            seen.setdefault(stage, []).append(got)
            for name, grad in right[stage].items():
                assert float((got[name] - grad).norm()) <= 1e-6 * float(grad.norm())
    assert [len(seen[stage]) for stage in range(CROWD.stages)] == [3, 3, 3]
    for first, *others in seen.values():
        assert all(same_bits([other], [first]) for other in others)


def _train(rank: int, schedule: Any, shape: PipelineShape, steps: int, tp: int, dp: int) -> Any:
    """Return the weights of a process after some steps, and the gradient norms."""
    program = compile(
        schedule,
        shape,
        tp=tp,
        dp=dp,
        progress_model="per_edge",
        tied_weights=True,
        clip_grad_norm=True,
    )
    transport = GlooTransport(program)
    executor = gpt_executor(program, transport, lr=0.01, gradients=GradientOptions(max_norm=0.05))
    norms = []
    for step in range(steps):
        executor.step(*own_batch(program, transport, step))
        norms.append(float(executor.grad_norm))
    held = {
        s: [p.detach().clone() for p in stage.module.parameters()]
        for s, stage in executor.stages.items()
    }
    return held, norms, transport.tp_rank


@pytest.mark.parametrize(
    ("schedule", "shape", "tp", "dp"),
    [
        (*MIRROR[0], 2, 1),
        (*MIRROR[0], 1, 2),
        (random_compute_program(CROWD, random.Random(5)), CROWD, 1, 1),
    ],
)
def test_holders_stay_the_same(schedule: Any, shape: PipelineShape, tp: int, dp: int) -> None:
    """A clipped AdamW step counts each parameter once, and all its holders get the same bits."""
    steps = 2
    results = run(_train, shape.ranks * tp * dp, schedule, shape, steps, tp, dp)
    first: dict[Any, Any] = {}
    for held, norms, tp_rank in results:
        assert norms == results[0][1]
        for stage, parameters in held.items():
            same = first.setdefault((stage, tp_rank), parameters)
            assert all(torch.equal(p, q) for p, q in zip(parameters, same, strict=True))

    stages = gpt_stages(shape.stages)
    parameters = [p for stage in stages for p in stage.parameters()]
    copy = stages[-1].tied_weight
    once = [p for p in parameters if p is not copy]
    optimizer = torch.optim.AdamW(parameters, 0.01)
    for step in range(steps):
        inputs, targets, scale = batch(shape.microbatches * dp, step)
        run_sequential(stages, inputs, targets, loss=gpt.loss, grad_scale=scale)
        norm = torch.stack([p.grad.square().sum() for p in once if p.grad is not None]).sum().sqrt()
        assert results[0][1][step] == pytest.approx(float(norm), rel=1e-4)
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(min(1.0, 0.05 / (float(norm) + 1e-6)))
        optimizer.step()
    if tp == 1:
        for (stage, _), got in first.items():
            for p, q in zip(got, stages[stage].parameters(), strict=True):
                assert float((p - q.detach()).norm() / q.detach().norm()) < 1e-3
