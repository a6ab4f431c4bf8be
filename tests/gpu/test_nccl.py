"""Tests of a tensor-parallel GPT in a pipeline over real NCCL, with 2 x 2 processes on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedir import compile
from schedir.analysis.progress_models import ProgressModel
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.passes.pass_types import BufferSharing
from schedir.predict.timeline import Timeline
from schedir.runtime.executor import Executor
from schedir.runtime.executor_options import ExecutionOptions
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.schedules import interleaved, one_f_one_b
from schedir.transports.gloo import GlooTransport
from schedir.transports.registry import TRANSPORTS
from tests.cpu.gloo_processes import run_fresh as run
from tests.cpu.tiny_stages import gpt_executor, gradients_by_stage, make_batch, split_1f1b
from tests.gpu.shared import REHEARSED, Kind, make_transport, no_wait, share_gpu
from tests.timeline_legality import find_early_instructions

PLANS = [
    (one_f_one_b, PipelineShape(2, 4)),
    (split_1f1b, PipelineShape(2, 4)),
    (interleaved, PipelineShape(2, 4, 2)),
]
Gradients = dict[int, dict[str, Tensor]]


def compile_program(
    schedule: Any,
    shape: PipelineShape,
    progress_model: ProgressModel,
    buffer_sharing: BufferSharing | None = None,
) -> Program:
    return compile(
        schedule, shape, tp=2, progress_model=progress_model, tied_weights=True, overlap=True,
        buffer_sharing=buffer_sharing,
    )  # fmt: skip


def copy_gradients(executor: Executor) -> Gradients:
    by_stage = gradients_by_stage(executor).items()
    return {s: {name: g.cpu() for name, g in grads.items()} for s, grads in by_stage}


def compute_cpu_gradients(rank: int, schedule: Any, shape: PipelineShape) -> Gradients:
    program = compile_program(schedule, shape, GlooTransport.progress_model)
    executor = gpt_executor(program, GlooTransport(program))
    executor.step(*make_batch(shape.microbatches))
    return copy_gradients(executor)


def make_executor(
    rank: int,
    folder: str,
    kind: Kind,
    schedule: Any,
    shape: PipelineShape,
    buffer_sharing: BufferSharing | None,
) -> tuple[Executor, tuple[Tensor, Tensor, float]]:
    """Return an executor on the GPU, and its batch."""
    device = share_gpu(rank, folder)
    torch.use_deterministic_algorithms(True)
    program = compile_program(
        schedule, shape, TRANSPORTS[f"nccl_{kind}"].progress_model, buffer_sharing
    )
    executor = gpt_executor(program, make_transport(program, device, kind), device)
    inputs, targets, scale = make_batch(shape.microbatches)
    return executor, (inputs.to(device), targets.to(device), scale)


def compute_eager_gradients(rank: int, *arguments: Any) -> list[Gradients]:
    """Return the gradients of a first step, and of a second step without host waits."""
    executor, step_inputs = make_executor(rank, *arguments)
    executor.step(*step_inputs)
    results = [copy_gradients(executor)]
    with no_wait():
        executor.step(*step_inputs)
    return [*results, copy_gradients(executor)]


TRANSPORT_OPTIONS = [("per_edge", None), ("per_edge", "minimal"), ("grouped", None)]


@pytest.mark.parametrize(("kind", "buffer_sharing"), TRANSPORT_OPTIONS)
@pytest.mark.parametrize(("schedule", "shape"), PLANS)
def test_eager_gradients_match_cpu(
    kind: Kind,
    buffer_sharing: BufferSharing | None,
    schedule: Any,
    shape: PipelineShape,
    tmp_path: Path,
) -> None:
    expected = run(compute_cpu_gradients, 4, schedule, shape)
    results = run(
        compute_eager_gradients, 4, str(tmp_path), kind, schedule, shape, buffer_sharing, limit=250
    )
    for rank, (first_gradients, second_gradients) in enumerate(results):
        for stage, stage_grads in first_gradients.items():
            for name, got in stage_grads.items():
                want, place = expected[rank][stage][name], (stage, name)
                assert float((got - want).norm()) <= 1e-4 * float(want.norm()), place
                assert torch.equal(got, second_gradients[stage][name]), (stage, name)


def record_timeline(rank: int, folder: str, kind: Kind) -> Timeline | None:
    """Record a step without host waits, and return its Timeline on process 0."""
    device = share_gpu(rank, folder)
    # Only the grouped transport needs overlap: otherwise members of a group are independent.
    shape, overlap = PipelineShape(2, 4), kind == "grouped"
    program = compile(
        one_f_one_b, shape, tp=2, progress_model=TRANSPORTS[f"nccl_{kind}"].progress_model,
        tied_weights=True, clip_grad_norm=True, overlap=overlap,
    )  # fmt: skip
    transport = make_transport(program, device, kind)
    executor = gpt_executor(
        program, transport, device, execution=ExecutionOptions(record_timestamps=True)
    )
    inputs, targets, scale = make_batch(shape.microbatches)
    inputs, targets = inputs.to(device), targets.to(device)
    executor.step(inputs, targets, scale)
    with no_wait():
        executor.step(inputs, targets, scale)
    return gather_timeline(executor, transport)


def assert_legal(timelines: list[Timeline | None]) -> None:
    first_timeline, *others = timelines
    assert others == [None] * 3 and first_timeline is not None
    assert first_timeline.kind == "measured" and 0 < first_timeline.span < 60
    # The clock error depends on the GPU, on which four processes take turns.
    assert REHEARSED or (
        0 < first_timeline.clock_error < 1e-3 and not find_early_instructions(first_timeline, 5e-3)
    )


@pytest.mark.parametrize("kind", ["per_edge", "grouped"])
def test_recorded_eager_step_is_legal_timeline(kind: Kind, tmp_path: Path) -> None:
    assert_legal(run(record_timeline, 4, str(tmp_path), kind, limit=250))


def run_late_gather(rank: int, folder: str) -> tuple[bool, bool]:
    """Return whether a layer's sum waits for a late gather, and whether the gather is right."""
    device = share_gpu(rank, folder)
    transport = make_transport(compile(one_f_one_b, PipelineShape(2, 4), tp=2), device)
    summand = torch.ones(1, device=device)
    dist.all_reduce(summand, group=transport.tp_group)
    gathered = torch.zeros(2, device=device)
    shard = gathered[transport.tp_rank :][:1]
    shard.fill_(1 + transport.tp_rank)
    torch.cuda.synchronize()
    with transport.side_stream():
        torch.cuda._sleep(4_000_000_000)  # cycles on the stream that waits for messages
        gather: Any = transport.start_collective("all_gather", "tp", gathered, shard)
    dist.all_reduce(summand, group=transport.tp_group)
    summed = torch.cuda.Event()
    summed.record()
    summed.synchronize()
    waited = gather.event.query()
    gather.wait()
    return waited, gathered.tolist() == [1, 2]


@pytest.mark.usefixtures("real_gpu")
def test_late_gather_does_not_delay_layer_sum(tmp_path: Path) -> None:
    assert run(run_late_gather, 4, str(tmp_path), limit=300) == [(False, True)] * 4
