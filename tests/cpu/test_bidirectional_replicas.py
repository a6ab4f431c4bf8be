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
from schedir.schedules import bitpipe, dualpipe
from schedir.testing.strategies import random_compute_program
from schedir.transports.gloo import GlooTransport
from tests.cases import cases
from tests.cpu.gloo_processes import run
from tests.cpu.tiny_stages import (
    BOUNDARY,
    gpt_config,
    gpt_executor,
    gpt_stages,
    have_same_bits,
    make_batch,
    make_replica_batch,
)

DUALPIPE = dualpipe, PipelineShape(2, 4, placement="mirror")


def test_bitpipe_example_builds_built_in_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """The example builds BitPipe without our schedule and without a named placement."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/bitpipe.py"))
    for ranks, m in ((2, 2), (4, 4), (4, 7), (6, 12)):
        program = compile(example["two_vees"], example["plan_for"](ranks, m))
        built_in = compile(bitpipe, PipelineShape(ranks, m, placement="mirror-vee"))
        assert program.digest == replace(built_in, name="two_vees").digest
    example["main"]()
    *bubbles, ordered, plain = capsys.readouterr().out.splitlines()
    assert [line.split()[-3] == f"{line.split()[-1]}," for line in bubbles] == [True, True]
    assert ordered.endswith("in the order of the schedule: 0e+00")
    assert float(plain.split()[-1]) < 1e-6


def test_stage_replicas_copy_weights_and_mode_before_step() -> None:
    """A user's optimizer step changed the weights, and `eval` changed the mode."""
    shape = DUALPIPE[1]
    program = compile(dualpipe, shape, tied_weights=True)
    stages = gpt_stages(shape.stages)
    ranks = InProcessExecutor(program, stages, loss=gpt.loss, boundary=BOUNDARY)
    ranks.step(*make_batch(shape.microbatches))
    for stage in stages:
        torch.optim.SGD(stage.parameters(), lr=0.1).step()
        stage.eval()
    ranks.step(*make_batch(shape.microbatches))
    expected_states = [stage.state_dict() for stage in stages]
    for replica_ranks in shape.replica_ranks.tolist():
        replicas = [ranks.executors[r].stages[s].module for s, r in enumerate(replica_ranks)]
        assert not any(stage.training for stage in replicas)
        assert have_same_bits([stage.state_dict() for stage in replicas], expected_states)


REPLICAS = PipelineShape(4, 7, placement=((0, 1, 2), (1, 2, 3), (3, 0, 1)))


def _train(rank: int, schedule: Any, shape: PipelineShape, steps: int, tp: int, dp: int) -> Any:
    """Return the weights of a process after some steps, and the gradient norms."""
    program = compile(
        schedule, shape, tp=tp, dp=dp, progress_model="per_edge", tied_weights=True,
        clip_grad_norm=True,
    )  # fmt: skip
    transport = GlooTransport(program)
    executor = gpt_executor(program, transport, lr=0.01, gradients=GradientOptions(max_norm=0.05))
    norms = []
    for step in range(steps):
        executor.step(*make_replica_batch(program, transport, step))
        norms.append(float(executor.grad_norm))
    weights = {
        s: {n: p.detach().clone() for n, p in stage.module.named_parameters()}
        for s, stage in executor.stages.items()
    }
    return weights, norms, transport.tp_rank


@pytest.mark.parametrize(
    ("schedule", "shape", "tp", "dp"),
    cases(
        [(*DUALPIPE, 1, 2), (random_compute_program(REPLICAS, random.Random(5)), REPLICAS, 1, 1)],
        [(*DUALPIPE, 2, 1)],
    ),
)
def test_stage_replicas_keep_equal_weights(
    schedule: Any, shape: PipelineShape, tp: int, dp: int
) -> None:
    """A clipped AdamW step counts each parameter once, and its replicas get equal bits."""
    steps = 2
    results = run(_train, shape.ranks * tp * dp, schedule, shape, steps, tp, dp)
    weights_by_stage: dict[Any, Any] = {}
    for weights, norms, tp_rank in results:
        assert norms == results[0][1]
        for stage, parameters in weights.items():
            first_weights = weights_by_stage.setdefault((stage, tp_rank), parameters)
            assert have_same_bits([parameters], [first_weights])
    model = gpt.build_stage(gpt_config(shape.stages), 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets, scale = make_batch(shape.microbatches * dp, step)
        run_sequential([model], inputs, targets, loss=gpt.loss, grad_scale=scale)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert results[0][1][step] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
    for parameters in weights_by_stage.values() if tp == 1 else ():
        for name, p in parameters.items():
            is_tied = name == "head.weight"
            q = model.get_parameter("embedding.weight" if is_tied else name).detach()
            assert float((p - q).norm() / q.norm()) < 1e-3
