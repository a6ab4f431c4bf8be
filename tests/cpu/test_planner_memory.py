"""Tests that the planner predicts exactly the memory that the trainer measures for its GPT."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from schedir.analysis.memory.footprint import compute_footprints
from schedir.ir.cost.cluster import Cluster
from schedir.models import gpt
from schedir.models.gpt_config import GPTConfig
from schedir.planner import ParallelPlan, TransformerSpec
from schedir.planner.estimate.simulated_estimate import simulate_plan
from schedir.planner.plan_compilation import CPU_COMPILE_OPTIONS, build_pipeline_shape, plan_program
from schedir.planner.trainer_profile import compute_trainer_sizes
from schedir.runtime import Boundary, measure_sizes
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run

NAMES = ("saved", "deferred_wgrad", "saved_and_deferred", "recompute_inputs", "params", "grads",
         "optimizer")  # fmt: skip
MACHINE = Cluster(1, 4, flops=1e10, memory=1e10, hbm_bandwidth=1e10, nvlink_bandwidth=1e9,
    network_bandwidth=1e9, latency=1e-4,
               itemsize=4, processors=2)  # fmt: skip


def measure_trainer_sizes(model: TransformerSpec, choice: ParallelPlan, tp: Any = None) -> Any:
    """Return the sizes that `schedir train` measures before its first step."""
    config = GPTConfig(
        vocab=model.vocab, layers=model.layers, hidden=model.hidden, heads=model.heads,
        context=model.sequence, tied=model.tied,
    )  # fmt: skip
    parts = choice.layers_per_stage or None
    stages = [
        gpt.build_stage(config, s, choice.stages, tp=tp, layers_per_stage=parts)
        for s in range(choice.stages)
    ]
    tokens = torch.zeros(choice.microbatch_size, model.sequence, dtype=torch.int64)
    return measure_sizes(
        stages, tokens, tokens, loss=partial(gpt.loss, tp=tp),
        boundary=Boundary((choice.microbatch_size, model.sequence, model.hidden)),
    )  # fmt: skip


UNTIED = TransformerSpec(layers=6, hidden=96, heads=8, vocab=40, sequence=16, tied=False)
SMALL = TransformerSpec(layers=4, hidden=64, heads=4, vocab=100, sequence=32)


@pytest.mark.parametrize(
    ("model", "choice"),
    [
        (SMALL, ParallelPlan(pp=4, microbatch_size=2, microbatches=8)),
        (SMALL, ParallelPlan(pp=2, stages_per_rank=2, microbatches=4, schedule="interleaved")),
        (SMALL, ParallelPlan(pp=2, microbatch_size=3, microbatches=4, schedule="zb_h1",
                             layers_per_stage=(3, 1))),
        (UNTIED, ParallelPlan(pp=3, microbatches=3)),
        (SMALL, ParallelPlan(pp=1, microbatch_size=2, microbatches=2)),
    ],
)  # fmt: skip
def test_predicted_sizes_equal_measured_sizes(model: TransformerSpec, choice: ParallelPlan) -> None:
    predicted = compute_trainer_sizes(model, choice, build_pipeline_shape(choice))
    actual = measure_trainer_sizes(model, choice)
    for name in NAMES:
        pair = [x.for_stages(name, choice.stages).tolist() for x in (predicted, actual)]
        assert pair[0] == pair[1], name


def measure_tensor_parallel_sizes(rank: int, choice: ParallelPlan) -> list[list[float]]:
    """Return the sizes that a tensor-parallel rank measures."""
    program = plan_program(ParallelPlan(tp=2, microbatches=choice.microbatches), tied_weights=True)
    sizes = measure_trainer_sizes(SMALL, choice, GlooTransport(program).tp_group)
    return [sizes.for_stages(name, choice.stages).tolist() for name in NAMES]


def test_predicted_tensor_parallel_sizes_equal_measured_sizes() -> None:
    choice = ParallelPlan(pp=2, tp=2, microbatch_size=2, microbatches=4)
    predicted = compute_trainer_sizes(SMALL, choice, build_pipeline_shape(choice))
    for measured in run(measure_tensor_parallel_sizes, 2, choice):
        for name, sizes in zip(NAMES, measured, strict=True):
            assert predicted.for_stages(name, choice.stages).tolist() == sizes, name


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_predicted_peak_equals_largest_rank(recompute: Any) -> None:
    """The trainer prints this peak before its first step."""
    choice = ParallelPlan(
        pp=4, microbatch_size=2, microbatches=8, recompute=recompute, attention="flash"
    )
    program = plan_program(choice, tied_weights=True, **CPU_COMPILE_OPTIONS)
    peak = max(
        float(rank.total_bytes.max())
        for rank in compute_footprints(program, measure_trainer_sizes(SMALL, choice))
    )
    assert simulate_plan(SMALL, MACHINE, choice).memory.total == peak
